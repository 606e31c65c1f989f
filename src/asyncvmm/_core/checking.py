"""What an exporter says of its pool, checked before anybody maps or reads anything.

Refused are a slot that is out of range, an old generation, bytes outside the mapped segments, a
layout whose sum is not the chunk's size.
"""

from __future__ import annotations

from asyncvmm._core import wire
from asyncvmm._core.layout import chunk_bytes, feature_bytes
from asyncvmm._errors import InvalidTensorError, RemoteProtocolError
from asyncvmm._types import ALIGNMENT, MAX_SLOTS, RegionInfo, SegmentInfo

LAYOUTS = 128
"""How many layouts of owners are remembered; a hostile exporter can make each fill a packet."""


class Checking:
    """The segments of one pool and the owners that a consumer holds in it."""

    def __init__(self, region: RegionInfo) -> None:
        self._check_region(region)
        self.region = region
        self.held: dict[int, wire.OwnerFrame] = {}  # slot -> owner not yet settled
        self._generations = [0] * region.slots
        self._segments: dict[int, SegmentInfo] = {}
        self._failures: dict[int, str] = {}  # segments that could not be mapped here
        self._mapped: list[tuple[int, int]] = []
        self._sizes: dict[tuple[wire.Feature, ...], int] = {}  # of chunks, by what is in them
        self._last: tuple[list[wire.Feature], int] = ([], ALIGNMENT)  # of the last owner

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

    def _check_owner(self, owner: wire.OwnerFrame) -> None:
        slot, start, nbytes = owner.slot, owner.start, owner.nbytes
        if not 0 <= slot < len(self._generations):
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
        if owner.features == self._last[0]:  # comparing takes a seventh of looking up
            found = self._last[1]
        else:
            features = (*owner.features,)
            found = self._sizes.get(features) or self._size_of(owner, features)
            self._last = owner.features, found
        if found != nbytes:
            raise RemoteProtocolError(
                f"owner {owner.key!r} says {nbytes} bytes, but its features take {found}"
            )

    def _size_of(self, owner: wire.OwnerFrame, features: tuple[wire.Feature, ...]) -> int:
        """Return the bytes of a chunk that holds these features; refuse what cannot be a chunk.

        Kept, for an exporter sends the same few layouts again and again.
        """
        try:
            sizes = [feature_bytes(f.name, f.dtype, f.shape) for f in features]
        except InvalidTensorError as error:
            raise RemoteProtocolError(f"owner {owner.key!r}: {error}") from None
        if len({f.name for f in features}) != len(sizes):
            raise RemoteProtocolError(f"owner {owner.key!r} names a feature twice")
        if len(self._sizes) >= LAYOUTS:
            self._sizes.clear()
        found = self._sizes[features] = chunk_bytes(sizes)
        return found
