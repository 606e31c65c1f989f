"""Owners sent together: their bytes, and their order on the device, with controls (inv. 4, 8)."""

from __future__ import annotations

import math
import uuid

import pytest
import torch

import asyncvmm
from asyncvmm._backends.cuda import CudaExporterRegion
from asyncvmm._core.layout import DTYPES
from tests.gpu import ends
from tests.gpu.test_handoff import SKIPPED, bits, random
from tests.gpu.test_ordering import devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

TOGETHER = 8
NBYTES = 1 << 18
BATCHES = 125


def signalling(dtype: torch.dtype) -> torch.Tensor:
    """Return signalling NaNs of a dtype: arithmetic, and so a copy by way of it, changes them."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    quiet = {torch.float16: 9, torch.bfloat16: 6, torch.float32: 22, torch.float64: 51}[dtype]
    infinite = torch.tensor([math.inf, -math.inf], dtype=dtype).view(whole)
    return torch.cat([infinite + 1, infinite + (1 << (quiet - 1))]).view(dtype).to("cuda:0")


@pytest.mark.parametrize("consumer", devices())
async def test_signalling_nans_sent_together_arrive_bit_exact(consumer: str) -> None:
    """Kills a launch that copies 16-bit floats by way of 32-bit ones, as torch's own does."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("comparer", name, consumer, 0)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    owners = [{f"{dtype}": signalling(dtype) for dtype in dtypes} for _ in range(3)]
    expected = [{name: bits(tensor) for name, tensor in each.items()} for each in owners]
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes="1MiB", slots=4, close_timeout=60
    ) as exporter:
        await exporter.send_all(owners, metadata=expected)
        await exporter.send(owners[0], metadata=expected[0])
        await exporter.drain()
    assert ends.result(process) == {"right": 16, "wrong": 0}


@pytest.mark.parametrize("consumer", devices())
async def test_owners_of_every_dtype_sent_together_arrive_bit_exact(consumer: str) -> None:
    """Kills a launch that mixes features up, or that cannot copy one of the dtypes.

    Twice, for the second time the views of the pool are there; made in inference mode, used
    outside of it; with sources that want a gradient, and that are strided.
    """
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("comparer", name, consumer, 0)
    known = [getattr(torch, name, None) for name in DTYPES if name not in SKIPPED]
    dtypes = [dtype for dtype in known if dtype is not None]
    owners = [
        {
            "plain": random(dtype, (33,), "cuda:0"),
            "matrix": random(dtype, (5, 7), "cuda:0"),
            "strided": random(dtype, (5, 7), "cuda:0").t(),
            "host": random(dtype, (3,), "cpu"),
        }
        for dtype in dtypes
    ]
    owners[dtypes.index(torch.float32)]["gradient"] = torch.ones(
        9, device="cuda:0"
    ).requires_grad_()
    expected = [{name: bits(tensor) for name, tensor in each.items()} for each in owners]
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes="8MiB", slots=len(owners), close_timeout=60
    ) as exporter:
        with torch.inference_mode():
            await exporter.send_all(owners, metadata=expected)
        await exporter.drain()
        await exporter.send_all(owners, metadata=expected)
        await exporter.drain()
    assert ends.result(process) == {"right": 2 * sum(map(len, owners)), "wrong": 0}


async def refill_together(consumer: str, batches: int) -> dict[str, int]:
    """Send batches through a pool that holds one, as fast as it is allowed."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("batch_reader", name, consumer, 0)
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes=TOGETHER * NBYTES, slots=TOGETHER, close_timeout=60
    ) as exporter:
        for turn in range(batches):
            keys = range(turn * TOGETHER, (turn + 1) * TOGETHER)
            sources = [
                torch.full((NBYTES,), key % 251, dtype=torch.uint8, device="cuda:0") for key in keys
            ]
            await exporter.send_all([{"x": source} for source in sources], keys=keys)
        await exporter.drain()
    return ends.result(process)


@pytest.mark.parametrize("consumer", devices())
async def test_a_batch_is_refilled_only_after_its_readers_stream_is_done(consumer: str) -> None:
    """Planted bug: the one release event of a batch is not waited for (see the control)."""
    found = await refill_together(consumer, BATCHES)
    assert found == {"rounds": BATCHES * TOGETHER, "batches": BATCHES, "wrong": 0}


@pytest.mark.parametrize("consumer", devices())
async def test_control_without_the_release_fence_data_is_wrong(
    consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(CudaExporterRegion, "release_fence", lambda self, peer, slot: None)
    found = await refill_together(consumer, 20)
    assert found["rounds"] == 20 * TOGETHER
    assert found["wrong"] > 0


async def publish_together(consumer: str, batches: int, broken: str) -> dict[str, int]:
    """Send batches whose sources a long kernel has yet to make."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("batch_reader", name, consumer, 0, broken, ASYNCVMM_TEST_PROMPT="1")
    async with asyncvmm.open_exporter(
        name,
        device="cuda:0",
        pool_bytes=2 * TOGETHER * NBYTES,
        slots=2 * TOGETHER,
        close_timeout=60,
    ) as exporter:
        for turn in range(batches):
            keys = range(turn * TOGETHER, (turn + 1) * TOGETHER)
            torch.cuda._sleep(ends.LONGER)
            sources = [
                torch.full((NBYTES,), key % 251, dtype=torch.uint8, device="cuda:0") for key in keys
            ]
            await exporter.send_all([{"x": source} for source in sources], keys=keys)
            del sources
        await exporter.drain()
    return ends.result(process)


@pytest.mark.parametrize("consumer", devices())
async def test_a_batch_is_read_only_after_the_producers_stream_is_done(consumer: str) -> None:
    """Planted bug: the one ready event of a batch is not waited for (see the control)."""
    found = await publish_together(consumer, BATCHES, "")
    assert found == {"rounds": BATCHES * TOGETHER, "batches": BATCHES, "wrong": 0}


@pytest.mark.parametrize("consumer", devices())
async def test_control_without_the_ready_wait_data_is_wrong(consumer: str) -> None:
    """The control."""
    found = await publish_together(consumer, 20, "wait_ready")
    assert found["rounds"] == 20 * TOGETHER
    assert found["wrong"] > 0
