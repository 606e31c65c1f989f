"""When a task that never has to wait lets the loop turn, and what is queued waits for it."""

from __future__ import annotations

import asyncio

import pytest

from asyncvmm._io.due import Due
from asyncvmm._io.outbox import BATCH_MESSAGES
from asyncvmm._io.turn import MOST, Turn
from tests.io.ends import End, pair
from tests.patience import PROMPTLY


@pytest.mark.parametrize("features", [1, 3, 10])
def test_a_turn_is_over_after_some_features(features: int) -> None:
    """Kills: owners counted, not features; a turn that stays over, or begins where it ended."""
    turn = Turn()
    for _ in range(2):
        count = 0
        while not turn.over:
            turn.count(features)
            count += 1
        assert count == -(-MOST // features)
        turn.begin()
        assert not turn.over


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_one_flush_is_due_in_a_turn_also_where_something_left_before() -> None:
    """Kills: a second one scheduled beside it, so that a turn to linger in is over at once."""
    flushed: list[int] = []
    due = Due(asyncio.get_running_loop(), [0], lambda: flushed.append(1))
    due.soon()
    due.stop()
    assert due.scheduled
    due.linger()
    await turns(1)
    assert (flushed, due.lingers, due.scheduled) == ([], False, True)
    await turns(1)
    assert (flushed, due.scheduled) == ([1], False)


async def test_what_is_queued_lingers_once() -> None:
    """Kills: lingering for as long as somebody asks for it."""
    flushed: list[int] = []
    due = Due(asyncio.get_running_loop(), [0], lambda: flushed.append(1))
    due.soon()
    for _ in range(2):
        due.linger()
        await turns(1)
    assert flushed == [1]
    due.stop()
    due.soon()
    due.linger()
    await turns(1)
    assert flushed == [1]
    await turns(1)
    assert flushed == [1, 1]


async def test_halves_of_a_packet_leave_together_with_a_turn_between_them() -> None:
    """Kills: a turn that makes two packets of one; an empty queue that lingers for the next."""
    a, b = pair()
    left, right = End(a), End(b)
    right.link.start()
    half = BATCH_MESSAGES // 2
    try:
        for _ in range(3):
            for _ in range(half):
                left.link.post(b"x")
            left.link.due.linger()
            await turns(1)
            for _ in range(half):
                left.link.post(b"y")
            left.link.due.linger()  # with nothing queued
            await turns(1)
        await right.until(lambda: len(right.messages) == 3 * BATCH_MESSAGES)
        assert len(right.packets) == 3
    finally:
        left.link.abort()
        right.link.abort()


async def test_a_link_that_ends_while_it_lingers_is_left_alone() -> None:
    """Kills: a flush of a closed socket, and a last message that waits for ever."""
    a, b = pair()
    left, right = End(a), End(b)
    left.link.start()
    right.link.start()
    left.link.post(b"last")
    left.link.due.linger()
    assert await left.link.finish(PROMPTLY)
    assert right.messages == [b"last"]
    left.link.post(b"never")
    left.link.due.linger()
    await turns(3)
    assert left.ends == []
