"""ExporterCore: the whole exporter without sockets, memory, time or an event loop.

Inputs are method calls.  After any input the caller drains two lists, in this order:

``outgoing``  (peer id, encoded message) pairs, to be posted on that peer's link
``draining``  records whose slot just went to DRAINING: once every fence of what touched their
              bytes is done, call :meth:`ExporterCore.drained`

Nothing else comes out.  The numbers in comments are the invariants of docs/design.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncvmm._core import wire
from asyncvmm._core.assigning import Assigning
from asyncvmm._core.ledger import ANYBODY, BatchRecord, Peer, PeerState, Record
from asyncvmm._core.routing import Competitors, To
from asyncvmm._core.slots import FILLING, HELD
from asyncvmm._errors import ClosedError, LocalProtocolError
from asyncvmm._types import Key

CONNECTING, OPEN, CLOSING, CLOSED = PeerState


class ExporterCore(Assigning):
    """Loans, peers and routes joined; see the module's own rules."""

    # -- publishing --------------------------------------------------------------------------

    def publish(
        self,
        record: Record,
        key: Key,
        features: list[wire.Feature],
        metadata: bytes = b"",
        to: To = None,
        ready: bytes = b"",
        proof: bytes = b"",
    ) -> None:
        """Publish one owner as a batch of its own; on an error the loan goes on.

        With a ``proof`` it is exported: held for those who redeem its ticket.
        """
        ranks = self._everybody if to is None else self.route.targets(to)
        described = self._describe(record, key, features, metadata, ready)
        self._publish((record,), [described], ranks, proof)

    def check_narrowing(self, to: To) -> None:
        """Refuse a ``to`` that this route can never serve."""
        self.route.targets(to)

    def publish_batch(
        self,
        owners: Sequence[tuple[Record, Key, list[wire.Feature], bytes, bytes]],
        *,
        to: To = None,
    ) -> None:
        """Publish owners that become ready together; all or nothing."""
        ranks = self._everybody if to is None else self.route.targets(to)
        records = [owner[0] for owner in owners]
        if not records or len({*records}) < len(records):
            raise LocalProtocolError(f"a batch is of owners, each once, not of {records!r}")
        self._publish(records, [self._describe(*owner) for owner in owners], ranks)

    def _describe(
        self,
        record: Record,
        key: Key,
        features: list[wire.Feature],
        metadata: bytes,
        ready: bytes,
    ) -> wire.OwnerFrame:
        if self.closing:
            raise ClosedError("the exporter is closing and takes no new owners")
        slot = record.slot
        if self.records.get(slot) is not record or self.slots.states[slot] is not FILLING:
            self._check_loan(record)
        if type(key) is not int:
            wire.check_key(key)
        record.key = key  # nobody reads these two of a loan that is not published
        record.ready = ready
        return wire.OwnerFrame(
            slot, record.generation, record.start, record.nbytes, key, features, metadata
        )

    def _publish(
        self,
        records: Sequence[Record],
        frames: list[wire.OwnerFrame],
        ranks: tuple[int, ...],
        proof: bytes = b"",
    ) -> None:
        message = wire.Redeemed(frames[0]) if proof else wire.Deliver(frames)
        data = wire.encode(message)  # the last line that may raise (inv. 13)
        self.tally.batches += 1
        batch = BatchRecord(self.tally.batches, records, data)
        for record in records:
            self.slots.move(record.slot, HELD)
            record.batch = batch
        route = self.route
        if proof:
            self._expect(records[0], frozenset[Key](ranks) or ANYBODY, proof)
            return
        if isinstance(route, Competitors):
            route.pending.append(batch)
            for record in records:
                record.waiting = ANYBODY
            self._assign()
            return
        for rank in ranks:
            peer = route.seats.get(rank)
            if peer is not None and peer.state is OPEN:
                self._deliver(peer, batch)
            else:
                for record in records:
                    record.waiting |= {rank}
                route.keep(rank, batch)

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
        if peer.state is not CONNECTING:
            return  # it went before it had come
        peer.state = OPEN
        for batch in self.route.sit(peer):
            self._deliver(peer, batch)
        self._expect_of(peer)
        self._assign()

    def receive(self, peer_id: int, messages: Sequence[wire.FromConsumer]) -> None:
        """Take a decoded packet from a peer.  Late, doubled and stale names change nothing."""
        peer = self.peers.get(peer_id)
        if peer is None:
            self.tally.stale += len(messages)
            return
        for message in messages:
            if peer.state is CLOSED:  # an earlier message settled the last debt of an absent peer
                self.tally.stale += 1
                continue
            if isinstance(message, wire.Release):  # most are
                self._released(peer, message.slot, message.generation, message.lane)
                for slot, generation in message.others:
                    self._released(peer, slot, generation, message.lane, message.slot)
            elif isinstance(message, wire.Goodbye):
                if peer.lingers is None:
                    peer.lingers = message.lingering
                self._left(peer)
            elif isinstance(message, wire.Redeem | wire.Waive):
                self._show(peer, message)
            elif (record := self._found(peer, message.slot, message.generation)) is None:
                continue
            elif isinstance(message, wire.Take):
                self._taken(peer, record)
            elif isinstance(message, wire.PutBack):
                self._take_back(peer, record)
            else:
                self._refuse(peer, record, message.reason)

    def _released(self, peer: Peer, slot: int, generation: int, lane: int, event: int = -1) -> None:
        """Hear that a peer is done with an owner; ``event`` is a slot whose event stands for it."""
        record = self._found(peer, slot, generation)
        if record is None:
            return
        if lane and event >= 0:
            record.release_slots = (record.release_slots or {}) | {peer.id: event}
        peer.releases += 1
        if peer.lingers:
            peer.lingers -= 1
        self.tally.released += 1
        record.released += (peer.member,)
        record.released_by += ((peer.id, lane),)
        self._let_go(peer, record)

    def died(self, peer_id: int) -> None:
        """Settle everything a dead process held, queued or taken (inv. 6)."""
        peer = self.peers.get(peer_id)
        if peer is not None:
            self.route.leave(peer)
            self._put_back(peer)
            for record in list(peer.holds.values()):
                self.tally.lost += 1
                record.lost += (peer.member,)
                self._let_go(peer, record)
            self._unredeemed(peer)
            self._close(peer)
            self._assign()
        self._bury(peer_id)

    def vanished(self, peer_id: int) -> None:
        """Note that a peer's link is gone while its process lives: that frees nothing (inv. 7).

        But who has said goodbye has said how much it keeps.  Once it has let go of that, the rest
        is what crossed its goodbye and was never looked at, by a consumer that hung up at once.
        """
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        self.route.leave(peer)
        if peer.lingers == 0:
            for record in list(peer.holds.values()):
                self._refuse(peer, record, "it left before this came")
        self._miss(peer)
        self._assign()

    def _left(self, peer: Peer) -> None:
        """A goodbye: what it had not taken goes to others; it may still release the rest."""
        self.route.leave(peer)
        self._put_back(peer)
        self._unredeemed(peer, why="it left without redeeming its ticket")
        if peer.state is not CLOSING:
            self._tell(peer)
        peer.state = CLOSING
        self._close_absent(peer)
        self._assign()

    # -- settling ----------------------------------------------------------------------------

    def _refuse(self, peer: Peer, record: Record, reason: str) -> None:
        self.tally.refused += 1
        record.refused += ((peer.member, reason),)
        self._let_go(peer, record)

    def _let_go(self, peer: Peer, record: Record) -> None:
        self._settle(peer, record)
        if peer.untaken:
            self._taken(peer, record)  # whoever lets go of one owner of a batch has taken it

    # -- the end -----------------------------------------------------------------------------

    def say_goodbye(self, reason: str = "") -> None:
        """Take no new owners and tell every peer so; what is out comes back as before.

        Competitors are told once nothing is left that might still be handed to them: what one of
        them has not taken may have to go to another.
        """
        if self.closing:
            return
        self.closing = True
        self._goodbye = wire.encode(wire.Goodbye(reason=wire.clip(reason)))
        self._assign()

    def give_up_waiting(self) -> None:
        """Settle what waits for members that never attached or redeemed, as refused."""
        self._give_up_tickets()
        for member, batch in self.route.give_up():
            for record in batch.records:
                self.tally.refused += 1
                record.waiting -= {member}
                record.refused += ((member, "nobody came for it"),)
                self._review(record)
        self._assign()
