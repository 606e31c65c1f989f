"""When what was posted in a loop turn is to leave: as the turn ends, or one turn later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized


class Due:
    """One flush for everything that is posted in a turn; on the loop's thread."""

    __slots__ = ("_flush", "_lingers", "_loop", "_queue", "scheduled")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, queue: Sized, flush: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._queue = queue
        self._flush = flush
        self._lingers: bool | None = None  # None: not asked to; False: has done so
        self.scheduled = False
        """Whether a flush is due: never more than one, also where something left before it."""

    @property
    def lingers(self) -> bool:
        """Whether it was put off and the turn is not over."""
        return bool(self._lingers)

    def soon(self) -> None:
        """Flush as the turn ends."""
        self.scheduled = True
        self._loop.call_soon(self._turned)

    def linger(self) -> None:
        """Put it off by one turn, once, until :meth:`stop`; also if nothing is queued yet."""
        if self._lingers is None:
            self._lingers = True

    def stop(self) -> None:
        """Linger no more: what was queued has left, or nothing follows it."""
        self._lingers = None

    def _turned(self) -> None:
        if self._lingers and len(self._queue):
            self._lingers = False
            self._loop.call_soon(self._turned)
        else:
            self.scheduled = False
            self._flush()
