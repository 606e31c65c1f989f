"""When what was posted in a loop turn is to leave: as the turn ends, or one turn later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized


class Due:
    """One flush for everything that is posted in a turn; on the loop's thread."""

    __slots__ = ("_flush", "_lingered", "_loop", "_queue", "lingers", "scheduled")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, queue: Sized, flush: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._queue = queue
        self._flush = flush
        self._lingered = False
        self.lingers = False
        """Whether it was put off and the turn is not over."""
        self.scheduled = False
        """Whether a flush is due: never more than one, also where something left before it."""

    def soon(self) -> None:
        """Flush as the turn ends."""
        self.scheduled = True
        self._loop.call_soon(self._turned)

    def linger(self) -> None:
        """Put it off by one turn, once, until :meth:`stop`; also if nothing is queued yet."""
        if not self._lingered:
            self.lingers = True

    def stop(self) -> None:
        """Linger no more: what was queued has left, or nothing follows it."""
        self.lingers = self._lingered = False

    def _turned(self) -> None:
        if self.lingers and len(self._queue):
            self.lingers, self._lingered = False, True
            self._loop.call_soon(self._turned)
        else:
            self.scheduled = False
            self._flush()
