"""Redeeming tickets: owners that are asked for, and not streamed.

Asking is one message, and the answer is the same delivery that a stream brings.  Nothing of value
is in a future (inv. 9): an answer that nobody waits for any more is put back, and the ticket is as
good as before.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeAlias

from asyncvmm._consumer.denial import denial, lost
from asyncvmm._consumer.lease import Lease
from asyncvmm._consumer.leases import Leases
from asyncvmm._consumer.loss import anew
from asyncvmm._consumer.news import News
from asyncvmm._core import wire
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import AsyncVMMError, ClosedError, ForkError
from asyncvmm._io.waiting import wake, woken
from asyncvmm._ticket import OwnerTicket
from asyncvmm._ticket_errors import ForeignTicketError

Name: TypeAlias = tuple[bytes, int, int]
"""Exporter, slot, generation: one owner, for ever."""


class _Asked:
    """A ticket that was shown: who waits for the answer, and the answer until it is taken."""

    __slots__ = ("answered", "error", "lease", "proof", "waiters", "waiting")

    def __init__(self, proof: bytes) -> None:
        self.proof = proof
        self.waiting = 0
        self.waiters: list[asyncio.Future[None]] = []
        self.answered = False
        self.lease: Lease | None = None
        self.error: AsyncVMMError | None = None


class Asking(News):
    """The part of a consumer that shows tickets and takes the answers."""

    _leases: Leases
    _pump: Callable[[], None]
    _closed: bool
    _forked: bool
    _made_in: int

    def __init__(self) -> None:
        super().__init__()
        self.exporter_name = ""
        self._asked: dict[Name, _Asked] = {}

    async def _redeemed(self, owner: OwnerTicket) -> Lease | None:
        """Return the owner as a lease that is the caller's, or None if another task has it.

        Cancelled, it changes nothing: an answer that nobody waits for is put back.
        """
        name = (owner.exporter, owner.slot, owner.generation)
        while (asked := self._asked.get(name)) is not None and asked.proof != owner.proof:
            # What is said of one proof says nothing of another.
            await self._answer(asked, owner)
            await asyncio.sleep(0)  # whoever it is for takes it first
        self._check_link(owner)
        if asked is None:
            asked = self._asked[name] = _Asked(owner.proof)
            self._core.redeem(owner.slot, owner.generation, owner.proof)
            self._pump()
        asked.waiting += 1
        try:
            await self._answer(asked, owner)
            self._forget(name, asked)
            if asked.error is not None:
                raise anew(asked.error)
            lease, asked.lease = asked.lease, None
            return lease
        finally:
            asked.waiting -= 1
            self._leave_unasked(name, asked)

    async def _answer(self, asked: _Asked, owner: OwnerTicket) -> None:
        """Wait until a question is answered; raise if none can come any more."""
        while not asked.answered:
            self._check_link(owner)
            await woken(asked.waiters)

    def _take_answers(self) -> None:
        """Hand the exporter's answers to whoever waits for them."""
        core = self._core
        answers, core.answers = core.answers, []
        for answer in answers:
            name = (core.exporter, answer.slot, answer.generation)
            asked = self._asked[name]
            asked.answered = True
            if isinstance(answer, wire.Denied):
                asked.error = denial(answer)
            else:
                (asked.lease,) = self._leases.lease((answer,))
            wake(asked.waiters)
            self._leave_unasked(name, asked)

    def _leave_unasked(self, name: Name, asked: _Asked) -> None:
        """Put an answer back that came when nobody waited for it any more."""
        if not asked.waiting and asked.answered:
            self._forget(name, asked)
            lease, asked.lease = asked.lease, None
            if lease is not None:
                self._put_back(lease)

    def _forget(self, name: Name, asked: _Asked) -> None:
        if self._asked.get(name) is asked:
            del self._asked[name]

    def _put_back(self, lease: Lease) -> None:
        self._leases.put_back(lease)
        self._pump()

    def _wake_redeemers(self) -> None:
        """Have all who wait look again: the link's state has changed."""
        for asked in self._asked.values():
            wake(asked.waiters)
        if self._core.state is PeerState.CLOSED:
            self._asked.clear()  # no answer comes any more

    def _check_open(self) -> None:
        if self._forked:
            raise ForkError("consumer", self._made_in, os.getpid())
        if self._closed:
            raise ClosedError("this consumer was closed")

    def _check_exporter(self, owner: OwnerTicket) -> None:
        if owner.exporter != self._core.exporter:
            raise ForeignTicketError(owner.name, self.exporter_name)

    def _check_link(self, owner: OwnerTicket) -> None:
        """Refuse to ask, or to wait on, where no answer can come."""
        self._check_open()
        self._check_exporter(owner)
        if self._core.state is not PeerState.OPEN:  # also on a link that is only for giving back
            raise lost(owner)
