"""Consumers that stand still, or lose their socket, while their process lives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm._consumer import consumer as consumer_module
from asyncvmm.testing.counters import descriptors
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers, turns, until
from tests.process.patterns import features, note


def open_exporter(ranks: int, **options: Any) -> asyncvmm.open_exporter:
    route = asyncvmm.Broadcast(ranks) if ranks else asyncvmm.Compete()
    options = {"pool_bytes": "64KiB", "slots": 6, **options}
    return asyncvmm.open_exporter("pool", device="cpu", route=route, **options)


async def send(exporter: asyncvmm.Exporter, owner: int) -> asyncvmm.Acknowledgement:
    data = features(owner, 0, 500)
    return await exporter.send(data, key=owner, metadata=note(owner, 0, 500), require="none")


def holding(exporter: asyncvmm.Exporter) -> dict[Any, int]:
    """Return how many owners each consumer holds, by name."""
    return {each.member: each.holding for each in exporter.statistics().consumers}


@pytest.mark.parametrize("end", ["cont", "kill"])
async def test_a_stopped_competitor_costs_its_share_and_nothing_else(
    peers: Peers, end: str
) -> None:
    """Stop one of two under load: the other gets everything else (field reports 12, 26).

    Kills: a batch that waits for a consumer which does not take what it has, and a stopped
    consumer that is taken for a dead one.
    """
    async with open_exporter(0) as exporter:
        first, second = peers.start(), peers.start()
        await first.call(steps.connect, "pool", None, {"member": "first", "prefetch": 2})
        await second.call(steps.connect, "pool", None, {"member": "second", "prefetch": 2})
        stopped = [await send(exporter, owner) for owner in range(4)]
        await first.call(steps.take, 1)
        await second.call(steps.take, 2)
        first.stop()
        await second.call(steps.give_back)
        serving = second.begin(steps.receive_forever)
        for owner in range(4, 60):  # ten times as many as there are slots
            await send(exporter, owner)
        await until(lambda: holding(exporter)["second"] == 0)
        statistics = exporter.statistics()
        assert holding(exporter)["first"] <= 3
        assert statistics.slots.quarantined == 0  # it has its socket, and it lives
        if end == "cont":
            first.resume()
            # By the exporter's count: the consumer may not have read all that it was sent.
            await first.call(steps.take, holding(exporter)["first"] - 1)
            await first.call(steps.give_back)
        else:
            await first.killed()
        async with asyncio.timeout(PROMPTLY):
            outcomes = [await ack for ack in stopped]
            await exporter.drain()
        assert all(outcome.released or outcome.lost for outcome in outcomes)
        assert any(outcome.lost for outcome in outcomes) == (end == "kill")
        assert exporter.statistics().slots.free == 6
    assert await serving >= 50


@pytest.mark.parametrize("end", ["cont", "kill"])
async def test_a_stopped_rank_makes_the_producer_wait_visibly(peers: Peers, end: str) -> None:
    """Stop one of two ranks: the producer waits, and says for whom (field reports 12, 26).

    Kills: a wait that shows nowhere, an error in the rank that goes on, a slot that is reused
    without the stopped rank's word.
    """
    async with open_exporter(2) as exporter:
        slow, quick = peers.start(), peers.start()
        await slow.call(steps.connect, "pool", 0)
        await quick.call(steps.connect, "pool", 1)
        serving = quick.begin(steps.receive_forever)
        slow.stop()
        acks = [await send(exporter, owner) for owner in range(6)]
        for count in range(1, 7):
            assert (await quick.at("received"))["count"] == count
        waiting = asyncio.ensure_future(send(exporter, 6))
        await until(lambda: exporter.statistics().waiting == 1)
        await until(lambda: {owner.held_by for owner in exporter.statistics().owners} == {(0,)})
        statistics = exporter.statistics()
        assert statistics.oldest_wait > 0
        assert [owner.state for owner in statistics.owners] == ["held"] * 6
        assert holding(exporter) == {0: 6, 1: 0}
        assert not waiting.done()
        if end == "cont":
            slow.resume()
            await slow.call(steps.take, 6)
            await slow.call(steps.give_back)
        else:
            await slow.killed()
            slow = peers.start()  # the rank's next process gets what was sent since
            await slow.call(steps.connect, "pool", 0)
        async with asyncio.timeout(PROMPTLY):
            last = await waiting
            outcomes = [await ack for ack in acks]
        released = (1, 0) if end == "cont" else (1,)
        assert {outcome.released for outcome in outcomes} == {released}
        assert {outcome.lost for outcome in outcomes} == {() if end == "cont" else (0,)}
        assert await slow.call(steps.take, 1) == [6]
        await slow.call(steps.give_back)
        assert (await last).complete
    assert await serving == 7


async def test_a_waiter_wakes_with_the_last_release_and_no_other_call(peers: Peers) -> None:
    """Three ranks, one late: what all three finished is free at once (field report 26).

    Kills: free slots that are found only when somebody asks, and a rank's lateness that holds
    owners which it has finished.
    """
    async with open_exporter(3, slots=2) as exporter:
        ranks = [peers.start() for _ in range(3)]
        for rank, peer in enumerate(ranks):
            await peer.call(steps.connect, "pool", rank)
        await send(exporter, 0)
        await send(exporter, 1)
        for peer in ranks:
            await peer.call(steps.take, 2)
        waiting = asyncio.ensure_future(send(exporter, 2))
        for peer in ranks[:2]:
            await peer.call(steps.give_back)
        await until(lambda: holding(exporter) == {0: 0, 1: 0, 2: 2})
        assert not waiting.done()
        assert {owner.held_by for owner in exporter.statistics().owners} == {(2,)}
        assert max(each.oldest for each in exporter.statistics().consumers) > 0
        woken = asyncio.Event()
        waiting.add_done_callback(lambda _: woken.set())
        await ranks[2].call(steps.give_back, 1)
        await woken.wait()
        assert holding(exporter) == {0: 1, 1: 1, 2: 2}
        for peer in ranks:
            await peer.call(steps.take, 1)
            await peer.call(steps.give_back)


async def test_a_lost_socket_quarantines_until_the_process_ends(peers: Peers) -> None:
    """Its owners are nobody's to reuse while it may read them (field reports 12, 19).

    Kills: end-of-file taken for the end of the process, quarantine that shows nowhere, and one
    that takes more than what only the lost consumer holds.
    """
    async with open_exporter(0) as exporter:
        lost, other = peers.start(), peers.start()
        await lost.call(steps.connect, "pool", None, {"member": "lost", "prefetch": 2})
        acks = [await send(exporter, owner) for owner in range(3)]
        assert await lost.call(steps.take, 2) == [0, 1]  # one in its hands unread
        await lost.call(steps.close_socket)
        await until(lambda: exporter.statistics().slots.quarantined == 3)
        await other.call(steps.connect, "pool", None, {"member": "other"})
        serving = other.begin(steps.receive_forever)
        for owner in range(3, 30):
            assert (await (await send(exporter, owner))).released == ("other",)
        statistics = exporter.statistics()
        assert statistics.slots.quarantined == 3
        assert [(o.key, o.state) for o in statistics.owners] == [
            (owner, "quarantined") for owner in range(3)
        ]
        assert {owner.held_by for owner in statistics.owners} == {("lost",)}
        (entry,) = (each for each in statistics.consumers if each.member == "lost")
        assert (entry.pid, entry.quarantined, entry.holding) == (lost.pid, True, 3)
        assert not any(ack.done() for ack in acks)
        await lost.killed()
        async with asyncio.timeout(PROMPTLY):
            outcomes = [await ack for ack in acks]
        assert outcomes[:2] == [asyncvmm.Outcome(lost=("lost",))] * 2
        assert outcomes[2] == asyncvmm.Outcome(released=("other",))  # it was not taken
        assert exporter.statistics().slots.free == 6
        assert [each.member for each in exporter.statistics().consumers] == ["other"]
    assert await serving == 28


async def test_a_rank_whose_socket_is_lost_can_be_taken_by_another_process(peers: Peers) -> None:
    """What the lost one holds stays quarantined once the other rank is done with it.

    Kills: a seat that stays taken by a consumer nobody can talk to, and a quarantine that begins
    while another rank still reads, or frees what the lost one holds when that rank is done.
    """
    async with open_exporter(2) as exporter:
        lost, other = peers.start(), peers.start()
        await lost.call(steps.connect, "pool", 0)
        await other.call(steps.connect, "pool", 1)
        ack = await send(exporter, 0)
        await lost.call(steps.take, 1)
        await other.call(steps.take, 1)
        await lost.call(steps.close_socket)
        await until(lambda: any(c.quarantined for c in exporter.statistics().consumers))
        assert exporter.statistics().slots.held == 1  # by the other rank
        successor = peers.start()
        await successor.call(steps.connect, "pool", 0)
        await other.call(steps.give_back)
        await until(lambda: exporter.statistics().slots.quarantined == 1)
        later = await send(exporter, 1)
        for peer in (successor, other):
            assert await peer.call(steps.take, 1) == [1]
            await peer.call(steps.give_back)
        assert (await later).released == (0, 1) or (await later).released == (1, 0)
        assert not ack.done()
        await lost.killed()
        async with asyncio.timeout(PROMPTLY):
            assert await ack == asyncvmm.Outcome(released=(1,), lost=(0,))


async def test_releases_that_were_on_their_way_count_after_the_socket_is_lost(
    peers: Peers,
) -> None:
    """Close it with a batch unread, so that the kernel reports a reset ahead of the releases.

    Kills: a reset that is acted upon before what came ahead of it was read.
    """
    async with open_exporter(1) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        acks = [await send(exporter, owner) for owner in range(3)]
        await peer.call(steps.take, 3)
        closing = peer.begin(steps.give_back_and_close_socket, 2)
        await peer.at("before")
        acks.append(await send(exporter, 3))
        await turns()
        sockets = descriptors(peer.pid)["socket"]
        peer.go("before")
        while descriptors(peer.pid)["socket"] == sockets:
            pass  # no await, so that the releases and the reset are there at once
        await closing
        async with asyncio.timeout(PROMPTLY):
            assert [(await ack).released for ack in acks[:2]] == [(0,), (0,)]
        await until(lambda: exporter.statistics().slots.quarantined == 2)
        await turns(20)
        assert not any(ack.done() for ack in acks[2:])
        await peer.killed()
        async with asyncio.timeout(PROMPTLY):
            assert [(await ack).lost for ack in acks[2:]] == [(0,), (0,)]


@pytest.mark.parametrize("viewed", [False, True])
async def test_a_consumer_leaves_an_exporter_that_stands_still(
    folder: Path, monkeypatch: pytest.MonkeyPatch, viewed: bool
) -> None:
    """More releases than its socket takes; it goes on when the consumer has long left.

    Kills: last words that are dropped with a full socket, so that the owners are quarantined
    until the consumer's process ends.
    """
    monkeypatch.setattr(consumer_module, "GOODBYE_SECONDS", 0.05)
    count = 400
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="1MiB", slots=count
    ) as exporter:
        consumer = await asyncvmm.connect("pool", device="cpu", rank=0).__aenter__()
        acks = [
            await exporter.send({"x": torch.ones(1)}, require="none", key=key)
            for key in range(count)
        ]
        batches = [await consumer.receive() for _ in acks]
        link = exporter._connections.open[0].link
        link.pause()
        views = [batch[0]["x"] for batch in batches[-100:]] if viewed else []
        while batches:
            batches.pop().release()
            consumer._link.flush()  # a packet for each
        assert consumer._link.queued
        await consumer.aclose()
        views.clear()
        link.start()
        async with asyncio.timeout(PROMPTLY):
            assert all([(await ack).complete for ack in acks])
            while exporter.statistics().consumers:
                await turns(1)
