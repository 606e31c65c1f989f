"""Owners redeemed by ticket, on the device: order, reuse, and copies that came by way of the host.

The tickets travel in the metadata of streamed owners, which are as good a channel as any.
"""

from __future__ import annotations

import pickle
import uuid

import pytest
import torch

import asyncvmm
from asyncvmm._backends.cuda import CudaExporterRegion
from asyncvmm.tickets import FeatureItem, FeatureRequest, FeatureTransport
from tests.gpu import ends
from tests.gpu.test_ordering import devices

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]

NBYTES = 1 << 20
CARRIER = torch.zeros(1)


async def export_at_once(consumer_device: str, rounds: int) -> dict[str, int]:
    """Export one pattern after another into the same chunk, as fast as it is allowed."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("redeemer", name, consumer_device, 0)
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes=NBYTES + 512, slots=2, close_timeout=60
    ) as exporter:
        for turn in range(rounds):
            source = torch.full((NBYTES,), turn % 251, dtype=torch.uint8, device="cuda:0")
            small = source[:100].clone()
            tickets = await exporter.export({"x": source, "y": small}, key=turn)
            data = [pickle.dumps(ticket) for ticket in tickets.values()]
            await exporter.send({"carrier": CARRIER}, key=turn, metadata=data)
        await exporter.drain()
    return ends.result(process)


@pytest.mark.parametrize("consumer", devices())
async def test_a_chunk_is_exported_again_only_after_the_copy_out_of_it(consumer: str) -> None:
    """Planted bug: a reconstructed owner is free when its release arrives (see the control)."""
    found = await export_at_once(consumer, 300)
    assert found == {"rounds": 300, "wrong": 0, "buffers": 300}


@pytest.mark.parametrize("consumer", devices())
async def test_control_without_the_release_fence_copies_are_wrong(
    consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(CudaExporterRegion, "release_fence", lambda self, peer, slot: None)
    found = await export_at_once(consumer, 100)
    assert found["rounds"] == 100
    assert found["wrong"] > 0


@pytest.mark.parametrize("consumer", devices())
async def test_host_copies_of_a_full_pool_end_up_on_the_consumers_device(consumer: str) -> None:
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("restorer", name, consumer, 0)
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes="2MiB", slots=2, close_timeout=60
    ) as exporter:
        transport = FeatureTransport(exporter, on_full="host")
        held = await exporter.export({"x": CARRIER})
        requests = []
        for number in range(3):
            torch.cuda._sleep(ends.LONGER)  # the copy to the host is ordered behind this
            feature = torch.full((1000,), float(number), device="cuda:0")
            requests.append(FeatureRequest([FeatureItem("image", feature)]))
        await transport.prepare_for_dispatch(requests)
        kinds = [type(request.items[0].feature) for request in requests]
        assert kinds == [asyncvmm.Ticket, torch.Tensor, torch.Tensor]
        exporter.cancel(held.owner)
        await exporter.send({"carrier": CARRIER}, metadata=pickle.dumps(requests))
        await exporter.drain()
        assert exporter.statistics().fallbacks == 2
    assert ends.result(process) == {"right": 3}
