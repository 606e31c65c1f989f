"""Which bytes of the pool are free.

Best fit: the smallest gap that holds a request, of equal ones the lowest; neighbours merge at once.
What is searched and moved is the list of the different sizes, of which there are few however many
gaps there are: at 100,000 live chunks some 15,000 gaps of 700 sizes.  What an allocate and free
costs more there than at 10 is mostly memory that is in no near cache (docs/performance.md).

Ranges may be added and taken away, so a pool can grow and shrink by segments; a chunk may lie
across a segment boundary, because addresses are contiguous.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from asyncvmm._errors import LocalProtocolError


class Allocator:
    """Free byte ranges of one pool.  All sizes are multiples of the chunk alignment."""

    __slots__ = ("_edges", "_lowest", "_others", "_sizes", "capacity", "free_bytes", "high_water")

    def __init__(self) -> None:
        # Gaps are merged, so where one ends no other starts: one dict knows both ends of all.
        self._edges: dict[int, int] = {}  # start -> end and end -> start
        self._sizes: list[int] = []  # sorted, each once
        self._lowest: dict[int, int] = {}  # size -> first start
        self._others: dict[int, list[int]] = {}  # size -> further starts, sorted; never empty
        self.capacity = 0
        self.free_bytes = 0
        self.high_water = 0
        """Most bytes that were taken at once."""

    @property
    def largest_gap(self) -> int:
        """Return the size of the largest free range."""
        return self._sizes[-1] if self._sizes else 0

    @property
    def gaps(self) -> int:
        """Return how many separate free ranges there are."""
        return len(self._edges) // 2

    def allocate(self, nbytes: int) -> int | None:
        """Take ``nbytes`` from the smallest range that holds them; return the start, or None."""
        sizes, edges = self._sizes, self._edges
        at = bisect_left(sizes, nbytes)
        if at == len(sizes):
            return None
        size = sizes[at]
        start = self._lowest[size]
        if size in self._others:
            self._take_equal(size, start)
        else:
            del self._lowest[size], sizes[at]
        end = edges.pop(start)
        rest = size - nbytes
        if rest:
            behind = start + nbytes
            edges[behind] = end
            edges[end] = behind
            if rest in self._lowest:
                self._add_equal(rest, behind)
            else:
                self._lowest[rest] = behind
                insort(sizes, rest)
        else:
            del edges[end]
        self.free_bytes = left = self.free_bytes - nbytes
        if self.capacity - left > self.high_water:
            self.high_water = self.capacity - left
        return start

    def fits(self, sizes: Iterable[int]) -> bool:
        """Say whether :meth:`allocate` would find room for all of these, one after the other."""
        others = (size for size, starts in self._others.items() for _ in starts)
        gaps = sorted([*self._sizes, *others])
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
        edges = self._edges
        end = start + nbytes
        before = edges.pop(start, None)
        if before is not None:
            self._forget(start - before, before)
            start = before
        after = edges.pop(end, None)
        if after is not None:
            self._forget(after - end, end)
            end = after
        edges[start] = end
        edges[end] = start
        size = end - start
        if size in self._lowest:
            self._add_equal(size, start)
        else:
            self._lowest[size] = start
            insort(self._sizes, size)

    def add_range(self, start: int, nbytes: int) -> None:
        """Make a new range of the pool available."""
        self.capacity += nbytes
        self.free(start, nbytes)

    def remove_range(self, start: int, nbytes: int) -> bool:
        """Take a range out of the pool if it is wholly free; say whether it was."""
        end = start + nbytes
        for first, last in self._edges.items():
            if first <= start and end <= last:
                break
        else:
            return False
        del self._edges[first], self._edges[last]
        self._forget(last - first, first)
        self.free_bytes -= last - first
        self.capacity -= nbytes
        if first < start:
            self.free(first, start - first)
        if end < last:
            self.free(end, last - end)
        return True

    def is_free(self, start: int, nbytes: int) -> bool:
        """Say whether a range is wholly free."""
        end = start + nbytes
        return any(first <= start and end <= last for first, last in self._edges.items())

    def _forget(self, size: int, start: int) -> None:
        """Take a gap off the list of its size."""
        if size in self._others:
            self._take_equal(size, start)
        elif self._lowest.pop(size, None) == start:
            del self._sizes[bisect_left(self._sizes, size)]
        else:
            raise _lost(size, start)

    def _add_equal(self, size: int, start: int) -> None:
        """List one more gap of a size of which there is one."""
        lowest = self._lowest[size]
        if start < lowest:
            self._lowest[size], start = start, lowest
        others = self._others.get(size)
        if others is None:
            self._others[size] = [start]
        else:
            insort(others, start)

    def _take_equal(self, size: int, start: int) -> None:
        """Take one of several gaps of a size off its list."""
        others = self._others[size]
        if start == self._lowest[size]:
            self._lowest[size] = others.pop(0)
        else:
            at = bisect_left(others, start)
            if at == len(others) or others[at] != start:
                raise _lost(size, start)
            del others[at]
        if not others:
            del self._others[size]


def _lost(size: int, start: int) -> LocalProtocolError:
    return LocalProtocolError(f"the free list lost the range [{start}, {start + size})")
