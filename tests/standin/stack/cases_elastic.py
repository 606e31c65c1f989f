"""A pool that grows and shrinks between two processes on the stand-in driver."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asyncvmm.testing import Process
from tests.patience import PROMPTLY
from tests.process import steps as common
from tests.process.harness import Peers, until
from tests.standin import Standin
from tests.standin.stack import steps
from tests.standin.stack.cases_handoff import send
from tests.standin.stack.conftest import NAME, exporting

LARGE = 3 << 19  # one of them fills most of a segment of 2 MiB
ELASTIC: dict[str, Any] = {"pool_bytes": "2MiB", "max_pool_bytes": "6MiB", "shrink_after": 0.05}


async def mapped(peer: Process) -> int:
    ledger = await peer.call(steps.control, "ledger")
    return int(ledger[1])


async def test_growing_and_shrinking(driver: Standin, peers: Peers) -> None:
    """Planted bugs: a segment that is not sent; one that a consumer keeps mapped."""
    async with exporting(**ELASTIC) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for round in range(2):
            acks = [await send(exporter, owner, LARGE) for owner in range(3)]
            await peer.call(common.take, 3)
            assert await mapped(peer) == driver.ledger().mappings == 3
            assert driver.ledger().memory == 6 << 20
            await peer.call(common.give_back)
            for ack in acks:
                assert (await ack).complete
            await until(lambda: exporter.statistics().segments == 1)
            await send(exporter, 9, 100)
            await peer.call(common.take, 1)  # it has read what came before
            await peer.call(common.give_back)
            assert await mapped(peer) == driver.ledger().mappings == 1
            assert driver.ledger().memory == 2 << 20
            assert exporter.statistics().grown == exporter.statistics().shrunk == 2 * (round + 1)
        await peer.call(common.leave)


async def test_growth_that_fails_only_means_waiting_on(
    driver: Standin, peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted bug: the error of cuMemCreate comes out of send, or the waiter waits for ever."""
    monkeypatch.setenv("STANDIN_MEMORY", str(2 << 20))
    async with exporting(**ELASTIC) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        first = await send(exporter, 0, LARGE)
        waiting = asyncio.ensure_future(send(exporter, 1, LARGE))
        await until(lambda: "cuMemCreate" in caplog.text or "cannot grow" in caplog.text)
        assert not waiting.done()
        await peer.call(common.take, 1)
        await peer.call(common.give_back)
        await first
        second = await waiting
        await peer.call(common.take, 1)
        await peer.call(common.give_back)
        assert (await second).complete
        assert exporter.statistics().segments == 1
        await peer.call(common.leave)


async def test_a_segment_that_a_consumer_cannot_map(driver: Standin, peers: Peers) -> None:
    """What lies in it is refused with the reason; the rest goes on, also after the shrink.

    Planted bugs: the link ends; the segment's end is a protocol error for who never mapped it.
    """
    async with exporting(**ELASTIC) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        first = await send(exporter, 0, LARGE)
        await peer.call(common.take, 1)
        await peer.call(steps.control, "fail", 4, 999)  # after the context and the capture mode
        second = await exporter.send({"x": torch.ones(LARGE // 4)}, require="none")
        outcome = await second
        name = await peer.call(steps.control, "failed")
        assert name == "cuMemImportFromShareableHandle"
        assert len(outcome.refused) == 1
        assert name in str(outcome.refused)
        assert not first.done()
        await peer.call(common.give_back)
        assert (await first).complete
        await until(lambda: exporter.statistics().segments == 1)
        third = await send(exporter, 2, LARGE)
        await peer.call(common.take, 1)
        await peer.call(common.give_back)
        assert (await third).complete
        assert exporter.statistics().slots.free == 4
        await peer.call(common.leave)


async def test_a_segment_that_once_could_not_be_given_back(
    driver: Standin, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    """Its addresses are grown at again, by who needs them.

    Planted bug: they are lost for good, and a send that needs them raises ArgumentError.
    """
    async with exporting(**ELASTIC | {"max_pool_bytes": "4MiB"}) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for round in range(2):
            ack = await send(exporter, round, 3 << 20)
            assert driver.ledger().mappings == 2
            await peer.call(common.take, 1)
            await peer.call(common.give_back)
            assert (await ack).complete
            if round == 0:
                driver.fail(4, 999)  # after the context and the capture mode
                await until(lambda: "could not be given back" in caplog.text)
                assert driver.failed() == "cuMemUnmap"
        await until(lambda: exporter.statistics().shrunk == 2)
        assert exporter.statistics().segments == 1
        assert exporter.statistics().grown == 2
        await peer.call(common.leave)


async def test_growth_goes_round_a_segment_that_cannot_be_given_back(
    driver: Standin, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted bug: while one stays mapped the pool grows nowhere, though there are addresses."""
    async with exporting(**ELASTIC) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for round in range(2):
            acks = [await send(exporter, 2 * round, LARGE)]
            if round == 1:
                driver.fail(4, 999)  # after the context and the capture mode
            async with asyncio.timeout(PROMPTLY):
                acks.append(await send(exporter, 2 * round + 1, LARGE))
            if round == 1:
                assert driver.failed() == "cuMemUnmap"
                assert "still not be given back" in caplog.text
            await peer.call(common.take, 2)
            await peer.call(common.give_back)
            for ack in acks:
                assert (await ack).complete
            if round == 0:
                driver.fail(4, 999)
                await until(lambda: "could not be given back" in caplog.text)
                assert driver.failed() == "cuMemUnmap"
        assert exporter.statistics().grown == 2
        await peer.call(common.leave)
