"""ConsumerCore: the mirror of ExporterCore, equally without sockets, memory or time.

Inputs are method calls; ``outgoing`` holds encoded messages to be posted after each.  What the
exporter says is checked here before anybody maps or reads anything: a slot that is out of range,
an old generation, bytes outside the mapped segments, a layout whose sum is not the chunk's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncvmm._core import wire
from asyncvmm._core.layout import chunk_bytes, feature_bytes
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import InvalidTensorError, LocalProtocolError, RemoteProtocolError
from asyncvmm._types import ALIGNMENT, MAX_SLOTS, RegionInfo, SegmentInfo


class ConsumerCore:
    """What one consumer holds, has been sent, and owes."""

    def __init__(self, region: RegionInfo, *, competes: bool) -> None:
        self._check_region(region)
        self.region = region
        self.competes = competes
        self.state = PeerState.OPEN
        self.inbox: deque[list[wire.OwnerFrame]] = deque()
        self.held: dict[int, wire.OwnerFrame] = {}  # slot -> owner not yet settled
        self.outgoing: list[bytes] = []
        self.ended = False  # the exporter said goodbye
        self.reason = ""
        self.delivered = 0
        self.released = 0
        self.refused = 0
        self._generations = [0] * region.slots
        self._segments: dict[int, SegmentInfo] = {}
        self._failures: dict[int, str] = {}  # segments that could not be mapped here
        self._mapped: list[tuple[int, int]] = []

    # -- what the exporter says --------------------------------------------------------------

    def _check_region(self, region: RegionInfo) -> None:
        if (
            not 1 <= region.slots <= MAX_SLOTS
            or region.granule < 1
            or region.max_nbytes < 1
            or region.max_nbytes % region.granule
        ):
            raise RemoteProtocolError(
                f"no pool can have {region.slots} slots and {region.max_nbytes} bytes in "
                f"granules of {region.granule}; at most {MAX_SLOTS} slots are allowed"
            )

    def check_segment(self, info: SegmentInfo) -> None:
        """Refuse a segment that cannot be part of this pool, before it is mapped."""
        region = self.region
        end = info.start + info.nbytes
        if (
            info.index < 0
            or info.nbytes <= 0
            or info.start < 0
            or end > region.max_nbytes
            or info.start % region.granule
            or info.nbytes % region.granule
        ):
            raise RemoteProtocolError(
                f"segment {info.index} at [{info.start}, {end}) does not lie in a pool of "
                f"{region.max_nbytes} bytes with granule {region.granule}"
            )
        for other in self._segments.values():
            if other.index == info.index or (
                info.start < other.start + other.nbytes and other.start < end
            ):
                raise RemoteProtocolError(
                    f"segment {info.index} at [{info.start}, {end}) overlaps segment "
                    f"{other.index} at [{other.start}, {other.start + other.nbytes})"
                )

    def add_segment(self, info: SegmentInfo, *, failure: str = "") -> None:
        """Note that a checked segment is mapped, or that it could not be and why."""
        self._segments[info.index] = info
        if failure:
            self._failures[info.index] = failure
        self._merge()

    @property
    def segment_count(self) -> int:
        """Return how many segments were told of."""
        return len(self._segments)

    def has_mapped(self, index: int) -> bool:
        """Say whether a segment was mapped here, not only told of."""
        return index in self._segments and index not in self._failures

    def remove_segment(self, index: int) -> SegmentInfo:
        """Note that a segment is given back; refuse one that owners still lie in."""
        info = self._segments.get(index)
        if info is None:
            raise RemoteProtocolError(f"segment {index} is to be unmapped but is not mapped")
        end = info.start + info.nbytes
        for owner in self.held.values():
            if owner.start < end and info.start < owner.start + owner.nbytes:
                raise RemoteProtocolError(
                    f"segment {index} is to be unmapped while owner {owner.key!r} lies in it"
                )
        del self._segments[index]
        self._failures.pop(index, None)
        self._merge()
        return info

    def _merge(self) -> None:
        merged: list[tuple[int, int]] = []
        for info in sorted(self._segments.values(), key=lambda info: info.start):
            if merged and merged[-1][1] == info.start:
                merged[-1] = (merged[-1][0], info.start + info.nbytes)
            else:
                merged.append((info.start, info.start + info.nbytes))
        self._mapped = merged

    def check_slot(self, slot: int) -> None:
        """Refuse a slot that the pool does not have."""
        if not 0 <= slot < self.region.slots:
            raise RemoteProtocolError(
                f"the exporter named slot {slot} of a pool with {self.region.slots} slots"
            )

    def deliver(self, message: wire.Deliver) -> None:
        """Take a batch into the inbox, or refuse it at once if this side is leaving."""
        if self.ended:
            raise RemoteProtocolError("the exporter sent a batch after its goodbye")
        for owner in message.owners:
            self._check_owner(owner)
        owners = message.owners
        if len(owners) > 1 and len({owner.slot for owner in owners}) < len(owners):
            raise RemoteProtocolError("a batch names one slot for two owners")
        for owner in owners:
            self._generations[owner.slot] = owner.generation
            self.held[owner.slot] = owner
        if self.state is not PeerState.OPEN:
            self._decline(message.owners, "the consumer is leaving")
            return
        if self._failures and self._refuse_unmapped(message.owners):
            return
        self.delivered += 1
        self.inbox.append(message.owners)

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

    def _check_owner(self, owner: wire.OwnerFrame) -> None:
        slot, start, nbytes = owner.slot, owner.start, owner.nbytes
        self.check_slot(slot)
        if slot in self.held or owner.generation <= self._generations[slot]:
            raise RemoteProtocolError(
                f"owner {owner.key!r} uses slot {slot} in generation {owner.generation}, but "
                f"generation {self._generations[slot]} was already here"
            )
        end = start + nbytes
        for low, high in self._mapped:
            if low <= start and end <= high:
                break
        else:
            raise RemoteProtocolError(
                f"owner {owner.key!r} at [{start}, {end}) lies outside the mapped segments"
            )
        if start % ALIGNMENT or nbytes % ALIGNMENT or nbytes <= 0:
            raise RemoteProtocolError(
                f"owner {owner.key!r} at [{start}, {end}) is not aligned to {ALIGNMENT} bytes"
            )
        try:
            sizes = [feature_bytes(f.name, f.dtype, f.shape) for f in owner.features]
        except InvalidTensorError as error:
            raise RemoteProtocolError(f"owner {owner.key!r}: {error}") from None
        if chunk_bytes(sizes) != nbytes:
            raise RemoteProtocolError(
                f"owner {owner.key!r} says {nbytes} bytes, but its features take "
                f"{chunk_bytes(sizes)}"
            )
        if len({f.name for f in owner.features}) != len(sizes):
            raise RemoteProtocolError(f"owner {owner.key!r} names a feature twice")

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

    def release(self, owner: wire.OwnerFrame, handle: bytes = b"", lane: int = 0) -> None:
        """Say that an owner is done with; exactly once (inv. 6)."""
        self._settle(owner)
        self.released += 1
        if self.state is not PeerState.CLOSED:
            message = wire.Release(owner.slot, owner.generation, handle, lane)
            self.outgoing.append(wire.encode(message))

    def refuse(self, owner: wire.OwnerFrame, reason: str) -> None:
        """Say that an owner was never used, and why; exactly once (inv. 6)."""
        self._settle(owner)
        self.refused += 1
        if self.state is not PeerState.CLOSED:
            message = wire.Refuse(owner.slot, owner.generation, wire.clip(reason))
            self.outgoing.append(wire.encode(message))

    def _settle(self, owner: wire.OwnerFrame) -> None:
        if self.held.pop(owner.slot, None) is not owner:
            raise LocalProtocolError(f"owner {owner.key!r} was settled twice")

    def leave(self, lingering: Sequence[wire.OwnerFrame] = ()) -> None:
        """Say goodbye: let go of what is unread, keep what views still hold."""
        if self.state is not PeerState.OPEN:
            return
        self.state = PeerState.CLOSING
        while self.inbox:
            self._decline(self.inbox.popleft(), "dropped unread")
        self.outgoing.append(wire.encode(wire.Goodbye(lingering=len(lingering))))

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
        self.inbox.clear()
        return unread
