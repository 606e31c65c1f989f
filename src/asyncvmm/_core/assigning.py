"""Assigning: who gets what was published, and who gets it instead.

Under Broadcast every rank has a seat, and what is for it goes there.  Under Compete a batch goes
to the freest of those who are here, and back into the queue if that one leaves without having
taken it.
"""

from __future__ import annotations

from asyncvmm._core import wire
from asyncvmm._core.ledger import ANYBODY, Peer, PeerState, Record
from asyncvmm._core.routing import Competitors, Ranks
from asyncvmm._core.ticketing import Ticketing
from asyncvmm._types import Broadcast, Key, Route

OPEN = PeerState.OPEN


class Assigning(Ticketing):
    """Routes joined with loans and peers."""

    def __init__(self, *, slots: int, route: Route) -> None:
        super().__init__(slots)
        self.route: Ranks | Competitors
        if isinstance(route, Broadcast):
            self.route = Ranks(route.consumer_count)
        else:
            self.route = Competitors()
        self._everybody = self.route.targets(None)
        self.closing = False
        self._goodbye = wire.encode(wire.Goodbye())
        self._next_peer = 0

    def _seat(self, member: Key) -> Peer | None:
        if not isinstance(self.route, Ranks):
            return None
        peer = self.route.seats.get(int(member))
        return peer if peer is not None and peer.state is OPEN else None

    def _assign(self) -> None:
        """Hand out what is pending; when closing, tell those to whom nothing can come any more."""
        route = self.route
        if isinstance(route, Competitors):
            while route.pending and (peer := route.freest()) is not None:
                batch = route.pending.popleft()
                peer.untaken[batch.number] = batch
                self._deliver(peer, batch)
        if self.closing and not route.busy:
            for peer in self.peers.values():
                if peer.state is OPEN:
                    self._tell(peer)

    def _tell(self, peer: Peer) -> None:
        """Say goodbye to a peer, once."""
        if not peer.told:
            peer.told = True
            self.outgoing.append((peer.id, self._goodbye))

    def _found(self, peer: Peer, slot: int, generation: int) -> Record | None:
        record = peer.find(slot, generation)
        if record is None:
            self.tally.stale += 1
        return record

    def _taken(self, peer: Peer, record: Record) -> None:
        if record.batch is not None and peer.untaken.pop(record.batch.number, None) is not None:
            self._assign()

    def _put_back(self, peer: Peer) -> None:
        """Make what a leaving competitor had not taken pending again."""
        if not peer.untaken or not isinstance(self.route, Competitors):
            return
        self.tally.reassigned += len(peer.untaken)
        for batch in peer.untaken.values():
            for record in batch.records:
                record.waiting = ANYBODY
                record.holders.discard(peer.id)
                del peer.holds[record.slot]
                self._review(record)
        self.route.put_back(peer.untaken.values())
        peer.untaken.clear()
