"""Arithmetic of segments in one address range, and what callers and peers may say of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncvmm._errors import ArgumentError, RemoteProtocolError
from asyncvmm._types import MAX_SLOTS, RegionInfo, SegmentInfo


def check_pool(pool_bytes: int, max_pool_bytes: int, slots: int) -> None:
    """Refuse a pool that cannot be."""
    if not 0 < pool_bytes <= max_pool_bytes:
        raise ArgumentError(
            f"a pool needs 0 < pool_bytes <= max_pool_bytes, got {pool_bytes} and {max_pool_bytes}"
        )
    if not 0 < slots <= MAX_SLOTS:
        raise ArgumentError(f"a pool needs 1 to {MAX_SLOTS} slots, got {slots}")


def round_up(nbytes: int, granule: int) -> int:
    """Round up to whole granules, in bytes."""
    return -(-nbytes // granule) * granule


def find(segments: Iterable[SegmentInfo], index: int) -> SegmentInfo:
    """Return the segment of that index."""
    for segment in segments:
        if segment.index == index:
            return segment
    raise ArgumentError(f"there is no segment {index}, only {[each.index for each in segments]}")


def first_gap(segments: Iterable[SegmentInfo], size: int, limit: int) -> int:
    """Return the start of the first gap of at least ``size`` bytes below ``limit``."""
    if size <= 0:
        raise ArgumentError(f"a segment needs at least 1 byte, got {size}")
    start = largest = 0
    for segment in (*_by_start(segments), SegmentInfo(-1, limit, 0)):
        if segment.start - start >= size:
            return start
        largest = max(largest, segment.start - start)
        start = segment.start + segment.nbytes
    raise ArgumentError(
        f"the pool cannot grow by {size:,} bytes: of max_pool_bytes {limit:,} at most {largest:,} "
        f"in one piece are not in use; ask for less"
    )


def pieces(segments: Iterable[SegmentInfo], start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, nbytes) of the parts of a range that lie in one segment each.

    Raises before the first if the range is not all in segments.
    """
    end, covered = start + nbytes, start
    found: list[tuple[int, int]] = []
    for segment in _by_start(segments):
        if segment.start <= covered < segment.start + segment.nbytes and covered < end:
            stop = min(end, segment.start + segment.nbytes)
            found.append((covered, stop - covered))
            covered = stop
    if nbytes < 0 or covered < end:
        raise ArgumentError(f"bytes {start} to {end} are not all in segments of the pool")
    yield from found


def check_segment(segment: SegmentInfo, info: RegionInfo, mapped: Iterable[SegmentInfo]) -> None:
    """Refuse a segment that does not fit the pool, or that collides with a mapped one."""
    start, end = segment.start, segment.start + segment.nbytes
    if segment.index < 0 or start % info.granule or segment.nbytes % info.granule:
        raise RemoteProtocolError(f"{segment} is not in granules of {info.granule:,} bytes")
    if not 0 <= start < end <= info.max_nbytes:
        raise RemoteProtocolError(f"{segment} does not lie in a pool of {info.max_nbytes:,} bytes")
    for other in mapped:
        if other.index == segment.index or (
            start < other.start + other.nbytes and other.start < end
        ):
            raise RemoteProtocolError(f"{segment} collides with {other}, which is mapped")


def _by_start(segments: Iterable[SegmentInfo]) -> list[SegmentInfo]:
    return sorted(segments, key=lambda each: each.start)
