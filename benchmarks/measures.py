"""What several benchmarks measure with."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from typing import Any

import torch


class Counting:
    """Stands before the bindings and counts the calls that the library makes."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bindings, name)
        if not name.startswith("cu"):
            return found

        def counted(*args: object) -> Any:
            self.calls[name] += 1
            return found(*args)

        return counted


class Heartbeat:
    """Measures how long the event loop keeps others waiting.

    A thread writes to an eventfd every millisecond; the gap is what passes until the loop comes
    to its reader.  Timers of both loops have a resolution of 1 ms and would hide what is shorter.
    """

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._stamps: deque[float] = deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = threading.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._heard)
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(0.001):
            self._stamps.append(time.perf_counter())
            os.eventfd_write(self._fd, 1)

    def _heard(self) -> None:
        os.eventfd_read(self._fd)
        now = time.perf_counter()
        while self._stamps:
            self.gaps.append(now - self._stamps.popleft())

    async def stop(self) -> list[float]:
        """Return every gap in seconds."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        return self.gaps


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def machine() -> dict[str, str]:
    """Return what the numbers were taken on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(0),
        "devices": str(torch.cuda.device_count()),
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split("\n")[0],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "commit": os.environ.get("ASYNCVMM_COMMIT", "")
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
