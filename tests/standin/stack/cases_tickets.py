"""Owners that are exported and redeemed by ticket, between two processes on the stand-in driver."""

from __future__ import annotations

import pickle
from typing import Any

import torch

import asyncvmm
from tests.process import steps as common
from tests.process.harness import Peers, until
from tests.standin import Standin
from tests.standin.stack import steps
from tests.standin.stack.cases_handoff import asked
from tests.standin.stack.conftest import NAME, exporting

FEATURES = {"a": torch.arange(700, dtype=torch.int32), "b": torch.arange(5.0)}


def apart(tickets: Any) -> dict[str, bytes]:
    return {name: pickle.dumps(ticket) for name, ticket in tickets.items()}


SUMS = [float(tensor.sum()) for tensor in FEATURES.values()]


async def export(exporter: asyncvmm.Exporter) -> Any:
    return await exporter.export(FEATURES)


async def test_a_slot_drains_until_the_copy_that_a_ticket_asked_for_is_done(
    driver: Standin, peers: Peers
) -> None:
    """Planted bug: a reconstructed owner is released without an event behind its copy."""
    async with exporting() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for stream in (None, 0x3000, 0x3000):
            await peer.call(steps.control, "hold")
            tickets = await export(exporter)
            assert await peer.call(steps.reconstruct, apart(tickets), stream) == SUMS
            await until(lambda: exporter.statistics().slots.held == 0)
            await asked(driver, tickets.acknowledgement)
            assert exporter.statistics().slots.draining == 1
            await peer.call(steps.control, "finish")
            assert (await tickets.acknowledgement).complete
        await peer.call(common.leave)
        await peer.call(steps.ended)


async def test_every_redeemed_owner_is_waited_for(driver: Standin, peers: Peers) -> None:
    """Planted bug: the ready event is waited for only at a slot's first use (inv. 8)."""
    async with exporting(slots=1) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for _ in range(3):
            driver.hold()
            tickets = await export(exporter)
            await peer.call(steps.reconstruct, apart(tickets))
            await until(lambda: exporter.statistics().slots.held == 0)
            await asked(driver, tickets.acknowledgement)
            early = tickets.acknowledgement.done()
            driver.finish()
            assert not early
            await tickets.acknowledgement
        await peer.call(common.leave)


async def test_what_nobody_read_waits_for_the_exporters_own_copy(
    driver: Standin, peers: Peers
) -> None:
    """Cancelled, or acknowledged unread: the bytes are free when the copy into them is over.

    Planted bug: a slot without a release event is free at once (inv. 4).
    """
    async with exporting() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for cancels in (True, False):
            driver.hold()
            tickets = await export(exporter)
            if cancels:
                assert exporter.cancel(tickets["b"])
            else:
                await peer.call(steps.acknowledge, pickle.dumps(tickets["a"]))
                await until(lambda: exporter.statistics().slots.held == 0)
            await asked(driver, tickets.acknowledgement)
            draining = exporter.statistics().slots.draining
            driver.finish()
            assert draining == 1
            await until(tickets.acknowledgement.done)
        await peer.call(common.leave)


async def test_events_are_given_once_per_slot(driver: Standin, peers: Peers) -> None:
    async with exporting(slots=2) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, NAME)
        for _ in range(12):
            tickets = await export(exporter)
            assert await peer.call(steps.reconstruct, apart(tickets)) == SUMS
            await tickets.acknowledgement
        opened = await peer.call(steps.control, "calls", "cuIpcOpenEventHandle")
        assert opened <= 2
        await peer.call(common.leave)
        await peer.call(steps.ended)
