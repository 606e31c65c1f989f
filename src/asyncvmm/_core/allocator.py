"""Which bytes of the pool are free.

Best fit over a list sorted by (size, start), neighbours merged at once.  Measured at 1.5, 2.1 and
5.0 microseconds for an allocate and free at 10, 1,000 and 100,000 live chunks; no package is
better (docs/performance.md).  Ranges may be added and taken away, so a pool can grow and shrink
by segments; a chunk may lie across a segment boundary, because addresses are contiguous.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from asyncvmm._errors import LocalProtocolError


class Allocator:
    """Free byte ranges of one pool.  All sizes are multiples of the chunk alignment."""

    __slots__ = ("_by_end", "_by_start", "_sorted", "capacity", "free_bytes", "high_water")

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int]] = []  # (size, start)
        self._by_start: dict[int, int] = {}  # start -> size
        self._by_end: dict[int, int] = {}  # end -> start
        self.capacity = 0
        self.free_bytes = 0
        self.high_water = 0
        """Most bytes that were taken at once."""

    @property
    def largest_gap(self) -> int:
        """Return the size of the largest free range."""
        return self._sorted[-1][0] if self._sorted else 0

    @property
    def gaps(self) -> int:
        """Return how many separate free ranges there are."""
        return len(self._sorted)

    def allocate(self, nbytes: int) -> int | None:
        """Take ``nbytes`` from the smallest range that holds them; return the start, or None."""
        free = self._sorted
        at = bisect_left(free, (nbytes, -1))
        if at == len(free):
            return None
        size, start = free.pop(at)
        del self._by_start[start]
        rest = size - nbytes
        if rest:
            self._by_start[start + nbytes] = rest
            self._by_end[start + size] = start + nbytes
            insort(free, (rest, start + nbytes))
        else:
            del self._by_end[start + size]
        self.free_bytes = left = self.free_bytes - nbytes
        if self.capacity - left > self.high_water:
            self.high_water = self.capacity - left
        return start

    def fits(self, sizes: Iterable[int]) -> bool:
        """Say whether :meth:`allocate` would find room for all of these, one after the other."""
        gaps = [size for size, _ in self._sorted]
        for nbytes in sizes:
            at = bisect_left(gaps, nbytes)
            if at == len(gaps):
                return False
            rest = gaps.pop(at) - nbytes
            if rest:
                insort(gaps, rest)
        return True

    def free(self, start: int, nbytes: int) -> None:
        """Give a range back; it merges with its free neighbours."""
        self.free_bytes += nbytes
        end = start + nbytes
        before = self._by_end.pop(start, None)
        if before is not None:
            size = self._by_start.pop(before)
            self._forget(size, before)
            start = before
        after = self._by_start.pop(end, None)
        if after is not None:
            self._forget(after, end)
            end += after
        self._by_start[start] = end - start
        self._by_end[end] = start
        insort(self._sorted, (end - start, start))

    def add_range(self, start: int, nbytes: int) -> None:
        """Make a new range of the pool available."""
        self.capacity += nbytes
        self.free(start, nbytes)

    def remove_range(self, start: int, nbytes: int) -> bool:
        """Take a range out of the pool if it is wholly free; say whether it was."""
        end = start + nbytes
        for at, size in self._by_start.items():
            if at <= start and end <= at + size:
                break
        else:
            return False
        del self._by_start[at]
        del self._by_end[at + size]
        self._forget(size, at)
        self.free_bytes -= size
        self.capacity -= nbytes
        if at < start:
            self.free(at, start - at)
        if end < at + size:
            self.free(end, at + size - end)
        return True

    def is_free(self, start: int, nbytes: int) -> bool:
        """Say whether a range is wholly free."""
        return any(
            at <= start and start + nbytes <= at + size for at, size in self._by_start.items()
        )

    def _forget(self, size: int, start: int) -> None:
        at = bisect_left(self._sorted, (size, start))
        if at == len(self._sorted) or self._sorted[at] != (size, start):
            raise LocalProtocolError(f"the free list lost the range [{start}, {start + size})")
        del self._sorted[at]
