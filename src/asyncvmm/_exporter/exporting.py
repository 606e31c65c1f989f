"""Publishing owners that are not streamed: they are held for whoever shows a ticket of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from asyncvmm._core.ledger import Record
from asyncvmm._core.routing import To
from asyncvmm._errors import ForkError
from asyncvmm._exporter.acknowledgement import Acknowledgement, Require
from asyncvmm._exporter.several import Several, count_of, one_each
from asyncvmm._exporter.terms import Terms
from asyncvmm._io.threads import in_thread
from asyncvmm._ticket import PROOF_BYTES, OwnerTicket, Ticket, Tickets, check_owner
from asyncvmm._ticket_errors import ForeignTicketError
from asyncvmm._types import Key

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Plan, Tensor

Exported: TypeAlias = Tickets[Acknowledgement]
"""Tickets by name of feature, with the acknowledgement of their owner."""


class Exporting(Several):
    """The part of an exporter that makes tickets; see :class:`asyncvmm.Exporter`."""

    async def export(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> Exported:
        """Copy features into one chunk and return a ticket for each.

        Takes, checks and waits for what ``send`` does.  Nothing is streamed: the owner is held
        for the ranks it is for (all, or ``to``; under Compete for one consumer) until each has
        redeemed its ticket and let go, or has acknowledged it unread.  The tickets are plain
        data for any channel; each redeems the whole owner.  A rank that leaves or dies settles
        its share; one that never comes keeps the owner, which shows in
        ``statistics().owners[...].waiting_for``, until :meth:`cancel`.

        ``acknowledgement`` of what is returned is that of ``send``.  Cancelled, it exports
        nothing, and the chunk returns once no copy touches it any more.
        """
        plan, terms = self._provable(features, key, metadata, to, require)
        number = self._stream(stream)
        return await self._export(await self._acquire(plan.nbytes), plan, terms, number)

    async def export_nowait(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> Exported:
        """Do as :meth:`export`, but raise WouldBlock instead of waiting for room.

        It is still awaited, because a large copy leaves the event loop.
        """
        plan, terms = self._provable(features, key, metadata, to, require)
        number = self._stream(stream)
        return await self._export(self._acquire_nowait(plan.nbytes), plan, terms, number)

    async def export_all(
        self,
        owners: Sequence[Mapping[str, Tensor]],
        *,
        keys: Sequence[Key | None] = (),
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> list[Exported]:
        """Export several owners, or none of them; each is redeemed and released by itself.

        It waits until all fit at once, and holds nothing while it waits: two such calls cannot
        wait for each other.  ``keys`` names the owners, if given.  Raises what :meth:`export`
        does, and ArgumentError if the pool can never hold them all.  Where one fails, or on
        cancellation, those that were exported are cancelled.
        """
        plans = []
        for features, key in zip(owners, one_each("keys", keys, count_of(owners)), strict=True):
            plan, terms = self._provable(features, key, None, to, require)
            to = terms.to  # which can be read once more, whatever was given
            plans.append((plan, terms))
        number = self._stream(stream)
        loans = deque(await self._acquire_all([plan.nbytes for plan, _ in plans]))
        exported: list[Exported] = []
        try:
            for plan, terms in plans:
                exported.append(await self._export(loans.popleft(), plan, terms, number))
        except BaseException:
            for record in loans:
                self._abandon(record, number)
            for tickets in exported:
                self.cancel(tickets.owner)
            raise
        return exported

    def _provable(
        self,
        features: Mapping[str, Tensor],
        key: Key | None,
        metadata: object,
        to: To,
        require: Require,
    ) -> tuple[Plan, Terms]:
        plan = self._plan_tensors(features)
        terms = self._terms(plan, key, metadata, to, require)
        return plan, msgspec.structs.replace(terms, proof=os.urandom(PROOF_BYTES))

    async def _export(self, record: Record, plan: Plan, terms: Terms, stream: int) -> Exported:
        if self._copies_slowly(plan):
            ack = await self._fill_elsewhere(record, plan, terms, stream)
        else:
            ack = self._fill(record, plan, terms, stream)
        # No await from here on: whoever has published returns the tickets.
        owner = OwnerTicket(
            self._connections.handshake.identity,
            self.name,
            record.slot,
            record.generation,
            terms.proof,
            record.key,
            record.nbytes,
            len(plan.layout.features),
        )
        tickets = {
            feature.name: Ticket(owner, index, feature.name, feature.dtype, feature.shape)
            for index, feature in enumerate(plan.layout.features)
        }
        return Tickets(tickets, ack)

    async def _to_host(self, tensors: Sequence[Tensor], stream: object) -> list[Tensor]:
        """Copy what the pool has no room for, off the loop, after the work on ``stream``."""
        number = self._stream(stream)
        to_host = self._port.to_host
        copies = [await in_thread(to_host, tensor, number) for tensor in tensors]
        self._counters.fallbacks += len(copies)
        return copies

    def cancel(self, ticket: Ticket | OwnerTicket) -> bool:
        """Withdraw an exported owner, by any of its tickets; again is a no-op.

        Whoever has not redeemed it is refused from now on.  Returns True if nobody ever has:
        its bytes are then free as soon as the copy into them is over.  Consumers that hold it
        keep it until they let go.  Raises RefusedTicketError for what is no ticket, and
        ForeignTicketError for one of another exporter.
        """
        if self._forked:
            raise ForkError("exporter", self._made_in, os.getpid())
        owner = check_owner(ticket)
        if owner.exporter != self._connections.handshake.identity:
            raise ForeignTicketError(owner.name, self.name)
        if self._ended:
            return False
        whole = self._core.cancel(owner.slot, owner.generation, owner.proof)
        self._pump()
        return whole
