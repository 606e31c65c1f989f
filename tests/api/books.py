"""What the tests of the public face check again and again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from time import monotonic

from asyncvmm import Exporter, PoolStatistics
from tests.patience import PROMPTLY


async def passes(count: int = 1) -> None:
    """Let the loop go round ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], what: str = "", seconds: float = PROMPTLY) -> None:
    """Let the loop go round until the condition holds; fail after ``seconds``.

    After some hundred rounds it rests in each: a loop that never does keeps the interpreter's
    lock, on a busy machine for seconds, from the very thread that is waited for.
    """
    deadline = monotonic() + seconds
    for count in itertools.count():
        if condition():
            return
        if monotonic() > deadline:
            raise AssertionError(f"never came true: {what or condition}")
        await asyncio.sleep(0 if count < 300 else 0.001)


def check_books(exporter: Exporter) -> PoolStatistics:
    """Check that slots and bytes add up (inv. 1); return the numbers."""
    stats = exporter.statistics()
    slots = stats.slots
    states = slots.free, slots.filling, slots.held, slots.draining, slots.quarantined
    assert min(states) >= 0, slots
    assert sum(states) == slots.total == len(exporter._core.slots.states), slots
    assert len(stats.owners) == slots.total - slots.free, stats
    assert stats.used_bytes + stats.free_bytes == stats.pool_bytes, stats
    assert sum(owner.nbytes for owner in stats.owners) == stats.used_bytes, stats
    assert stats.largest_gap <= stats.free_bytes, stats
    return stats


def check_all_back(exporter: Exporter) -> PoolStatistics:
    """Check that every slot and every byte is free, the bytes in one gap per segment at most."""
    stats = check_books(exporter)
    assert stats.slots.free == stats.slots.total, stats
    assert stats.used_bytes == 0, stats
    assert stats.gaps <= stats.segments, stats
    assert stats.owners == (), stats
    return stats


def check_no_sleeper(exporter: Exporter) -> None:
    """Check that whoever is first in the queue for room is awake if its room is there (inv. 9)."""
    queue = exporter._room.queue
    if not queue:
        return
    head = queue[0]
    assert head.future is not None
    assert head.future.done() or not exporter._room._fits(head.sizes), (
        f"{len(queue)} wait, the first for {head.sizes} bytes, which are free"
    )
