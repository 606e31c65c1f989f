"""ConsumerCore: the mirror of ExporterCore, equally without sockets, memory or time.

Inputs are method calls; ``outgoing`` holds encoded messages to be posted after each.  What the
exporter says is checked (``checking.py``) before anybody maps or reads anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncvmm._core import wire
from asyncvmm._core.checking import Checking
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import LocalProtocolError, RemoteProtocolError
from asyncvmm._types import RegionInfo


class ConsumerCore(Checking):
    """What one consumer holds, has been sent, and owes."""

    def __init__(self, region: RegionInfo, *, competes: bool) -> None:
        super().__init__(region)
        self.consumer_count = 0  # the shell says these two, once it knows them
        self.exporter = b""  # its identity, which its tickets name
        self.competes = competes
        self.state = PeerState.OPEN
        self.inbox: deque[list[wire.OwnerFrame]] = deque()
        self.outgoing: list[bytes] = []
        self.asked: set[tuple[int, int]] = set()  # owners whose tickets were shown, unanswered
        self._unanswered: set[tuple[int, int]] = set()  # those when the link broke
        self.answers: list[wire.OwnerFrame | wire.Denied] = []  # to be taken by the shell
        self.said: dict[int, bytes] = {}  # slot -> the last word on an owner in it
        self.resumable = False  # the link is gone, and may be had again for what is owed
        self.ended = False  # the exporter said goodbye
        self.reason = ""
        self.delivered = 0
        self.released = 0
        self.refused = 0

    # -- what the exporter says --------------------------------------------------------------

    def deliver(self, message: wire.Deliver) -> None:
        """Take a batch into the inbox, or refuse it at once if this side is leaving."""
        if self.ended:
            raise RemoteProtocolError("the exporter sent a batch after its goodbye")
        owners = message.owners
        for owner in owners:
            self._check_owner(owner)
        if len(owners) > 1 and len({owner.slot for owner in owners}) < len(owners):
            raise RemoteProtocolError("a batch names one slot for two owners")
        for owner in owners:
            self._generations[owner.slot] = owner.generation
            self.held[owner.slot] = owner
        if self.state is not PeerState.OPEN:
            self._decline(owners, "the consumer is leaving")
            return
        if self._failures and self._refuse_unmapped(owners):
            return
        self.delivered += 1
        self.inbox.append(owners)

    def redeemed(self, message: wire.Redeemed) -> None:
        """Take the owner of a ticket that was shown; it passes by the inbox."""
        owner = message.owner
        self._check_asked(owner.slot, owner.generation)
        self._check_owner(owner)
        self._generations[owner.slot] = owner.generation
        self.held[owner.slot] = owner
        if self.state is not PeerState.OPEN:
            self.refuse(owner, "the consumer is leaving")
        elif self._failures and self._refuse_unmapped((owner,)):
            self.answers.append(wire.Denied(owner.slot, owner.generation, "unmapped"))
        else:
            self.delivered += 1
            self.answers.append(owner)

    def denied(self, message: wire.Denied) -> None:
        """Take the refusal of a ticket."""
        self._check_asked(message.slot, message.generation)
        self.answers.append(message)

    def _check_asked(self, slot: int, generation: int) -> None:
        if (slot, generation) not in self.asked:
            raise RemoteProtocolError(
                f"the exporter answered a ticket for slot {slot} that was not shown"
            )
        self.asked.discard((slot, generation))

    def _refuse_unmapped(self, owners: Sequence[wire.OwnerFrame]) -> bool:
        """Refuse a batch that lies, with any of its bytes, where this process could not map."""
        for index, failure in self._failures.items():
            info = self._segments[index]
            end = info.start + info.nbytes
            for owner in owners:
                if owner.start < end and info.start < owner.start + owner.nbytes:
                    for each in owners:
                        self.refuse(each, f"segment {index} could not be mapped: {failure}")
                    return True
        return False

    def goodbye(self, message: wire.Goodbye) -> None:
        """Note that no further batch will come."""
        self.ended = True
        self.reason = message.reason

    # -- what this side does -----------------------------------------------------------------

    def take(self) -> list[wire.OwnerFrame] | None:
        """Take the oldest batch, or None; under Compete this returns the credit."""
        if not self.inbox:
            return None
        owners = self.inbox.popleft()
        if self.competes:
            first = owners[0]
            self.outgoing.append(wire.encode(wire.Take(first.slot, first.generation)))
        return owners

    def release(
        self,
        owner: wire.OwnerFrame,
        handle: bytes = b"",
        lane: int = 0,
        others: Sequence[wire.OwnerFrame] = (),
    ) -> None:
        """Say that an owner is done with; exactly once (inv. 6).

        So are ``others``, for whose reads its event stands, too.
        """
        self._settle(owner)
        self.released += 1 + len(others)
        names = []
        for other in others:
            self._settle(other)
            names.append((other.slot, other.generation))
        self._say(owner, wire.Release(owner.slot, owner.generation, handle, lane, names))
        for other in others:
            self.said[other.slot] = self.said[owner.slot]

    def refuse(self, owner: wire.OwnerFrame, reason: str) -> None:
        """Say that an owner was never used, and why; exactly once (inv. 6)."""
        self._settle(owner)
        self.refused += 1
        self._say(owner, wire.Refuse(owner.slot, owner.generation, wire.clip(reason)))

    # -- tickets -----------------------------------------------------------------------------

    def redeem(self, slot: int, generation: int, proof: bytes) -> None:
        """Ask for the owner of a ticket; the answer comes among ``answers``."""
        self.asked.add((slot, generation))
        self.outgoing.append(wire.encode(wire.Redeem(slot, generation, proof)))

    def waive(self, slot: int, generation: int, proof: bytes, ranks: range | None) -> None:
        """Say that these ranks (None: this consumer) do not read the owner of a ticket."""
        first, count = (ranks.start, len(ranks)) if ranks else (0, 0)
        self.outgoing.append(wire.encode(wire.Waive(slot, generation, proof, first, count)))

    def put_back(self, owner: wire.OwnerFrame) -> None:
        """Say that an owner that was asked for was not read; it may be asked for again."""
        self._settle(owner)
        self._generations[owner.slot] = owner.generation - 1
        self._say(owner, wire.PutBack(owner.slot, owner.generation))

    def _say(self, owner: wire.OwnerFrame, message: wire.Message) -> None:
        """Say what became of an owner, and keep that for a link that breaks meanwhile."""
        data = self.said[owner.slot] = wire.encode(message)
        if self.state is not PeerState.CLOSED:
            self.outgoing.append(data)

    def _settle(self, owner: wire.OwnerFrame) -> None:
        if self.held.pop(owner.slot, None) is not owner:
            raise LocalProtocolError(f"owner {owner.key!r} was settled twice")

    def leave(self) -> None:
        """Say goodbye: let go of what is unread, keep what views still hold, and say how much."""
        if self.state is not PeerState.OPEN:
            return
        self.state = PeerState.CLOSING
        while self.inbox:
            self._decline(self.inbox.popleft(), "dropped unread")
        self.outgoing.append(wire.encode(wire.Goodbye(lingering=len(self.held))))

    def _decline(self, owners: Sequence[wire.OwnerFrame], reason: str) -> None:
        for owner in owners:
            if self.competes:
                # Not taken, so the exporter gives it to another when it reads the goodbye.
                del self.held[owner.slot]
            else:
                self.refuse(owner, reason)

    def lose(self) -> int:
        """Note that the link is gone; return how many unread batches are gone with it.

        What was taken stays held until it is released, although nobody hears of that (inv. 15).
        """
        self.state = PeerState.CLOSED
        unread = len(self.inbox)
        for owners in self.inbox:
            for owner in owners:
                del self.held[owner.slot]
                self.said.pop(owner.slot, None)
        self.inbox.clear()
        self._unanswered, self.asked = self.asked, set()
        return unread

    def resume(self, holds: Sequence[tuple[int, int]]) -> None:
        """Say on another link what may have been lost with the one that broke.

        ``holds`` is what the exporter believes is held here: what is, stays so; what was settled
        is said again; what never came, or was lost unread, is refused.  Under Compete a batch
        goes to another, for the goodbye gives up all that was not taken.
        """
        for slot, _ in holds:
            self.check_slot(slot)
        self.state = PeerState.CLOSING
        for slot, generation in holds:
            owner = self.held.get(slot)
            if owner is not None and owner.generation == generation:
                if self.competes:
                    self.outgoing.append(wire.encode(wire.Take(slot, generation)))
            elif generation == self._generations[slot] and slot in self.said:
                if self.said[slot] not in self.outgoing:  # one word may be on several
                    self.outgoing.append(self.said[slot])
            elif not self.competes or (slot, generation) in self._unanswered:
                refusal = wire.Refuse(slot, generation, "it was lost with the link")
                self.outgoing.append(wire.encode(refusal))
        self.outgoing.append(wire.encode(wire.Goodbye(lingering=len(self.held))))
