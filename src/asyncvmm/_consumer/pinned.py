"""A word for whoever waits for the next batch and keeps, unknowingly, the last one.

A view in a variable keeps its owner, also after the release; a loop variable keeps it until the
next turn.  If the exporter waits for that very owner before it sends more, both wait for ever, and
nothing is wrong on either side.  So this is said, once, in the process where the variable is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from asyncvmm._consumer.lease import Lease

logger = logging.getLogger("asyncvmm.consumer")

PATIENCE = 1.0
"""Seconds between two looks.  A view that outlives its release for so long, while the program
waits for more, is hardly meant to."""


class Pinned:
    """Looks now and then, while owners are released and still viewed; costs nothing else."""

    def __init__(self, live: Mapping[int, Lease], loop: asyncio.AbstractEventLoop) -> None:
        self.waits: Callable[[], bool] = lambda: False
        self._live = live
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._seen = frozenset[Lease]()  # kept at the last look, too
        self._told = False

    def note(self, *, here: bool = True) -> None:
        """Note that an owner was released while a view of it was alive; ``here``: by the loop."""
        if self._timer is None and not self._told:
            if here:
                self._timer = self._loop.call_later(PATIENCE, self._look)
            else:
                with contextlib.suppress(RuntimeError):  # the loop has ended, so nobody waits
                    self._loop.call_soon_threadsafe(self.note)

    def _look(self) -> None:
        self._timer = None
        kept = frozenset(lease for lease in self._live.values() if lease.said and not lease.done)
        long = kept & self._seen
        self._seen = kept
        for lease in kept:
            if not lease.viewed:  # a signal's handler cut the word of its last view's end short
                lease.keeper.settle_later(lease)
        if long and self.waits():
            self._told = True
            self._seen = frozenset()
            logger.warning(
                "receive() waits, while views keep %d owners that were released (%s): the exporter "
                "cannot have their memory back, and may be waiting for just that. A loop variable "
                "keeps the last view: del it, or take owner.clone()",
                len(long),
                ", ".join(sorted(f"{lease.frame.key!r:.80}" for lease in long)[:5]),
            )
        elif kept:
            self.note()

    def close(self) -> None:
        """Look no more."""
        self._told = True
        self._seen = frozenset()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
