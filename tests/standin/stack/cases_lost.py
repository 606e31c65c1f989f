"""A fault ends the context of a process: whoever waits on its exporter is told, at once.

Under MPS it may be another process's fault (field report 48).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress

import pytest
import torch

import asyncvmm
from asyncvmm._errors import DeviceLostError
from asyncvmm.testing.process import ProcessRaisedError
from tests.patience import PROMPTLY
from tests.process import steps as common
from tests.process.harness import Peers, until
from tests.standin import Standin
from tests.standin.peer import join_unmapping
from tests.standin.stack import steps
from tests.standin.stack.cases_failing import go_on
from tests.standin.stack.conftest import NAME, connecting, exporting

ILLEGAL_ADDRESS = 700
MPS_CLIENT_TERMINATED = 810


async def told(waits: Awaitable[object]) -> DeviceLostError:
    """Return what a wait ends with, which is to be soon."""
    with pytest.raises(DeviceLostError) as caught:
        async with asyncio.timeout(PROMPTLY):
            await waits
    return caught.value


def mend(driver: Standin, exporter: asyncvmm.Exporter) -> None:
    """Have the driver work again, and give back what could not be."""
    driver.break_device(0)
    join_unmapping()
    with suppress(DeviceLostError):  # what a thread had met meanwhile
        exporter._region.close()
    exporter._region.close()


def one() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(4)}


@pytest.mark.parametrize("code", [ILLEGAL_ADDRESS, MPS_CLIENT_TERMINATED])
async def test_everybody_who_waits_is_told(
    driver: Standin, peers: Peers, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """By the release of one owner: acknowledgements, a send, a drain, and who comes later.

    Planted bugs: a fence that cannot be asked ends nothing but its own slot; only those who are
    acknowledged are told, or only those who send; the exporter leaves with a goodbye.
    """
    caplog.set_level(logging.ERROR, "asyncvmm")
    exits = AsyncExitStack()
    exporter = await exits.enter_async_context(exporting(slots=2))
    peer = peers.start()
    await peer.call(steps.connect, NAME)
    acks = [await exporter.send(one()), await exporter.send(one())]
    calls = (exporter.send(one()), exporter.send_all([one()] * 2), exporter.drain())
    tasks = [asyncio.ensure_future(call) for call in calls]
    await until(lambda: exporter.statistics().waiting == 2)
    driver.break_device(code)
    await peer.call(steps.read, 1)
    waits: list[Awaitable[object]] = [*acks, *tasks, exporter.send(one()), exporter.drain()]
    for each in waits:
        error = await told(each)
        assert error.code.startswith("CUDA_ERROR_")
        assert "must be restarted" in str(error)
    with pytest.raises(DeviceLostError):
        exporter.reserve({"x": asyncvmm.TensorSpec((4,), torch.float32)})
    assert exporter.statistics().slots.free == 0
    await told(exits.aclose())  # leaving it says so, too
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    # No goodbye: what the consumer had not read may never have been written.
    with pytest.raises(ProcessRaisedError, match="without a goodbye"):
        await peer.call(steps.read, 1)
    mend(driver, exporter)
    await peer.call(common.leave)


@pytest.mark.parametrize("used", [False, True])
async def test_a_send_that_meets_it_tells_those_who_wait_for_others(
    driver: Standin, peers: Peers, used: bool
) -> None:
    """Though nobody lets go of anything; a slot that was used before may have been written.

    Planted bugs: only the caller is told; the fence of what was given up is asked for ever.
    """
    exits = AsyncExitStack()
    exporter = await exits.enter_async_context(exporting(slots=2))
    peer = peers.start()
    await peer.call(steps.connect, NAME)
    if used:
        before = [await exporter.send(one()) for _ in range(2)]
        await peer.call(steps.read, 2)
        for ack in before:
            await ack
    ack = await exporter.send(one())
    driver.break_device(ILLEGAL_ADDRESS)
    await told(exporter.send(one()))
    await told(ack)
    await until(lambda: exporter.statistics().slots.quarantined == used)
    assert exporter.statistics().slots.free == (not used)
    await told(exits.aclose())
    mend(driver, exporter)
    await peer.call(common.leave)


@pytest.mark.parametrize("met", ["growth", "newcomer", "send"])
async def test_whoever_meets_it_tells_all(driver: Standin, peers: Peers, met: str) -> None:
    """Also those who wait for consumers, and whose call could go on in the pool as it is.

    Planted bugs: a pool that cannot grow sends away one call; a newcomer's handshake is refused
    and nothing else; who waits for consumers waits for ever, for none can come.
    """
    exits = AsyncExitStack()
    exporter = await exits.enter_async_context(exporting(slots=4, max_pool_bytes="4MiB"))
    ack = await exporter.send({"x": torch.ones(1 << 18)})
    attached = asyncio.ensure_future(exporter.wait_attached(1))
    await asyncio.sleep(0)
    driver.break_device(ILLEGAL_ADDRESS)
    if met == "growth":
        sizes = 3 << 18, 3 << 17  # the first fits no pool of 2 MiB, the second does when it is free
        sends = [asyncio.ensure_future(exporter.send({"x": torch.ones(n)})) for n in sizes]
        for send in sends:
            await told(send)
    elif met == "newcomer":
        with pytest.raises(asyncvmm.HandshakeError, match="could not share"):
            await connecting().__aenter__()
    else:
        await told(exporter.send(one()))
    await told(ack)
    await told(attached)
    await told(exits.aclose())
    mend(driver, exporter)


async def test_it_is_told_at_the_end_though_nothing_is_out(driver: Standin) -> None:
    """Planted bug: where the caller who met it has gone, leaving in order says nothing."""
    exits = AsyncExitStack()
    exporter = await exits.enter_async_context(exporting())
    driver.break_device(ILLEGAL_ADDRESS)
    await told(exporter.send(one()))
    await told(exits.aclose())
    mend(driver, exporter)


async def test_only_this_pool_s_own_calls_tell_that_it_is_lost(driver: Standin) -> None:
    """A reservation that another process's fault ends is given back, and the exporter goes on.

    Planted bug: the error in flight is taken for the exporter's own.
    """
    specs = {"x": asyncvmm.TensorSpec((4,), torch.float32)}
    async with exporting() as exporter, connecting() as consumer:
        with pytest.raises(DeviceLostError):
            async with exporter.reserve(specs):
                raise DeviceLostError("a worker's", call="a", code="CUDA_ERROR_ILLEGAL_ADDRESS")
        await go_on(exporter, consumer)


async def test_it_keeps_no_tensor_alive(driver: Standin, peers: Peers) -> None:
    """Planted bug: the error is kept as it was raised, with the frames of the send that met it."""
    exits = AsyncExitStack()
    exporter = await exits.enter_async_context(exporting())
    ack = await exporter.send(one())
    driver.break_device(ILLEGAL_ADDRESS)
    features = one()
    met = weakref.ref(features["x"])
    await told(exporter.send(features))
    await told(ack)
    del features
    gc.collect()
    assert met() is None
    await told(exits.aclose())
    mend(driver, exporter)


async def test_leaving_before_anybody_has_noticed(driver: Standin, peers: Peers) -> None:
    """Closing the pool meets it, and says so.  Planted bug: that is kept quiet, too."""
    exits = AsyncExitStack()
    exporter = await exits.enter_async_context(exporting())
    peer = peers.start()
    await peer.call(steps.connect, NAME)
    ack = await exporter.send(one())
    await peer.call(steps.read, 1)
    await ack
    driver.break_device(ILLEGAL_ADDRESS)
    await told(exits.aclose())
    mend(driver, exporter)


async def test_a_consumer_that_met_it_keeps_what_it_read(
    driver: Standin, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its process ends; it does not try again and again.

    Planted bug: the release is put off every 20 ms for ever, or told without its event.
    """
    monkeypatch.setattr("asyncvmm._consumer.leases.AGAIN_SECONDS", 0.0)
    async with exporting(slots=1) as exporter:
        async with connecting() as consumer:
            await go_on(exporter, consumer)  # so the slot has its events
            ack = await exporter.send(one())
            batch = await consumer.receive()
            assert batch[0]["x"].tolist() == [1.0] * 4
            before = driver.calls("cuEventRecord")
            driver.break_device(ILLEGAL_ADDRESS)
            batch.release()
            for _ in range(20):
                await asyncio.sleep(0)
            calls = driver.calls("cuEventRecord") - before
            driver.break_device(0)
            assert calls == 1
            assert not ack.done()
            del batch
        assert (await ack).complete  # leaving told it after all
