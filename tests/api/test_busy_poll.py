"""Who waits for quick answers does not go to sleep in between, and only then."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm._io import busy
from asyncvmm.testing import open_pair
from tests.api import steps as own_steps
from tests.api.syscalls import SystemCalls
from tests.api.test_costs import settled, switches
from tests.process import steps
from tests.process.harness import Peers

ONE = {"x": torch.ones(100)}
ROUNDS = 300
LONG = 0.01
"""Seconds, far more than an answer takes on a busy machine: no question of speed."""


async def closed_loop(peers: Peers, busy_poll: float) -> tuple[int, int]:
    """Hand over one at a time; return how often the exporter and the consumer went to sleep."""
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="64KiB", busy_poll=busy_poll
    ) as exporter:
        rank = peers.start()
        await rank.call(own_steps.keep_the_core)
        await rank.call(steps.connect, "pool", 0, {"busy_poll": busy_poll})
        await exporter.wait_attached(1)
        serving = rank.begin(own_steps.receive_and_release, ROUNDS)
        ours, theirs = switches(os.getpid()), switches(rank.pid)
        for _ in range(ROUNDS):
            await (await exporter.send(ONE))
        counts = switches(os.getpid()) - ours, switches(rank.pid) - theirs
        await serving
    return counts


async def test_a_closed_loop_hardly_sleeps(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, one hand-off at a time: fewer than half of them put either side to sleep.

    They keep the core, for other tests may run.  Kills: turns that are never made, or only once,
    by either side; an end that learns nothing.
    """
    monkeypatch.setattr(busy, "WANTED_SECONDS", 3600.0)
    ours, theirs = await closed_loop(peers, LONG)
    assert ours < ROUNDS / 2
    assert theirs < ROUNDS / 2


async def test_without_it_hand_offs_sleep(peers: Peers) -> None:
    """On a busy machine one side may sleep at none, for each answer is there when it looks.

    Kills: an option that switches nothing off, and a count above that counts nothing.
    """
    assert max(await closed_loop(peers, 0)) > ROUNDS / 2


async def test_what_is_pending_for_long_is_slept_on(peers: Peers) -> None:
    """After many quick answers there is one that does not come: both ends sleep.

    Kills: a window without an end, and one that begins anew by itself.
    """
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="64KiB", busy_poll=LONG, explain_after=math.inf
    ) as exporter:
        rank = peers.start()
        await rank.call(steps.connect, "pool", 0, {"busy_poll": LONG})
        await exporter.wait_attached(1)
        serving = rank.begin(own_steps.receive_and_release, 50)
        for _ in range(50):
            await (await exporter.send(ONE))
        await serving
        ack = await exporter.send(ONE)
        waiter = asyncio.ensure_future(wait_for(ack))
        before = await settled(rank)
        with SystemCalls() as calls:
            await asyncio.sleep(0.1)
        assert switches(rank.pid) == before
        assert calls.others == {}
        assert calls.polls["poll"] <= 3  # into the sleep, and out of it
        assert not waiter.done()
        await rank.call(own_steps.receive_and_release)
        await waiter


async def wait_for(ack: asyncvmm.Acknowledgement) -> None:
    await ack


async def test_who_waits_no_more_turns_no_more() -> None:
    """Cancelled, the waits of both ends are over at once.

    Kills: a wait that is entered and never left.
    """
    async with open_pair() as pair:
        exporter, consumer = pair.exporter, pair.consumer
        ack = await exporter.send(ONE)
        with await consumer.receive():
            waits = [asyncio.ensure_future(w) for w in (wait_for(ack), consumer.receive())]
            await asyncio.sleep(0)
            ends = (exporter._connections.busy, consumer._link.busy)
            assert [end._waiting for end in ends] == [1, 1]
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
            assert [end._waiting for end in ends] == [0, 0]


async def test_every_wait_counts() -> None:
    """An acknowledgement, room, room for many, and a drain.

    Kills: a wait that was forgotten, in which the exporter then sleeps.
    """
    async with open_pair(slots=1) as pair:
        exporter = pair.exporter
        ack = await exporter.send(ONE)
        with await pair.consumer.receive():
            waits: list[asyncio.Future[Any]] = []
            for number, wait in enumerate(
                (wait_for(ack), exporter.send(ONE), exporter.drain(), exporter.export_all([ONE])), 1
            ):
                waits.append(asyncio.ensure_future(wait))
                await asyncio.sleep(0)
                assert exporter._connections.busy._waiting == number
            for other in waits[1:]:
                other.cancel()
        await asyncio.wait(waits)
        assert not exporter._connections.busy._waiting


@pytest.mark.parametrize("busy_poll", [0, 0.003])
async def test_both_ends_do_as_they_were_told(busy_poll: float) -> None:
    """Kills: an option that one of the ends takes and forgets."""
    async with open_pair(busy_poll=busy_poll) as pair:
        assert pair.exporter._connections.busy._longest == busy_poll
        assert pair.consumer._link.busy._longest == busy_poll


async def test_with_many_in_flight_it_is_not_worth_it() -> None:
    """A packet of them at most is.  Kills: turning where many answers share one sleep anyway."""
    async with open_pair(slots=64) as pair:
        worth = pair.exporter._connections.busy._worth
        assert not worth()  # nobody has anything
        for _ in range(16):
            await pair.exporter.send(ONE)
            assert worth()
        await pair.exporter.send(ONE)
        assert not worth()
        for _ in range(17):
            (await pair.consumer.receive()).release()
        await pair.exporter.drain()
        assert not worth()


@pytest.mark.parametrize("bad", [-1, 50, math.inf, math.nan, True, None, "50us"])
def test_what_is_no_time_is_refused_at_once(bad: Any) -> None:
    """Kills: microseconds, as Linux has them, taken for seconds."""
    with pytest.raises(asyncvmm.ArgumentError, match="busy_poll"):
        asyncvmm.open_exporter("pool", busy_poll=bad)
    with pytest.raises(asyncvmm.ArgumentError, match="busy_poll"):
        asyncvmm.connect("pool", busy_poll=bad)
