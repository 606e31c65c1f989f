"""Which bytes of the pool are free, against a bytearray that says so byte by byte."""

from __future__ import annotations

import copy
import random
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncvmm._core.allocator import Allocator
from asyncvmm._errors import LocalProtocolError

ABSENT, FREE, USED = 0, 1, 2
RANGE = 16
RANGES = 6


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

    def gaps(self) -> list[tuple[int, int]]:
        """Return size and start of all maximal free runs."""
        found, at = [], 0
        for state, run in groupby(self.model):
            size = len(list(run))
            if state == FREE:
                found.append((size, at))
            at += size
        return found

    @rule(nbytes=st.integers(1, 24))
    def allocate(self, nbytes: int) -> None:
        """The smallest gap that fits is used, the first of equals, from its start."""
        fitting = [gap for gap in self.gaps() if gap[0] >= nbytes]
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
        gaps = self.gaps()
        assert self.pool._sorted == sorted(gaps)
        assert self.pool.gaps == len(gaps)
        assert self.pool.largest_gap == max(gaps, default=(0, 0))[0]
        assert self.pool.free_bytes == self.model.count(FREE)
        assert self.pool.capacity == len(self.model) - self.model.count(ABSENT)
        assert self.pool.free_bytes + sum(n for _, n in self.chunks) == self.pool.capacity
        assert self.pool._by_start == {start: size for size, start in gaps}
        assert self.pool._by_end == {start + size: start for size, start in gaps}


BytesMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBytes = pytest.mark.slow(BytesMachine.TestCase)


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
    pool._sorted.clear()
    with pytest.raises(LocalProtocolError, match=r"lost the range \[0, 1024\)"):
        pool.free(1024, 256)
