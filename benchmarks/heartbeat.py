"""How long an event loop keeps others waiting."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque


class Heartbeat:
    """Measures the gaps of the running loop until it is stopped.

    A thread writes to an eventfd every millisecond; the gap is what passes until the loop comes
    to its reader.  Timers of both loops have a resolution of 1 ms and would hide what is shorter.
    """

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._stamps: deque[float] = deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._heard)
        self._thread = threading.Thread(target=self._beat, daemon=True)
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

    def stop(self) -> list[float]:
        """Return every gap in seconds.  Keeps the loop for up to a millisecond, at the end."""
        self._stop.set()
        self._thread.join()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        return self.gaps
