"""ExporterCore: the whole exporter without sockets, memory, time or an event loop.

Inputs are method calls.  After any input the caller drains two lists, in this order:

``outgoing``  (peer id, encoded message) pairs, to be posted on that peer's link
``draining``  records whose slot just went to DRAINING: once every fence of what touched their
              bytes is done, call :meth:`ExporterCore.drained`

Nothing else comes out.  The numbers in comments are the invariants of docs/design.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncvmm._core import wire
from asyncvmm._core.allocator import Allocator
from asyncvmm._core.ledger import ANYONE, BatchRecord, Peer, PeerState, Record
from asyncvmm._core.routing import Competitors, Ranks
from asyncvmm._core.slots import SlotState, SlotTable
from asyncvmm._errors import ClosedError, LocalProtocolError
from asyncvmm._types import Broadcast, Group, Key, Route, SegmentInfo

HELD, DRAINING, QUARANTINED = SlotState.HELD, SlotState.DRAINING, SlotState.QUARANTINED


class ExporterCore:
    """Slots, bytes, peers and routes joined; see the module's own rules."""

    def __init__(self, *, slots: int, route: Route) -> None:
        self.slots = SlotTable(slots)
        self.bytes = Allocator()
        self.peers: dict[int, Peer] = {}
        self.outgoing: list[tuple[int, bytes]] = []
        self.draining: list[Record] = []
        self.records: dict[int, Record] = {}  # slot -> what uses it
        self.route: Ranks | Competitors
        if isinstance(route, Broadcast):
            self.route = Ranks(route.consumer_count)
        else:
            self.route = Competitors()
        self.closing = False
        self._next_peer = 0
        self._absent = 0  # peers whose link is gone while they hold something

    # -- memory ------------------------------------------------------------------------------

    def add_segment(self, segment: SegmentInfo, usable: int) -> None:
        """Make a new segment's first ``usable`` bytes available."""
        self.bytes.add_range(segment.start, usable)

    def fits(self, nbytes: int) -> bool:
        """Say whether a slot and a gap for one chunk are there now."""
        return self.slots.free > 0 and self.bytes.largest_gap >= nbytes

    def reserve(self, nbytes: int) -> Record | None:
        """Take a slot and a chunk, or return None and change nothing."""
        if not self.slots.free:
            return None
        start = self.bytes.allocate(nbytes)
        if start is None:
            return None
        slot = self.slots.take()
        record = Record(slot, self.slots.generations[slot], start, nbytes)
        self.records[slot] = record
        return record

    def abandon(self, record: Record) -> None:
        """End a loan unpublished (inv. 3); the device may still be writing, so it drains."""
        if record.published:
            raise LocalProtocolError(f"{record!r} was published and cannot be abandoned")
        self._drain(record)

    def drained(self, record: Record) -> None:
        """Free a slot and its bytes: every fence of what touched them is done (inv. 4)."""
        self.slots.move(record.slot, SlotState.FREE)
        del self.records[record.slot]
        self.bytes.free(record.start, record.nbytes)

    def fence_failed(self, record: Record) -> None:
        """Quarantine a draining slot whose fence can no longer be asked: never free by guess."""
        self.slots.move(record.slot, QUARANTINED)

    # -- publishing --------------------------------------------------------------------------

    def publish(
        self,
        record: Record,
        *,
        key: Key,
        features: list[wire.Feature],
        metadata: bytes = b"",
        to: Group | Iterable[int] | int | None = None,
        ready: bytes = b"",
    ) -> None:
        """Publish one owner as a batch of its own; on an error the loan goes on."""
        self.publish_batch([(record, key, features, metadata, ready)], to=to)

    def publish_batch(
        self,
        owners: Sequence[tuple[Record, Key, list[wire.Feature], bytes, bytes]],
        *,
        to: Group | Iterable[int] | int | None = None,
    ) -> None:
        """Publish owners that become ready together; all or nothing."""
        if self.closing:
            raise ClosedError("the exporter is closing and takes no new owners")
        route = self.route
        ranks = route.targets(to) if isinstance(route, Ranks) else ()
        if isinstance(route, Competitors):
            route.refuse_narrowing(to)
        frames = [
            wire.OwnerFrame(r.slot, r.generation, r.start, r.nbytes, key, features, metadata)
            for r, key, features, metadata, _ in owners
        ]
        data = wire.encode(wire.Deliver(frames))  # the last line that may raise (inv. 13)
        batch = BatchRecord([owner[0] for owner in owners], data, [owner[4] for owner in owners])
        for record, key, *_ in owners:
            self.slots.move(record.slot, HELD)
            record.key, record.batch, record.published = key, batch, True
        if isinstance(route, Competitors):
            route.pending.append(batch)
            self._await(batch, ANYONE)
            self._assign()
            return
        for rank in ranks:
            peer = route.seats.get(rank)
            if peer is not None and peer.state is PeerState.OPEN:
                self._deliver(peer, batch)
            else:
                self._await(batch, rank)
                route.keep(rank, batch)

    def _await(self, batch: BatchRecord, member: Key) -> None:
        for record in batch.records:
            record.waiting.add(member)

    def _assign(self) -> None:
        route = self.route
        while isinstance(route, Competitors) and (match := route.next()) is not None:
            peer, batch = match
            peer.untaken[batch.records[0].slot] = batch
            self._deliver(peer, batch)

    def _deliver(self, peer: Peer, batch: BatchRecord) -> None:
        for record, handle in zip(batch.records, batch.handles, strict=True):
            if record.waiting:
                record.waiting.discard(peer.member)
                record.waiting.discard(ANYONE)
            record.holders.add(peer.id)
            peer.holds[record.slot] = record
            if handle and record.slot not in peer.knows:
                peer.knows.add(record.slot)
                self.outgoing.append((peer.id, wire.encode(wire.Ready(record.slot, handle))))
        self.outgoing.append((peer.id, batch.data))

    # -- peers -------------------------------------------------------------------------------

    def admit(self, rank: int | None, name: str | None, window: int) -> Peer:
        """Give a newcomer its seat, or raise RankError; nothing is delivered yet."""
        peer = Peer(self._next_peer, self.route.member(rank, name), window)
        self._next_peer += 1
        self.peers[peer.id] = peer
        self.route.reserve(peer)
        return peer

    def open(self, peer: Peer) -> None:
        """Begin deliveries to an admitted peer, with what waited for its rank."""
        peer.state = PeerState.OPEN
        for batch in self.route.sit(peer):
            self._deliver(peer, batch)
        self._assign()
        if self.closing:
            self.outgoing.append((peer.id, wire.encode(wire.Goodbye())))

    def receive(self, peer_id: int, messages: Sequence[wire.FromConsumer]) -> None:
        """Take a decoded packet from a peer.  Late, doubled and stale names change nothing."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        for message in messages:
            if type(message) is wire.Release:
                record = peer.find(message.slot, message.generation)
                if record is not None:
                    peer.releases += 1
                    record.released.append(peer.member)
                    record.released_by.append(peer.id)
                    self._let_go(peer, record)
            elif type(message) is wire.Take:
                if peer.find(message.slot, message.generation) is not None:
                    peer.untaken.pop(message.slot, None)
                    self._assign()
            elif type(message) is wire.Refuse:
                record = peer.find(message.slot, message.generation)
                if record is not None:
                    record.refused.append((peer.member, message.reason))
                    self._let_go(peer, record)
            else:
                self._left(peer)

    def died(self, peer_id: int) -> None:
        """Settle everything a dead process held, queued or taken (inv. 6)."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        self.route.leave(peer)
        self._requeue_untaken(peer)
        for record in list(peer.holds.values()):
            record.lost.append(peer.member)
            self._let_go(peer, record)
        self._close(peer)
        self._assign()

    def vanished(self, peer_id: int) -> None:
        """Note that a peer's link is gone while its process lives: that frees nothing (inv. 7)."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        self.route.leave(peer)
        peer.state = PeerState.CLOSING
        if not peer.holds:
            self._close(peer)
        elif not peer.absent:
            peer.absent = True
            self._absent += 1
            for record in list(peer.holds.values()):
                self._review(record)

    def _left(self, peer: Peer) -> None:
        """A goodbye: what it had not taken goes to others; it may still release the rest."""
        self.route.leave(peer)
        self._requeue_untaken(peer)
        if peer.state is PeerState.OPEN and not self.closing:
            self.outgoing.append((peer.id, wire.encode(wire.Goodbye())))
        peer.state = PeerState.CLOSING
        self._assign()

    def _close(self, peer: Peer) -> None:
        if peer.absent:
            peer.absent = False
            self._absent -= 1
        peer.state = PeerState.CLOSED
        self.peers.pop(peer.id, None)

    def _requeue_untaken(self, peer: Peer) -> None:
        if not isinstance(self.route, Competitors):
            return
        for batch in reversed(list(peer.untaken.values())):
            for record in batch.records:
                record.holders.discard(peer.id)
                del peer.holds[record.slot]
            self._await(batch, ANYONE)
            self.route.pending.appendleft(batch)
        peer.untaken.clear()

    # -- settling ----------------------------------------------------------------------------

    def _let_go(self, peer: Peer, record: Record) -> None:
        del peer.holds[record.slot]
        record.holders.discard(peer.id)
        if peer.untaken and record.batch is not None:
            # Whoever lets go of one owner of a batch has taken the batch.
            if peer.untaken.pop(record.batch.records[0].slot, None) is not None:
                self._assign()
        if peer.absent and not peer.holds:
            self._close(peer)
        self._review(record)

    def _review(self, record: Record) -> None:
        """Put a published record's slot in the state that its holders ask for."""
        if not record.holders and not record.waiting:
            self._drain(record)
        elif self._absent:
            absent = not record.waiting and all(
                self.peers[holder].absent for holder in record.holders
            )
            state = self.slots.states[record.slot]
            if absent and state is HELD:
                self.slots.move(record.slot, QUARANTINED)
            elif not absent and state is QUARANTINED:
                self.slots.move(record.slot, HELD)

    def _drain(self, record: Record) -> None:
        self.slots.move(record.slot, DRAINING)
        self.draining.append(record)

    # -- the end -----------------------------------------------------------------------------

    def say_goodbye(self, reason: str = "") -> None:
        """Take no new owners and tell every peer so; what is out comes back as before."""
        if self.closing:
            return
        self.closing = True
        data = wire.encode(wire.Goodbye(reason=reason))
        self.outgoing += [(p.id, data) for p in self.peers.values() if p.state is PeerState.OPEN]

    def give_up_waiting(self) -> None:
        """Settle what waits for members that never attached, as refused."""
        for member, batch in self.route.give_up():
            for record in batch.records:
                record.waiting.discard(member)
                record.refused.append((member, "never attached"))
                self._review(record)
