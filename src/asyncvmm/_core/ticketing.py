"""Handing a published owner to a peer: at once, or when the peer shows a ticket of it.

An exported owner is held like a streamed one, but waits until each member it is for *redeems* it.
A share ends in one of these ways, once (inv. 6):

* redeemed, and then released, refused or lost as any delivery is
* waived: the member, or another in its name, said that it will not read
* its consumer left without having redeemed it (refused), or died (lost); one that lost its link
  and lives keeps its share, as it keeps what it holds (inv. 7), until another is in its seat
* the exporter cancelled the owner (refused)

Waiving in another's name ends only a share that is not redeemed, so nobody's views lose their
bytes by it; whoever is waived for and comes later is denied.  A ticket is shown by its proof: a
slot and a generation can be guessed.
"""

from __future__ import annotations

from collections.abc import Collection
from hmac import compare_digest

from asyncvmm._core import wire
from asyncvmm._core.holdings import Holdings
from asyncvmm._core.ledger import ANYBODY, NOBODY, BatchRecord, Peer, PeerState, Record, Tally
from asyncvmm._types import Key


class Ticketing(Holdings):
    """Holdings that come about by delivery, of what is due or of what is asked for."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.outgoing: list[tuple[int, bytes]] = []
        self.tally = Tally()
        self._exported: dict[int, Record] = {}  # slot -> exported owner that somebody may redeem

    def _deliver(self, peer: Peer, batch: BatchRecord) -> None:
        number, outgoing = peer.id, self.outgoing
        for record in batch.records:
            slot, waiting = record.slot, record.waiting
            if waiting is ANYBODY:
                record.waiting = NOBODY
            elif waiting:
                record.waiting = waiting - {peer.member}
            record.holders.add(number)
            peer.holds[slot] = record
            if record.ready and slot not in peer.knows:
                peer.knows.add(slot)
                outgoing.append((number, wire.encode(wire.Ready(slot, record.ready))))
        outgoing.append((number, batch.data))

    # -- shares ------------------------------------------------------------------------------

    def _expect(self, record: Record, members: frozenset[Key], proof: bytes) -> None:
        """Wait for members to redeem an owner."""
        self.tally.exported += 1
        record.exported, record.proof = True, proof
        record.waiting = members
        self._exported[record.slot] = record
        for member in members:
            peer = self._seat(member)
            if peer is not None:
                peer.expected[record.slot] = record

    def _expect_of(self, peer: Peer) -> None:
        """A rank just opened: what waits for it is its to redeem, and ends with it."""
        for record in self._exported.values():
            if peer.member in record.waiting:
                self._expect_no_more(record, peer.member)  # of one that lost its link
                peer.expected[record.slot] = record

    def _expect_no_more(self, record: Record, member: Key) -> None:
        for peer in list(self.peers.values()):
            if peer.member == member and peer.expected.pop(record.slot, None) is not None:
                self._close_absent(peer)

    def _unredeemed(self, peer: Peer, *, why: str = "") -> None:
        """Settle what a peer will never redeem: as refused, or as lost if there is no reason."""
        for record in list(peer.expected.values()):
            if why:
                self.tally.refused += 1
                record.refused += ((peer.member, why),)
            else:
                self.tally.lost += 1
                record.lost += (peer.member,)
            self._end_share(record, peer.member)

    def _end_share(self, record: Record, member: Key) -> None:
        """Stop waiting for a member; the caller has noted how its share ended."""
        record.waiting = NOBODY if record.waiting is ANYBODY else record.waiting - {member}
        self._expect_no_more(record, member)
        self._not_waiting(record)
        self._review(record)

    def _not_waiting(self, record: Record) -> None:
        if not record.waiting:
            self._exported.pop(record.slot, None)

    def _seat(self, member: Key) -> Peer | None:
        """Return the peer that is there for a rank, if any."""
        return None

    # -- what consumers say ------------------------------------------------------------------

    def _show(self, peer: Peer, message: wire.Redeem | wire.Waive) -> None:
        """Hear from a peer that has a ticket."""
        if isinstance(message, wire.Redeem):
            self._redeem(peer, message)
        else:
            self._waive(peer, message)

    def _redeem(self, peer: Peer, message: wire.Redeem) -> None:
        record = self._shown(message)
        reason = ""
        if isinstance(record, str):
            reason = record
        elif peer.holds.get(record.slot) is record:
            reason = "borrowed"
        elif record.waiting is not ANYBODY and peer.member not in record.waiting:
            ended = (*record.released, *record.lost, *(member for member, _ in record.refused))
            reason = "released" if peer.member in ended else "not_addressed"
        elif peer.state is not PeerState.OPEN:
            reason = "leaving"
        if isinstance(record, Record) and not reason:
            assert record.batch is not None
            peer.expected.pop(record.slot, None)
            self._deliver(peer, record.batch)
            self._not_waiting(record)
            return
        denied = wire.Denied(message.slot, message.generation, reason)
        self.outgoing.append((peer.id, wire.encode(denied)))

    def _shown(self, message: wire.Redeem | wire.Waive) -> Record | str:
        """Return the owner that a ticket is of, or why there is none."""
        record = self.records.get(message.slot)
        if record is None or record.generation != message.generation or not record.published:
            known = message.slot < len(self.slots.states)
            ever = known and 0 < message.generation <= self.slots.generations[message.slot]
            return "stale" if ever else "forged"
        if not record.proof:
            return "stale"  # cancelled, or never one that has a ticket
        return record if compare_digest(record.proof, message.proof) else "forged"

    def _waive(self, peer: Peer, message: wire.Waive) -> None:
        """End the shares that members named, or another in their name, will not redeem."""
        record = self._shown(message)
        if isinstance(record, str):
            peer.stale += 1
            self.tally.stale += 1
            return
        members: Collection[Key] = (peer.member,)
        if message.count:
            named = range(message.first, message.first + message.count)
            members = [rank for rank in record.waiting if rank in named]
        ended = False
        for member in members:
            if record.waiting is ANYBODY or member in record.waiting:
                ended = True
                self.tally.released += 1
                record.released += (member,)
                self._end_share(record, member)
        if not ended:  # twice, late, or for those who hold it: nothing is freed by it (inv. 5)
            peer.stale += 1
            self.tally.stale += 1

    def _take_back(self, peer: Peer, record: Record) -> None:
        """A peer that redeemed an owner read nothing of it: it may again, unless it is leaving."""
        if record.proof and peer.state is PeerState.OPEN:
            self._exported[record.slot] = record
            if isinstance(peer.member, int):
                record.waiting |= {peer.member}
                peer.expected[record.slot] = record
            else:
                record.waiting = ANYBODY
        else:
            self.tally.refused += 1
            record.refused += ((peer.member, "put back unread"),)
        self._settle(peer, record)

    # -- what the exporter says --------------------------------------------------------------

    def cancel(self, slot: int, generation: int, proof: bytes) -> bool:
        """End every share that is not redeemed; True if that was all of them, and so all of it."""
        record = self._shown(wire.Redeem(slot, generation, proof))
        if isinstance(record, str):
            return False
        record.proof = b""  # from now on what is put back is over, too
        self.tally.cancelled += 1
        whole = not (record.holders or record.released or record.refused or record.lost)
        for member in sorted(record.waiting, key=str):
            self.tally.refused += 1
            record.refused += ((member, "cancelled by the exporter"),)
            self._expect_no_more(record, member)
        if record.waiting:
            record.waiting = NOBODY
            self._not_waiting(record)
            self._review(record)
        return whole

    def _give_up_tickets(self) -> None:
        """Settle every share that nobody redeemed, as refused."""
        for record in list(self._exported.values()):
            self.cancel(record.slot, record.generation, record.proof)
