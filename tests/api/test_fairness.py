"""Who sends or receives in a tight loop leaves turns to others (inv. 10)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

import asyncvmm
from asyncvmm._io.turn import MOST
from asyncvmm.testing import Pair, open_pair
from tests.api.books import check_all_back, until

ONE = {"x": torch.ones(3)}
TEN = {f"{n}": torch.ones(3) for n in range(10)}
MANY = 64


class Turns:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._go = True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._go:
            self.count += 1
            self._loop.call_soon(self._turn)

    def stop(self) -> int:
        self._go = False
        return self.count


def in_a_turn(owner: dict[str, torch.Tensor]) -> int:
    """Return how many such owners a task may hand over in one turn."""
    return -(-MOST // len(owner))


async def send(pair: Pair) -> None:
    await pair.exporter.send(ONE)


async def send_ten(pair: Pair) -> None:
    await pair.exporter.send(TEN)


async def reserve(pair: Pair) -> None:
    async with pair.exporter.reserve({"x": asyncvmm.TensorSpec((3,), torch.float32)}) as owner:
        owner["x"].fill_(1)
        owner.publish()


@pytest.mark.parametrize("hand_over", [send, send_ten, reserve])
async def test_a_producer_that_never_waits_leaves_turns(
    hand_over: Callable[[Pair], object],
) -> None:
    """Kills: sends that return at once for as long as there is room."""
    async with open_pair(slots=2 * MANY, prefetch=MANY) as pair:
        turns = Turns()
        for _ in range(MANY):
            await hand_over(pair)  # type: ignore[misc]  # both are coroutine functions
        assert turns.stop() >= MANY // in_a_turn(TEN if hand_over is send_ten else ONE) - 1
        for _ in range(MANY):
            (await pair.consumer.receive()).release()
        await pair.exporter.drain()
        check_all_back(pair.exporter)


@pytest.mark.parametrize("owner", [ONE, TEN], ids=["of one", "of ten"])
async def test_a_consumer_that_never_waits_leaves_turns(owner: dict[str, torch.Tensor]) -> None:
    """Kills: receiving for as long as there is something in the inbox, or by owners alone."""
    async with open_pair(slots=2 * MANY, prefetch=MANY) as pair:
        for _ in range(MANY):
            await pair.exporter.send(owner)
        await until(lambda: pair.consumer.statistics().unread == MANY)
        turns = Turns()
        for _ in range(MANY):
            (await pair.consumer.receive()).release()
        assert turns.stop() >= MANY // in_a_turn(owner) - 1
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_a_turn_left_to_others_can_be_cancelled_and_loses_nothing() -> None:
    """Cancelled at every point of a burst.  Kills: a turn after something was taken (inv. 9)."""
    async with open_pair(slots=2 * MANY, prefetch=MANY) as pair:
        sent = received = 0

        async def produce() -> None:
            nonlocal sent
            while True:
                await pair.exporter.send(ONE)
                sent += 1

        async def consume() -> None:
            nonlocal received
            while True:
                (await pair.consumer.receive()).release()
                received += 1

        for turns in range(40):
            for work in (produce(), consume()):
                task = asyncio.create_task(work)
                for _ in range(turns % 7):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
        while received < sent:
            (await pair.consumer.receive()).release()
            received += 1
        await pair.exporter.drain()
        assert pair.exporter.statistics().published == sent
        check_all_back(pair.exporter)
