"""Tickets of one exporter after another, for a consumer that is there for tickets only."""

from __future__ import annotations

import asyncio
import socket

import pytest
import torch

import asyncvmm
from asyncvmm import ForeignTicketError, LostTicketError, PeerLostError
from tests.api.books import check_all_back, until
from tests.api.test_reconnect import attached, exporting, reconnecting, send, shows
from tests.patience import PROMPTLY

X = torch.arange(50)


async def one(exporter: asyncvmm.Exporter) -> asyncvmm.Ticket:
    return (await exporter.export({"x": X}))["x"]


@pytest.mark.parametrize("crash", [True, False])
async def test_who_has_tickets_only_goes_on_with_the_next_exporter(crash: bool) -> None:
    """Nobody receives.  Kills: a reconnect that only ``receive`` begins."""
    async with exporting(crash=crash, close_timeout=0.0) as exporter:
        consumer = await reconnecting().__aenter__()
        old = await one(exporter)
        copy = await consumer.reconstruct(old)
        await exporter.drain()
        lost = await one(exporter)
        exporter.cancel(lost)
    await until(lambda: consumer.statistics().state != "open")
    for _ in range(2):
        with pytest.raises(LostTicketError):  # at once, and not when the next exporter is there
            await consumer.reconstruct(lost)
    assert await consumer.reconstruct(old) is copy
    async with exporting() as exporter, asyncio.timeout(PROMPTLY):
        new = await one(exporter)
        assert torch.equal(await consumer.reconstruct(new), X)
        with await consumer.borrow(await one(exporter)) as owner:
            assert torch.equal(owner["x"], X)
        with pytest.raises(ForeignTicketError):
            await consumer.borrow(lost)
        assert await consumer.reconstruct(old) is copy, "what was copied stays"
        await exporter.drain()
        await consumer.aclose()


async def test_receive_is_told_of_a_loss_that_tickets_went_on_from() -> None:
    """Kills: a loss that nobody is told of, and one that is told after later batches."""
    async with exporting(crash=True) as exporter:
        consumer = await reconnecting().__aenter__()
        await send(exporter, 1)
        await until(lambda: consumer.statistics().unread == 1)
    async with exporting() as exporter, asyncio.timeout(PROMPTLY):
        await consumer.reconstruct(await one(exporter))
        await send(exporter, 2)
        await until(lambda: consumer.statistics().unread == 1)
        with pytest.raises(PeerLostError) as caught:
            await consumer.receive()
        assert caught.value.lost == 1
        assert shows(await consumer.receive(), 2)
        assert (consumer.statistics().losses, consumer.statistics().exporters) == (1, 2)
        await consumer.aclose()


async def test_an_acknowledgement_that_nobody_hears_yet_is_said_to_the_next_exporter() -> None:
    """Kills: a share that is kept for a rank that has said that it will not read."""
    async with exporting(crash=True):
        consumer = await reconnecting().__aenter__()
    await until(lambda: consumer.statistics().state != "open")
    async with exporting() as exporter, asyncio.timeout(PROMPTLY):
        tickets = await exporter.export({"x": X, "y": X})
        consumer.acknowledge(tickets.owner)
        with pytest.raises(asyncvmm.PackedReleaseError):
            consumer.acknowledge(tickets["x"])
        assert consumer.statistics().state == "connecting", "it was not heard at once"
        assert (await tickets.acknowledgement).released == (0,)
        await attached(consumer)
        check_all_back(exporter)
        await consumer.aclose()


async def test_after_a_broken_link_new_tickets_of_the_same_exporter_are_good() -> None:
    """Kills: an exporter that lives taken for one that is gone, because it was lost once."""
    async with exporting() as exporter, asyncio.timeout(PROMPTLY):
        consumer = await reconnecting().__aenter__()
        ticket = await one(exporter)
        assert consumer._current is not None
        consumer._current._link._sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: consumer.statistics().losses == 1)
        with pytest.raises(LostTicketError):
            await consumer.reconstruct(ticket)
        await attached(consumer)
        exporter.cancel(ticket)
        assert torch.equal(await consumer.reconstruct(await one(exporter)), X)
        await exporter.drain()
        await consumer.aclose()


async def test_a_ticket_waits_for_the_next_exporter_and_may_be_cancelled() -> None:
    """Kills: a wait that ends with the caller that began it."""
    async with exporting(crash=True):
        consumer = await reconnecting().__aenter__()
    async with exporting() as stranger, asyncio.timeout(PROMPTLY):
        ticket = await one(stranger)
        first = asyncio.ensure_future(consumer.reconstruct(ticket))
        second = asyncio.ensure_future(consumer.reconstruct(ticket))
        await asyncio.sleep(0)
        first.cancel()
        assert torch.equal(await second, X)
        assert first.cancelled()
        await consumer.aclose()
