"""The driver calls of batches: one event for the copies, one wait, one event for the reads."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

import asyncvmm
from tests.patience import PROMPTLY
from tests.process import steps as common
from tests.process.harness import Peers, until
from tests.process.patterns import features, note
from tests.standin import Standin
from tests.standin.peer import join_unmapping
from tests.standin.stack import steps
from tests.standin.stack.cases_failing import Failing, failing, go_on
from tests.standin.stack.cases_steady import LOOKING
from tests.standin.stack.conftest import NAME, connecting, exporting

__all__ = ["failing"]

ROUNDS = 5


async def send_all(exporter: asyncvmm.Exporter, count: int) -> list[asyncvmm.Acknowledgement]:
    return await exporter.send_all(
        [features(owner, 0, 1000) for owner in range(count)],
        keys=range(count),
        metadata=[note(owner, 0, 1000) for owner in range(count)],
    )


async def test_driver_calls_of_a_batch_of_sixteen(driver: Standin, peers: Peers) -> None:
    """Planted bugs: an event recorded, waited for or asked for each owner of a batch."""
    async with exporting(slots=16) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for round in range(3 + ROUNDS):
            if round == 3:
                driver.journal()
                await peer.call(steps.control, "journal")
            acks = await send_all(exporter, 16)
            assert await peer.call(common.take, 1) == list(range(16))
            await peer.call(common.give_back)
            for ack in acks:
                await ack
        ours = Counter(driver.journal())
        theirs = Counter(await peer.call(steps.control, "journal"))
        made = ours.pop("cuEventCreate", 0), theirs.pop("cuEventCreate", 0)
        assert ours.pop("cuEventRecord") == ROUNDS
        assert theirs == {"cuStreamWaitEvent": ROUNDS, "cuEventRecord": ROUNDS}
        assert made == (0, 0)
        assert ours.pop("cuEventQuery") >= ROUNDS
        for name in LOOKING:
            ours.pop(name, None)
        assert not ours, "a call that a steady batch does not need"
        ledger = driver.ledger()
        assert ledger.events == ledger.opened <= 2  # not one for each owner
        await peer.call(common.leave)


@pytest.mark.parametrize("used", [False, True])
async def test_every_call_of_a_batch_fails_once(failing: Failing, used: bool) -> None:
    """Sent, read, and released together; every slot is free after each failure."""
    while failing.again():
        async with exporting(slots=3) as exporter, connecting() as consumer:
            if used:
                await go_on(exporter, consumer)
            async with failing.armed():
                acks = await exporter.send_all([{"x": torch.full((4,), 3.0)}] * 3)
                with await consumer.receive() as batch:
                    for owner in batch:
                        assert owner["x"].tolist() == [3.0] * 4
                del batch, owner
                async with asyncio.timeout(PROMPTLY):
                    for ack in acks:
                        await ack
            if consumer.statistics().unread:
                (await consumer.receive()).release()
            await until(lambda: exporter.statistics().slots.free == 3)
            await go_on(exporter, consumer)
    assert {"cuEventRecord", "cuStreamWaitEvent"} <= set(failing.names)


@pytest.mark.parametrize("unread", [0, 1])
async def test_an_owner_that_is_let_go_unread_is_not_waited_for_at_the_end(
    driver: Standin, unread: int
) -> None:
    """Planted bug: the wait for a batch counts as a read of its first owner, and the whole device
    is waited for, in a thread, when its consumer closes."""
    async with exporting() as exporter:
        async with connecting() as consumer:
            await exporter.send_all([{"x": torch.full((4,), 3.0)}] * 2)
            with await consumer.receive() as batch:
                batch[1 - unread]["x"]
            del batch
            await until(lambda: exporter.statistics().slots.free == 4)
            before = driver.calls("cuCtxSynchronize")
        join_unmapping()
        assert driver.calls("cuCtxSynchronize") == before
