"""What a consumer's user does with tickets: copy, borrow, or acknowledge their owners."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, TypeAlias

from asyncvmm._consumer.asking import Asking
from asyncvmm._consumer.lease import Lease
from asyncvmm._consumer.owner import Owner
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import ArgumentError
from asyncvmm._groups import AttentionGroup, acknowledged_ranks
from asyncvmm._io.threads import begin, in_thread
from asyncvmm._tensors import DevicePort
from asyncvmm._ticket import OwnerTicket, Ticket, check_owner
from asyncvmm._ticket_errors import BorrowedTicketError, PackedReleaseError
from asyncvmm._types import Key

if TYPE_CHECKING:
    from asyncvmm._tensors.local import KeptCopy, LocalCopy
    from asyncvmm._tensors.plan import Tensor


_Shown: TypeAlias = tuple[bytes, int, int, bytes]
"""Exporter, slot, generation and proof: what a ticket must say for a copy to be found by it.

Without the proof a guess would find what was copied for somebody else."""


class Redeeming(Asking):
    """The part of a consumer that redeems tickets; see :class:`asyncvmm.Consumer`."""

    member: Key | None
    _port: DevicePort

    def __init__(self) -> None:
        super().__init__()
        self._copying: dict[_Shown, asyncio.Future[KeptCopy]] = {}
        # A copy lives as long as a tensor of it, or a ticket that it was made for, does.
        self._copies: weakref.WeakValueDictionary[_Shown, LocalCopy] = weakref.WeakValueDictionary()
        self._kept: dict[int, KeptCopy] = {}  # by id of the owner's ticket, until that is gone

    # -- what users call ---------------------------------------------------------------------

    async def reconstruct(
        self,
        ticket: Ticket,
        *,
        count: int = 1,
        group: AttentionGroup | None = None,
        stream: object = None,
    ) -> Tensor:
        """Return the ticket's feature as a tensor in this process's own memory.

        The first call for any feature of an owner copies the whole owner, once, and releases it
        for this consumer; tensors of the others are views of the same local buffer.  Again
        returns the same tensor, as long as somebody has it, or this ticket, or one that came
        with it.  GPU memory is copied on the ``stream`` of the first call (default: the one that
        is current then); who uses the tensors on another has to wait for that.

        ``count`` says for whom it acknowledges: 1, ``group.tp_size`` (the ranks of ``group``) or
        the exporter's ``consumer_count``; see :meth:`acknowledge`.

        Raises a TicketError: its children say whether the ticket is of another exporter, stale,
        released, borrowed or refused, or its exporter gone.  ArgumentError (a ValueError) for
        any other ``count`` and for a group out of range.  Cancelled before the copy has begun,
        it changes nothing; afterwards the copy is finished and kept for the ticket.
        """
        if not isinstance(ticket, Ticket):
            raise ArgumentError(f"a feature's ticket is asked for, got a {type(ticket).__name__}")
        owner = check_owner(ticket)
        ranks = self._ranks(count, group)
        kept = await self._copied(owner, self._port.stream_of(stream))
        self._remember(owner, kept)
        tensor = kept.copy.feature(ticket.index, ticket.feature, ticket.dtype, ticket.shape)
        if count > 1 and self._core.state is not PeerState.CLOSED:
            self._core.waive(owner.slot, owner.generation, owner.proof, ranks)
            self._pump()
        return tensor

    async def borrow(self, ticket: Ticket | OwnerTicket) -> Owner:
        """Redeem the ticket's owner without copying it: views, as of a streamed one.

        It is to be released as any owner.  Raises what :meth:`reconstruct` raises, and
        BorrowedTicketError while this consumer has it already.  Cancelled, it changes nothing.
        """
        owner = check_owner(ticket)
        lease = await self._redeemed(owner)
        if lease is None:
            raise BorrowedTicketError(f"owner {owner.key!r} was just redeemed by another task")
        return Owner(lease)

    def acknowledge(
        self, ticket: Ticket | OwnerTicket, *, count: int = 1, group: AttentionGroup | None = None
    ) -> None:
        """Release the ticket's owner unread; again is a no-op.

        ``count`` is 1 (this rank), ``group.tp_size`` (all ranks of ``group``) or the exporter's
        ``consumer_count`` (everybody).  Whoever is acknowledged for and has not redeemed the
        ticket cannot do so any more, and its own acknowledgement is counted and ignored; who has
        redeemed it keeps its views until it releases them itself.  So no acknowledgement frees
        bytes that somebody reads.

        A feature's ticket stands for its owner only if that has no other feature: for one of
        several this raises PackedReleaseError (a RuntimeError), always.  Give ``ticket.owner``
        to release all of them unread.  ArgumentError and AttentionGroupError (both ValueErrors)
        for another ``count`` or a group out of range.  Not async; does no I/O that could fail.
        """
        owner = check_owner(ticket)
        if isinstance(ticket, Ticket) and ticket.packed:
            raise PackedReleaseError
        ranks = self._ranks(count, group)
        self._check_open()
        self._check_exporter(owner)
        if self._core.state is not PeerState.CLOSED:  # else nobody is left to be told
            whom = ranks if count > 1 else None
            self._core.waive(owner.slot, owner.generation, owner.proof, whom)
            self._pump()

    def _ranks(self, count: int, group: AttentionGroup | None) -> range:
        if self._core.competes:
            if count != 1 or group is not None:
                raise ArgumentError(
                    f"count={count!r} and group={group!r} name ranks, but this consumer competes: "
                    f"it acknowledges for itself"
                )
            return range(0)
        assert isinstance(self.member, int)
        total = self._core.consumer_count
        return acknowledged_ranks(count, rank=self.member, consumer_count=total, group=group)

    async def _to_device(self, value: object, stream: object) -> object:
        """Move a tensor that came as a host copy to where reconstructed ones are."""
        if self._port.kind == "host":
            return value
        return await in_thread(self._port.to_device, value, self._port.stream_of(stream))

    # -- copying -----------------------------------------------------------------------------

    async def _copied(self, owner: OwnerTicket, stream: int) -> KeptCopy:
        name = _shown(owner)
        while True:
            copy = self._copies.get(name)
            kept = copy and copy.keep()
            if kept:
                return kept
            work = self._copying.get(name)
            if work is None:
                lease = await self._redeemed(owner)
                if lease is None:
                    continue  # another task took it, and has copied it perhaps
                if not self._port.copies_out_slowly(lease.frame.nbytes):
                    return self._copy(owner, lease, stream)
                work = self._copy_elsewhere(owner, lease)
            # The copy is finished in any case; only whoever waits for it may go.
            return await asyncio.shield(work)

    def _copy(self, owner: OwnerTicket, lease: Lease, stream: int) -> KeptCopy:
        try:
            with self._port.using(stream):
                kept = self._leases.local(lease)()
        except BaseException:
            self._put_back(lease)
            raise
        self._finish(owner, lease, kept)
        return kept

    def _copy_elsewhere(self, owner: OwnerTicket, lease: Lease) -> asyncio.Future[KeptCopy]:
        """Copy in a worker thread, so that the loop is not kept."""
        name = _shown(owner)
        work = begin(self._leases.local(lease))
        done: asyncio.Future[KeptCopy] = self._loop.create_future()
        self._copying[name] = done

        def finish(_: object) -> None:
            del self._copying[name]
            error = work.exception()
            if error is not None:
                self._put_back(lease)
                done.set_exception(error)
                done.exception()  # seen: perhaps nobody waits any more
            else:
                self._finish(owner, lease, work.result())
                done.set_result(work.result())

        work.add_done_callback(finish)
        return done

    def _finish(self, owner: OwnerTicket, lease: Lease, kept: KeptCopy) -> None:
        """Release what was copied, once, and have it found again."""
        self._copies[_shown(owner)] = kept.copy
        self._remember(owner, kept)
        self._leases.say_done(lease, None)

    def _remember(self, owner: OwnerTicket, kept: KeptCopy) -> None:
        """Keep a copy for as long as a ticket that it was made for."""
        if id(owner) not in self._kept:
            self._kept[id(owner)] = kept
            weakref.finalize(owner, self._kept.pop, id(owner), None).atexit = False


def _shown(owner: OwnerTicket) -> _Shown:
    return owner.exporter, owner.slot, owner.generation, owner.proof
