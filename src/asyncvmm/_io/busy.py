"""Answers that come in a moment: the loop goes on turning for them before it sleeps.

Who sleeps has to be woken by the other, and runs on a core that has turned to something else.
Where each hand-off waits for the answer to the last, that is half of its time and more.  So while
an answer is likely to come soon the loop polls without waiting, and whoever else is due runs
between two polls.  How long answers take is seen without any of this: nothing is tried in order to
find out, and a quiet or slow link costs nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import monotonic
from typing import cast

from asyncvmm._errors import ArgumentError

BUSY_POLL_SECONDS = 600e-6
"""Most that the loop turns for one answer, unless the user says otherwise: twice the 300 us that an
answer takes between two that both sleep on the slowest host measured (elsewhere 90 us).  They have
to begin from there; once both turn it is a third to half of that."""

MOST_BUSY_POLL_SECONDS = 0.01
"""Beyond it nobody can have meant seconds."""

THERE_SECONDS = 30e-6
"""What is seen sooner was there when the wait began, for no peer has a turn of its loop in that
time.  It says nothing about the answers that one has to wait for."""

WANTED_SECONDS = 30e-6
"""A yield of the core that takes longer let somebody else run; else it takes one."""

LOOK_EVERY = 8
"""Turns, of some 3 us each, after which the core is offered to others and ``worth`` is asked again.
What a turn takes is what an answer waits.  It begins with the second one, for in the first the
packet that came is dealt with, and whoever waited for it goes on."""

TRIAL = 128
"""Answers after which turning must have made them quicker, else the loop rests from it.  Two
processes that share a GPU wait for its change from one to the other, and that comes no sooner."""

GAIN = 0.75
"""What they may take of what they took before.  Where turning helps it was a third to a half."""

QUICK_SECONDS = 100e-6
"""Answers that take no longer may be turned for in any case."""

REST = 4096
"""Answers that are slept on then, so that trials cost a thirtieth of a core at most.  The first
rest is as long as a trial, and each one after a trial in vain twice as long as the last: both ends
must turn to gain all of it, and a moment in which the machine was slow says nothing for long."""

SHARE = 8
"""What one answer counts for: an eighth of what all before it do."""


class Busy:
    """Keeps the loop turning while somebody waits and answers are usually quick.

    ``with busy:`` is around the wait of whoever has to be woken by a packet.  ``longest`` is the
    most seconds for one answer; 0 is for never.  The loop turns for twice as long as answers took
    of late, and not at all if that is more, or where ``worth`` says that nothing is gained, or no
    more.  Very late answers count as ``2 * longest``, and so do cores that others need: two or
    three of them end it.  So does turning that makes no answer quicker, for a while.
    """

    __slots__ = (
        "_before", "_longest", "_loop", "_next_rest", "_rest", "_since", "_slow", "_trial",
        "_turning", "_turns", "_until", "_usual", "_waiting", "_worth",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        longest: float,
        worth: Callable[[], bool] = lambda: True,
    ) -> None:
        self._loop = loop
        self._longest = longest
        self._worth = worth
        self._usual = self._slow = 2 * longest  # nothing is known yet
        self._before = 0.0  # what was usual when it began to turn
        self._trial = self._rest = 0  # answers that were turned for; those still to be slept on
        self._next_rest = TRIAL
        self._waiting = 0
        self._since: float | None = None  # when the wait for the next packet began
        self._until = 0.0
        self._turning = False
        self._turns = 0  # since the wait for the next packet began

    def __enter__(self) -> None:
        self._waiting += 1
        if self._since is None and self._longest:
            self._expect(monotonic())

    def __exit__(self, *exc: object) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._since = None

    def came(self) -> None:
        """Note that a packet came; until the waits are over another one is expected."""
        since = self._since
        if since is None:
            return
        now = monotonic()
        if now - since >= THERE_SECONDS:
            self._learn(now - since)
            if self._until > since:
                self._judge()
            else:
                self._trial = 0
                self._rest -= self._rest > 0
        self._expect(now)

    def _learn(self, took: float) -> None:
        slow = self._slow
        self._usual += ((took if took < slow else slow) - self._usual) / SHARE

    def _judge(self) -> None:
        """Count an answer that was turned for, and rest where so many came no quicker."""
        self._trial = trial = self._trial + 1
        if trial % TRIAL:
            return
        if self._usual > max(QUICK_SECONDS, GAIN * self._before):
            self._rest, self._before = self._next_rest, 0.0
            self._next_rest = min(2 * self._next_rest, REST)
        else:
            self._next_rest = TRIAL

    def _expect(self, now: float) -> None:
        self._since = self._until = now
        usual = self._usual
        if 2 * usual <= self._longest and not self._rest and (self._turning or self._worth()):
            if not self._trial and usual > self._before:
                # The most since the last rest: of late it may have been quick for the turning.
                self._before = usual
            self._until = now + 2 * usual
            self._turns = 0
            if not self._turning:
                self._turning = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Make the loop poll once more without waiting: it does so while a callback is due."""
        now = monotonic()
        if self._since is not None and now < self._until:
            self._turns += 1
            look = self._turns % LOOK_EVERY == 2
            if not look or self._look(now):
                self._loop.call_soon(self._turn)
                return
        self._turning = False

    def _look(self, now: float) -> bool:
        """Offer the core to others; say whether to go on."""
        if not self._worth():
            return False
        os.sched_yield()
        if monotonic() - now < WANTED_SECONDS:
            return True
        self._learn(self._slow)
        return False


def check_busy_poll(value: object) -> float:
    """Return a caller's ``busy_poll``; raise ArgumentError if it is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= (seconds := cast("float", value)) <= MOST_BUSY_POLL_SECONDS:
        raise ArgumentError(
            f"busy_poll={value!r} must be seconds from 0 (never) to {MOST_BUSY_POLL_SECONDS}: how "
            f"long the loop may go on turning for an answer before it sleeps"
        )
    return seconds
