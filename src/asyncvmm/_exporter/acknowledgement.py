"""What a send returns: the answer to "has everybody let go of it?"."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from copy import copy
from typing import Literal

from asyncvmm._core.ledger import Record
from asyncvmm._errors import AsyncVMMError, DeliveryError
from asyncvmm._io.busy import Busy
from asyncvmm._io.waiting import wake
from asyncvmm._types import Key, Outcome

Require = Literal["all", "any", "none"]


class Acknowledgement:
    """Await it to learn that an owner's memory is back in the pool.

    Done when every consumer that was to see the owner has let go of it and its reads are over on
    the device.  Awaiting it returns the :class:`asyncvmm.Outcome`, or raises
    :class:`asyncvmm.DeliveryError` if fewer consumers released it than ``require`` asks for.
    It may be awaited any number of times, by any number of tasks, or never.  Cancelling a waiter
    changes nothing else.
    """

    __slots__ = ("_busy", "_error", "_record", "_require", "_waiters", "key")

    def __init__(self, key: Key, require: Require, busy: Busy) -> None:
        self.key = key
        self._require = require
        self._busy: Busy | None = busy  # until it is done, for it knows the exporter
        self._record: Record | None = None  # once it is settled: who let go, and how
        self._error: AsyncVMMError | None = None
        self._waiters: list[asyncio.Future[None]] | None = None

    def done(self) -> bool:
        """Say whether the owner's memory is back."""
        return self._busy is None

    @property
    def outcome(self) -> Outcome | None:
        """Who let go, and how; None while somebody has not."""
        return None if self._record is None else self._record.outcome

    def __await__(self) -> Generator[object, None, Outcome]:
        """Wait until it is done; wakes in the loop turn in which the last release arrives."""
        busy = self._busy
        if busy is not None:
            waiter = asyncio.get_running_loop().create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            try:
                # Only the wake-up travels through the future: the outcome stays here (inv. 9).
                with busy:
                    yield from waiter
            except BaseException:
                if self._waiters is not None:
                    self._waiters.remove(waiter)
                raise
        return self.result()

    def result(self) -> Outcome:
        """Return the outcome of an acknowledgement that is done, or raise as awaiting would."""
        if self._error is not None:
            # A copy: a raised error keeps the frames, and so the tensors, of who caught it.
            raise copy(self._error)
        record = self._record
        if record is None:
            raise asyncio.InvalidStateError(f"owner {self.key!r} is not acknowledged yet")
        outcome = record.outcome
        if not record.refused and not record.lost:
            return outcome
        short = (self._require == "all" and not outcome.complete) or (
            self._require == "any" and not outcome.released
        )
        if short:
            raise DeliveryError(
                f"owner {self.key!r}: {len(outcome.released)} released it, "
                f"refused: {dict(outcome.refused)}, lost: {list(outcome.lost)}; its memory is "
                f"free again, send it again if it still matters",
                outcome=outcome,
            )
        return outcome

    def __repr__(self) -> str:
        return f"<Acknowledgement {self.key!r} {self.outcome or self._error or 'pending'}>"

    def _settle(self, record: Record | None, error: AsyncVMMError | None = None) -> None:
        """Finish it, once, and wake whoever waits."""
        if self._busy is None:
            return
        self._record = record
        self._error = error
        self._busy = None  # after those two, for other threads may ask whether it is done
        if self._waiters is not None:
            wake(self._waiters)
            self._waiters = None
