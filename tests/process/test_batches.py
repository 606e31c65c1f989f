"""Batches of several owners among processes, some of which are killed in the middle of one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import asyncvmm
from asyncvmm import Outcome, blocking
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers, until
from tests.process.patterns import features, note


def several(*owners: int) -> dict[str, Any]:
    return {
        "owners": [features(owner, 0, 500) for owner in owners],
        "keys": owners,
        "metadata": [note(owner, 0, 500) for owner in owners],
        "require": "none",
    }


async def outcomes(acks: list[asyncvmm.Acknowledgement]) -> list[Outcome]:
    async with asyncio.timeout(PROMPTLY):
        return [await ack for ack in acks]


async def test_a_rank_is_killed_in_the_middle_of_a_batch(peers: Peers) -> None:
    """Two ranks have a batch of three; one lets go of it, the other dies; the next one is served.

    Kills: owners of a batch that are lost with one of its readers for the other, or never free.
    """
    options: dict[str, Any] = {"device": "cpu", "pool_bytes": "64KiB", "slots": 6}
    async with asyncvmm.open_exporter("pool", route=asyncvmm.Broadcast(2), **options) as exporter:
        ranks = [peers.start() for _ in range(2)]
        for rank, peer in enumerate(ranks):
            await peer.call(steps.connect, "pool", rank)
        first = await exporter.send_all(**several(0, 1, 2))
        second = await exporter.send_all(**several(3, 4, 5))
        for peer in ranks:
            assert await peer.call(steps.take, 2) == [0, 1, 2, 3, 4, 5]
        await ranks[0].call(steps.give_back, 1)
        await ranks[1].call(steps.give_back, 1)
        assert await outcomes(first) == [Outcome(released=(0, 1))] * 3
        await ranks[1].killed()
        assert not any(ack.done() for ack in second)
        await ranks[0].call(steps.look_again)
        await ranks[0].call(steps.give_back)
        assert await outcomes(second) == [Outcome(released=(0,), lost=(1,))] * 3
        third = await exporter.send_all(**several(6, 7, 8, 9, 10, 11), to=0)
        assert await ranks[0].call(steps.take, 1) == [6, 7, 8, 9, 10, 11]
        await ranks[0].call(steps.give_back)
        assert await outcomes(third) == [Outcome(released=(0,))] * 6
        await until(lambda: exporter.statistics().slots.free == 6)
        await ranks[0].call(steps.leave)


async def test_a_competitor_is_killed_with_one_batch_taken_and_one_not(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    """What it had taken is lost as a whole; what it had not goes to another as a whole.

    Kills: a batch that is torn apart when it goes to another, one that two begin, and a log that
    counts as lost what went to another.
    """
    options: dict[str, Any] = {"device": "cpu", "pool_bytes": "64KiB", "slots": 6}
    async with asyncvmm.open_exporter("pool", route=asyncvmm.Compete(), **options) as exporter:
        one, other = peers.start(), peers.start()
        await one.call(steps.connect, "pool")
        taken = await exporter.send_all(**several(0, 1, 2))
        untaken = await exporter.send_all(**several(3, 4, 5))
        assert await one.call(steps.take, 1) == [0, 1, 2]
        await other.call(steps.connect, "pool")
        await one.killed()
        assert [len(outcome.lost) for outcome in await outcomes(taken)] == [1] * 3
        assert "died holding 3 owners" in caplog.text
        assert await other.call(steps.take, 1) == [3, 4, 5]
        await other.call(steps.give_back)
        assert [len(outcome.released) for outcome in await outcomes(untaken)] == [1] * 3
        await until(lambda: exporter.statistics().slots.free == 6)
        await other.call(steps.leave)


async def test_code_that_is_not_async_sends_a_batch_to_another_process(peers: Peers) -> None:
    """Kills: a facade that sends its owners one by one, or waits for none of them."""
    peer = peers.start()

    def send() -> list[Outcome]:
        with blocking.open_exporter("pool", device="cpu", pool_bytes="64KiB", slots=4) as exporter:
            exporter.wait_attached(1, timeout=PROMPTLY)
            acks = exporter.send_all(**several(0, 1, 2))
            assert [ack.key for ack in acks] == [0, 1, 2]
            with pytest.raises(asyncvmm.WouldBlock, match="1 slots are free"):
                exporter.send_all_nowait(**several(3, 4))
            with pytest.raises(TimeoutError):
                exporter.send_all(**several(3, 4), timeout=0.01)
            begun.set()
            return [ack.result(PROMPTLY) for ack in acks]

    begun = threading.Event()
    sending = asyncio.create_task(asyncio.to_thread(send))
    await peer.call(steps.connect, "pool", 0)
    assert await peer.call(steps.take, 1) == [0, 1, 2]
    assert await asyncio.to_thread(begun.wait, PROMPTLY)
    await peer.call(steps.give_back)
    assert await sending == [Outcome(released=(0,))] * 3
    await peer.call(steps.leave)
