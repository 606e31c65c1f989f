"""Holdings: which peer holds which loan, and what that makes of the loan's slot.

A loan drains when nobody holds it and nobody is waited for.  While all who hold it are *absent*,
their link gone and their process alive, it is quarantined: only they can let go of it, by a late
release or by dying (inv. 7).  Nothing here knows why a peer came to hold anything.
"""

from __future__ import annotations

from asyncvmm._core.ledger import Peer, PeerState, Record
from asyncvmm._core.loans import Loans
from asyncvmm._core.slots import DRAINING, HELD, QUARANTINED


class Holdings(Loans):
    """Loans and the peers that hold them."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.peers: dict[int, Peer] = {}
        self._absent = 0  # peers whose link is gone while they hold something
        self._dead: set[int] = set()  # dead peers whose fences may be being asked

    def fence_failed(self, record: Record) -> None:
        """Quarantine a draining slot whose fence can no longer be asked: never free by guess.

        It drains once more, now without their fences, when all who released it are dead.  What
        nobody released stays: the fence that failed was the exporter's own.
        """
        self._check_use(record)
        self.slots.move(record.slot, QUARANTINED)
        self._forget_dead(record)

    def _settle(self, peer: Peer, record: Record) -> None:
        """Note that a peer holds a record no more; the caller has noted how that came."""
        del peer.holds[record.slot]
        holders = record.holders
        holders.discard(peer.id)
        if holders or record.waiting:
            self._review(record)
        else:
            self._drain(record)
        if peer.absent:
            self._close_absent(peer)

    def _close_absent(self, peer: Peer) -> None:
        """Forget a peer whose link is gone once nothing can come of it any more."""
        if peer.absent and not peer.holds and not peer.expected:
            self._close(peer)

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

    def _miss(self, peer: Peer) -> None:
        """Note that a peer's link is gone and its process is not."""
        peer.state = PeerState.CLOSING
        if not peer.holds and not peer.expected:
            self._close(peer)
        elif not peer.absent:
            peer.absent = True
            self._absent += 1
            for record in peer.holds.values():
                self._review(record)

    def found_again(self, peer: Peer) -> list[tuple[int, int]]:
        """Note that a peer has a link again, to say what became of what it holds; return that.

        It is slots and generations, for what it said before may have been lost with the old link.
        """
        if peer.absent:
            peer.absent = False
            for record in peer.holds.values():
                self._review(record)
            self._absent -= 1
        return [(record.slot, record.generation) for record in peer.holds.values()]

    def _close(self, peer: Peer) -> None:
        if peer.absent:
            peer.absent = False
            self._absent -= 1
        peer.state = PeerState.CLOSED
        self.peers.pop(peer.id, None)

    def reads_of(self, peer_id: int) -> bool:
        """Say whether a peer's events stand for reads of bytes that are not free yet."""
        return any(
            lane and reader == peer_id
            for record in self.records.values()
            for reader, lane in record.released_by
        )

    def _bury(self, peer_id: int) -> None:
        """Note that a process is gone, and with it every read that it had queued."""
        self._dead.add(peer_id)
        asked = set[int]()  # those whose fences somebody is waiting for at this moment
        for record in list(self.records.values()):
            if self.slots.states[record.slot] is DRAINING:
                asked.update(reader for reader, _ in record.released_by)
            else:
                self._forget_dead(record)
        self._dead &= asked

    def _forget_dead(self, record: Record) -> None:
        """Forget the reads of dead peers; drain what was stuck only for want of their fences."""
        readers = record.released_by
        living = tuple(reader for reader in readers if reader[0] not in self._dead)
        if len(living) < len(readers):
            record.released_by = living
            if not living and not record.holders and not record.waiting:
                self._drain(record)
