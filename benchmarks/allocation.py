"""What one allocate and free costs beside many live chunks."""

from __future__ import annotations

import random
import time
from typing import Any

from asyncvmm._core.allocator import Allocator
from benchmarks.rows import latency_fields

_BATCH = 256
_UNIT = 256


def allocate_and_free(live: int, seconds: float) -> dict[str, Any]:
    """Return the cost with ``live`` chunks out, of sizes like those of features.

    Sizes are log-normal with a median of about 22 KiB.  The free list is broken up first, by
    freeing and allocating at random as often as there are chunks.
    """
    allocator, chunks, draw = _broken_up(live)
    costs: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(costs) < 2:
        sizes = [_size(draw) for _ in range(_BATCH)]
        places = [draw.randrange(live) for _ in range(_BATCH)]
        started = time.perf_counter()
        for size, place in zip(sizes, places, strict=True):
            allocator.free(*chunks[place])
            start = allocator.allocate(size)
            assert start is not None  # the pool is twice as large as what is out
            chunks[place] = (start, size)
        costs.append((time.perf_counter() - started) / _BATCH)
    # Looked at once: walking all chunks would leave nothing of the free list in the cache.
    wrong = int(sum(size for _, size in chunks) + allocator.free_bytes != allocator.capacity)
    per_s = len(costs) / sum(costs)
    return {"per_s": per_s, "cpu_us": 1e6 / per_s, "wrong": wrong} | latency_fields(costs)


def _broken_up(live: int) -> tuple[Allocator, list[tuple[int, int]], random.Random]:
    draw = random.Random(11)
    allocator = Allocator()
    sizes = [_size(draw) for _ in range(live)]
    allocator.add_range(0, 2 * sum(sizes) + (64 << 20))
    chunks = []
    for size in sizes:
        start = allocator.allocate(size)
        assert start is not None
        chunks.append((start, size))
    for _ in range(live):
        place = draw.randrange(live)
        allocator.free(*chunks[place])
        size = _size(draw)
        start = allocator.allocate(size)
        assert start is not None
        chunks[place] = (start, size)
    return allocator, chunks, draw


def _size(draw: random.Random) -> int:
    return _UNIT * max(1, min(1 << 16, round(draw.lognormvariate(4.5, 1.5))))
