"""Hand-offs between two processes on the stand-in driver."""

from __future__ import annotations

import random

import asyncvmm
from tests.process import steps as common
from tests.process.harness import Peers, until
from tests.process.patterns import features, note
from tests.standin import Standin
from tests.standin.stack import steps
from tests.standin.stack.conftest import NAME, exporting


async def send(exporter: asyncvmm.Exporter, owner: int, nbytes: int) -> asyncvmm.Acknowledgement:
    return await exporter.send(
        features(owner, 0, nbytes), key=owner, metadata=note(owner, 0, nbytes)
    )


async def asked(driver: Standin, ack: asyncvmm.Acknowledgement) -> None:
    """Wait until the watcher has asked some more, or need not."""
    before = driver.calls("cuEventQuery")
    await until(lambda: ack.done() or driver.calls("cuEventQuery") > before + 3)


async def test_contents(driver: Standin, peers: Peers) -> None:
    async with exporting(pool_bytes="8MiB") as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        chance = random.Random(3)
        sizes = [chance.choice((0, 1, 1000, 70_000, 2 << 20)) for _ in range(40)]
        taking = peer.begin(common.receive_forever)
        acks = [await send(exporter, owner, size) for owner, size in enumerate(sizes)]
        for ack in acks:
            assert (await ack).complete
    assert await taking == len(sizes)
    await peer.call(common.leave)
    await peer.call(steps.ended)


async def test_a_slot_drains_until_the_consumers_event_is_done(
    driver: Standin, peers: Peers
) -> None:
    """Planted bug: nobody waits for the release fence (inv. 4)."""
    async with exporting() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for owner in range(3):  # the slot's first use, and later ones
            await peer.call(steps.control, "hold")
            ack = await send(exporter, owner, 1000)
            assert await peer.call(common.take, 1) == [owner]
            assert exporter.statistics().slots.held == 1
            assert exporter._connections.busy._worth()
            await peer.call(common.give_back)
            await until(lambda: exporter.statistics().slots.held == 0)
            await asked(driver, ack)
            assert exporter.statistics().slots.draining == 1
            assert not exporter._connections.busy._worth(), "turns for a packet that none sends"
            assert not ack.done()
            await peer.call(steps.control, "finish")
            assert (await ack).complete
            assert exporter.statistics().slots.free == 4
        await peer.call(common.leave)


async def test_every_batch_is_waited_for(driver: Standin, peers: Peers) -> None:
    """Planted bug: the ready event is waited for only at a slot's first use (inv. 8)."""
    async with exporting(slots=1) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for owner in range(3):
            driver.hold()
            ack = await send(exporter, owner, 1000)
            await peer.call(common.take, 1)
            await peer.call(common.give_back)
            await until(lambda: exporter.statistics().slots.held == 0)
            await asked(driver, ack)
            early = ack.done()
            driver.finish()  # in any case, or the exit would wait for it
            assert not early
            assert (await ack).complete
        await peer.call(common.leave)
