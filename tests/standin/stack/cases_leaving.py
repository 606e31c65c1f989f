"""Consumers that come and go, in order or not: what becomes of their events and fences."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, suppress

import pytest
import torch

import asyncvmm
from asyncvmm._backends import events
from tests.patience import PROMPTLY
from tests.process import steps as common
from tests.process.harness import Peers, until
from tests.standin import Standin
from tests.standin.stack import steps
from tests.standin.stack.cases_handoff import send
from tests.standin.stack.conftest import NAME, connecting, exporting


async def test_a_consumer_that_leaves_gives_its_events_back_once_its_fences_are_done(
    driver: Standin, peers: Peers
) -> None:
    """Planted bugs: events kept until the exporter closes; given back while a fence is asked."""
    async with exporting() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        await peer.call(steps.control, "hold")
        acks = [await send(exporter, owner, 100) for owner in range(2)]
        await peer.call(common.take, 2)
        await peer.call(common.give_back)
        leaving = peer.begin(common.leave)
        await leaving
        assert exporter.statistics().slots.draining == 2
        assert driver.ledger().opened == 2
        await peer.call(steps.control, "finish")
        for ack in acks:
            assert (await ack).complete
        await until(lambda: driver.ledger().opened == 0)


async def test_reconnecting_hundreds_of_times(driver: Standin) -> None:
    """Planted bug: what a consumer's events took of the budget stays taken."""
    x = torch.ones(4)
    async with exporting(slots=1, route=asyncvmm.Compete()) as exporter:
        for count in range(300):  # on each of two loops
            async with connecting(None) as consumer:
                ack = await exporter.send({"x": x})
                with await consumer.receive() as batch:
                    batch[0]["x"]
                await ack
            if count == 100:
                before = driver.ledger(), events.budget.live
    await until(lambda: events.budget.live == 0)
    assert before[0].opened <= 2  # ours and the next one's
    assert before[1] <= 6


async def test_a_killed_consumers_fences_count_as_done(driver: Standin, peers: Peers) -> None:
    """Planted bugs: its slots stay quarantined; its pending fences are waited for."""
    async with exporting() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        await peer.call(steps.control, "hold")
        acks = [await send(exporter, owner, 100) for owner in range(4)]
        await peer.call(common.take, 3)  # one stays unread
        await peer.call(common.give_back, 2)
        await until(lambda: exporter.statistics().slots.draining == 2)
        await peer.killed()
        await until(lambda: all(ack.done() for ack in acks))
        slots = exporter.statistics().slots
        assert (slots.free, slots.quarantined) == (4, 0)
        lost = [ack.outcome is not None and bool(ack.outcome.lost) for ack in acks]
        assert lost == [False, False, True, True]
        assert driver.ledger().opened == 0


async def test_every_order_of_opening_and_closing(driver: Standin) -> None:
    """64 rounds: two exporters' and their consumers' exits in every order that may be.

    Planted bug: a handle, range or context that one of the orders leaves.
    """
    before = driver.ledger()
    orders = itertools.cycle(itertools.permutations(range(3)))
    for order in itertools.islice(orders, 64):
        stacks = [AsyncExitStack() for _ in range(3)]
        exporter = await stacks[0].enter_async_context(
            exporting(slots=2, route=asyncvmm.Broadcast(2), close_timeout=0.0)
        )
        consumers = [
            await stacks[1 + rank].enter_async_context(connecting(rank)) for rank in range(2)
        ]
        ack = await exporter.send({"x": torch.ones(4)})
        views = [(await consumer.receive())[0]["x"] for consumer in consumers]
        del views
        await ack
        for side in order:
            await stacks[side].aclose()
        assert driver.ledger() == before, order


@pytest.mark.parametrize("way", ["viewed", "cancelled"])
async def test_an_event_outlives_its_consumer_until_the_exporter_has_opened_it(
    driver: Standin, way: str
) -> None:
    """The first release of a slot brings its event, and here it is the last word of all.

    Planted bugs: the event is given back as soon as the word is on the socket, so that the slot
    drains for ever; or it is kept for as long as the process lives.
    """
    async with exporting(slots=1) as exporter:
        async with connecting() as consumer:
            ack = await exporter.send({"x": torch.ones(4)})
            batch = await consumer.receive()
            view = batch[0]["x"]
            del batch
            if way == "cancelled":
                del view
                leaving = consumer.aclose()
                leaving.send(None)
                with suppress(asyncio.CancelledError):
                    while True:  # at each await, before the loop can turn
                        leaving.throw(asyncio.CancelledError())
        if way == "viewed":
            assert view.tolist() == [1.0] * 4
            del view
        async with asyncio.timeout(PROMPTLY):
            assert (await ack).complete
            await until(lambda: driver.ledger().mappings == 1 and not driver.ledger().opened)
