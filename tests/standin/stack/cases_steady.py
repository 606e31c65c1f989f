"""The driver calls of one steady hand-off, listed and counted on each side."""

from __future__ import annotations

from collections import Counter

import torch

from tests.process import steps as common
from tests.process.harness import Peers
from tests.standin import Standin
from tests.standin.stack import steps
from tests.standin.stack.cases_handoff import send
from tests.standin.stack.conftest import NAME, exporting

ROUNDS = 5

LOOKING = (
    "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
)  # fmt: skip
"""Calls around the queries of one look, which leave contexts and captures of others alone."""


async def test_driver_calls_of_a_steady_handoff(driver: Standin, peers: Peers) -> None:
    """Planted bugs: an event made, exported or opened for each batch; a synchronise anywhere; a
    context pushed for each call."""
    async with exporting(slots=2) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for owner in range(2 + ROUNDS):
            if owner == 2:  # each slot was used
                driver.journal()
                await peer.call(steps.control, "journal")
            ack = await send(exporter, owner, 1000)
            await peer.call(common.take, 1)
            await peer.call(common.give_back)
            await ack
        ours = Counter(driver.journal())
        theirs = Counter(await peer.call(steps.control, "journal"))
        assert ours.pop("cuEventRecord") == ROUNDS
        assert ours.pop("cuEventQuery") >= ROUNDS
        for name in LOOKING:  # once for each release that the loop looks at, not for each query
            assert ours.pop(name, 0) <= 2 * ROUNDS, name
        assert not ours, "a call that a steady hand-off does not need"
        assert theirs == {"cuStreamWaitEvent": ROUNDS, "cuEventRecord": ROUNDS}
        await peer.call(common.leave)


async def test_first_uses_make_one_event_each(driver: Standin, peers: Peers) -> None:
    async with exporting(slots=2) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for round in range(3):
            acks = [await exporter.send({"x": torch.ones(8)}) for _ in range(2)]
            for _ in acks:
                await peer.call(steps.read, 1)
            for ack in acks:
                await ack
            assert driver.calls("cuEventCreate") >= 2, round
            ledger = driver.ledger()
            assert (ledger.events, ledger.opened) == (2, 2)
            theirs = await peer.call(steps.control, "ledger")
            assert theirs[3:5] == [2, 2]
        await peer.call(common.leave)
