"""What a send returns: the answer to "has everybody let go of it?"."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Literal

from asyncvmm._errors import AsyncVMMError, DeliveryError
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

    __slots__ = ("_error", "_outcome", "_require", "_waiters", "key")

    def __init__(self, key: Key, require: Require) -> None:
        self.key = key
        self._require = require
        self._outcome: Outcome | None = None
        self._error: AsyncVMMError | None = None
        self._waiters: list[asyncio.Future[None]] | None = None

    def done(self) -> bool:
        """Say whether the owner's memory is back."""
        return self._outcome is not None or self._error is not None

    @property
    def outcome(self) -> Outcome | None:
        """Who let go, and how; None while somebody has not."""
        return self._outcome

    def __await__(self) -> Generator[object, None, Outcome]:
        """Wait until it is done; wakes in the loop turn in which the last release arrives."""
        if not self.done():
            waiter = asyncio.get_running_loop().create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            # Only the wake-up travels through the future: the outcome stays here (inv. 9).
            yield from waiter
        return self.result()

    def result(self) -> Outcome:
        """Return the outcome of an acknowledgement that is done, or raise as awaiting would."""
        if self._error is not None:
            raise self._error
        outcome = self._outcome
        if outcome is None:
            raise asyncio.InvalidStateError(f"owner {self.key!r} is not acknowledged yet")
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
        return f"<Acknowledgement {self.key!r} {self._outcome or 'pending'}>"

    def _settle(self, outcome: Outcome | None, error: AsyncVMMError | None = None) -> None:
        """Finish it, once, and wake whoever waits."""
        if self.done():
            return
        self._outcome = outcome
        self._error = error
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = None
