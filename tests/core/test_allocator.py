"""Which bytes of the pool are free, against a bytearray that says so byte by byte."""

from __future__ import annotations

import copy
import random
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncvmm._core.allocator import Allocator
from asyncvmm._errors import LocalProtocolError

ABSENT, FREE, USED = 0, 1, 2
RANGE = 16
RANGES = 6
UNITS = 48


def listed(pool: Allocator) -> list[tuple[int, int]]:
    """Return size and start of all gaps in their order, and see that both indexes name the same."""
    assert set(pool._sizes) == set(pool._lowest)
    assert set(pool._others) <= set(pool._lowest)
    assert all(pool._others.values())
    found = [
        (size, start)
        for size in pool._sizes
        for start in (pool._lowest[size], *pool._others.get(size, ()))
    ]
    ends = {start: start + size for size, start in found}
    assert pool._edges == ends | {end: start for start, end in ends.items()}
    return found


def free_runs(model: bytearray) -> list[tuple[int, int]]:
    """Return size and start of all maximal free runs."""
    found, at = [], 0
    for state, run in groupby(model):
        size = len(list(run))
        if state == FREE:
            found.append((size, at))
        at += size
    return found


class BytesMachine(RuleBasedStateMachine):
    """Kills the planted bugs of a gap not merged, merged wrongly, lost, or not the smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Allocator()
        self.model = bytearray(RANGE * RANGES)
        self.chunks: list[tuple[int, int]] = []

    @initialize(count=st.integers(0, 3))
    def start(self, count: int) -> None:
        """Begin with some ranges."""
        for index in range(count):
            self.grow(index)

    @rule(nbytes=st.integers(1, 24))
    def allocate(self, nbytes: int) -> None:
        """The smallest gap that fits is used, the first of equals, from its start."""
        fitting = [gap for gap in free_runs(self.model) if gap[0] >= nbytes]
        start = self.pool.allocate(nbytes)
        assert start == (min(fitting)[1] if fitting else None)
        if start is not None:
            self.model[start : start + nbytes] = bytes([USED]) * nbytes
            self.chunks.append((start, nbytes))

    @rule(which=st.integers(0, 100))
    def free(self, which: int) -> None:
        """Chunks come back in any order."""
        if self.chunks:
            start, nbytes = self.chunks.pop(which % len(self.chunks))
            self.pool.free(start, nbytes)
            self.model[start : start + nbytes] = bytes([FREE]) * nbytes

    @rule(sizes=st.lists(st.integers(1, RANGE), max_size=5))
    def plan(self, sizes: list[int]) -> None:
        """What is said to fit together can be taken, and nothing else can."""
        other = copy.deepcopy(self.pool)
        assert self.pool.fits(sizes) == all(other.allocate(n) is not None for n in sizes)

    @rule(index=st.integers(0, RANGES - 1))
    def grow(self, index: int) -> None:
        """A missing range is added; it merges with its neighbours."""
        here = slice(index * RANGE, (index + 1) * RANGE)
        if self.model[here] == bytes(RANGE):
            self.pool.add_range(here.start, RANGE)
            self.model[here] = bytes([FREE]) * RANGE

    @rule(index=st.integers(0, RANGES - 1))
    def shrink(self, index: int) -> None:
        """A range is taken away only if all of it is free, also out of the middle of a gap."""
        here = slice(index * RANGE, (index + 1) * RANGE)
        free = self.model[here] == bytes([FREE]) * RANGE
        assert self.pool.is_free(here.start, RANGE) == free
        assert self.pool.remove_range(here.start, RANGE) == free
        if free:
            self.model[here] = bytes(RANGE)

    @invariant()
    def agrees(self) -> None:
        """Chunk bytes and free bytes sum to the pool; gaps are maximal (inv. 1)."""
        gaps = free_runs(self.model)
        assert listed(self.pool) == sorted(gaps)
        assert self.pool.gaps == len(gaps)
        assert self.pool.largest_gap == max(gaps, default=(0, 0))[0]
        assert self.pool.free_bytes == self.model.count(FREE)
        assert self.pool.capacity == len(self.model) - self.model.count(ABSENT)
        assert self.pool.free_bytes + sum(n for _, n in self.chunks) == self.pool.capacity


BytesMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBytes = pytest.mark.slow(BytesMachine.TestCase)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 2), min_size=16, max_size=24),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=40),
    st.lists(st.integers(1, 2), max_size=24),
)
def test_of_equal_gaps_the_lowest_is_taken(
    chunks: list[int], calls: list[tuple[int, int]], plan: list[int]
) -> None:
    """Kills equal gaps that are out of order, forgotten, or listed when they are gone.

    Planted: a gap below the lowest of its size listed as a further one; the lowest taken and its
    follower left listed; an emptied list kept; a size left listed when its last gap is gone; a
    plan that counts one gap of each size.
    """
    pool, model = Allocator(), bytearray([FREE]) * UNITS
    pool.add_range(0, UNITS)
    live: list[tuple[int, int]] = []

    def take(size: int) -> None:
        fitting = [gap for gap in free_runs(model) if gap[0] >= size]
        start = pool.allocate(size)
        assert start == (min(fitting)[1] if fitting else None)
        if start is not None:
            model[start : start + size] = bytes([USED]) * size
            live.append((start, size))

    def give_back(start: int, size: int) -> None:
        pool.free(start, size)
        model[start : start + size] = bytes([FREE]) * size

    for size in chunks:
        take(size)
    for chunk in live[::2]:
        give_back(*chunk)
    del live[::2]
    for size, which in calls:
        if size:
            take(size)
        elif live:
            give_back(*live.pop(which % len(live)))
        assert listed(pool) == sorted(free_runs(model))
    other = copy.deepcopy(pool)
    assert pool.fits(plan) == all(other.allocate(n) is not None for n in plan)


def test_one_stuck_chunk_stops_nobody() -> None:
    """Kills a ring with one low-water mark (field report 27): A is never released."""
    pool = Allocator()
    pool.add_range(0, 4096)
    stuck = pool.allocate(512)
    assert stuck == 0
    order = random.Random(27)
    for _ in range(1000):
        sizes = [1024, 2048]
        starts = [pool.allocate(size) for size in sizes]
        chunks = list(zip(starts, sizes, strict=True))
        order.shuffle(chunks)
        for start, size in chunks:
            assert start is not None
            pool.free(start, size)
        assert pool.gaps == 1
        assert pool.largest_gap == 4096 - 512
    pool.free(stuck, 512)
    assert (pool.gaps, pool.largest_gap) == (1, 4096)


def test_a_chunk_may_lie_across_two_ranges() -> None:
    """Kills a pool that keeps its segments apart (field report 22)."""
    pool = Allocator()
    pool.add_range(0, 1024)
    pool.add_range(1024, 1024)
    assert pool.allocate(1536) == 0
    assert not pool.remove_range(0, 1024)
    assert not pool.remove_range(1024, 1024)
    pool.free(0, 1536)
    assert pool.remove_range(1024, 1024)
    assert (pool.capacity, pool.free_bytes, pool.largest_gap) == (1024, 1024, 1024)


def test_empty_pool_has_no_room() -> None:
    """Kills an index error where nothing was ever added."""
    pool = Allocator()
    assert pool.allocate(256) is None
    assert pool.largest_gap == pool.gaps == 0
    assert not pool.remove_range(0, 256)


def test_a_lost_gap_is_reported_not_papered_over() -> None:
    """Kills a free list that goes on after it has contradicted itself."""
    pool = Allocator()
    pool.add_range(0, 1024)
    pool._lowest.clear()
    with pytest.raises(LocalProtocolError, match=r"lost the range \[0, 1024\)"):
        pool.free(1024, 256)
