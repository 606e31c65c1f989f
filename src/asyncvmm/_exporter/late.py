"""Fences that the driver refused to make: it is asked again until it makes them.

A refusal may pass: an event is free again, some memory is.  Until then nobody knows whether the
bytes are still in use, so the slot drains on, and never is free by guess (inv. 4).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from asyncvmm._backends.base import Fence
from asyncvmm._errors import BackendError, DeviceLostError

logger = logging.getLogger("asyncvmm.exporter")

AGAIN_SECONDS = 0.02
"""Between two tries.  A try that fails costs some microseconds of the watcher's thread."""


class LateFence:
    """A fence that is not done before ``make`` has made it, in whichever thread asks."""

    def __init__(self, make: Callable[[], Fence | None]) -> None:
        self._make = make
        self._fence: Fence | None = None
        self._next = 0.0
        self._given_up = False
        self._lock = threading.Lock()

    @property
    def made(self) -> bool:
        """Say whether the driver has made it."""
        return self._fence is not None

    def done(self) -> bool:
        """Say whether it is made and done."""
        with self._lock:
            fence = self._fence
            if self._given_up:
                return True
            if fence is None:
                now = monotonic()
                if now < self._next:
                    return False
                self._next = now + AGAIN_SECONDS
                try:
                    fence = self._fence = self._make()
                except DeviceLostError:
                    raise
                except BackendError as error:
                    logger.debug("still refused: %s", error)
                    return False
        return fence is None or fence.done()

    def give_up(self) -> None:
        """Make nothing from now on: whose fence it is is dead."""
        with self._lock:
            self._given_up = True
