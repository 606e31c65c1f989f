"""How long an event loop keeps others waiting, and how much of that it worked."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass, field


@dataclass
class Gaps:
    """What a heartbeat found, in seconds, beat by beat."""

    whole: array[float] = field(default_factory=lambda: array("d"))
    """From a beat until the loop came to it."""
    busy: array[float] = field(default_factory=lambda: array("d"))
    """CPU time of the loop's thread meanwhile: what is left of ``whole`` is the scheduler's."""


class Heartbeat:
    """Measures the gaps of the running loop until it is stopped.

    A thread writes to an eventfd every millisecond; the gap is what passes until the loop comes
    to its reader.  Timers of both loops have a resolution of 1 ms and would hide what is shorter.
    """

    def __init__(self) -> None:
        self._gaps = Gaps()
        self._stamps: deque[tuple[float, float]] = deque()
        self._cpu = time.pthread_getcpuclockid(threading.get_ident())
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._heard)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(0.001):
            self._stamps.append((time.perf_counter(), time.clock_gettime(self._cpu)))
            os.eventfd_write(self._fd, 1)

    def _heard(self) -> None:
        os.eventfd_read(self._fd)
        now, worked = time.perf_counter(), time.thread_time()
        while self._stamps:
            beaten, before = self._stamps.popleft()
            self._gaps.whole.append(now - beaten)
            self._gaps.busy.append(worked - before)

    def stop(self) -> Gaps:
        """Return every gap.  Keeps the loop for up to a millisecond, at the end."""
        self._stop.set()
        self._thread.join()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        return self._gaps
