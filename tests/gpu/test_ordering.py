"""Order on the device, each test with the run that has the wait removed (inv. 4, 8).

A run without the wait that shows no wrong data would mean that the test sees nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid

import pytest
import torch

import asyncvmm
from asyncvmm._backends import driver
from asyncvmm._backends.cuda import CudaExporterRegion
from tests.gpu import ends

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]

ROUNDS = 1000
NBYTES = 1 << 20


def devices() -> list[str]:
    """Return the devices a consumer may use: the exporter's own, and another if there is one."""
    return [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))] or ["cuda:0"]


async def refill_at_once(consumer_device: str, rounds: int) -> dict[str, int]:
    """Send one pattern after another through a slot of one as fast as it is allowed."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("late_reader", name, consumer_device, 0)
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes=NBYTES, slots=1, close_timeout=60
    ) as exporter:
        for turn in range(rounds):
            source = torch.full((NBYTES,), turn % 251, dtype=torch.uint8, device="cuda:0")
            await exporter.send({"x": source}, key=turn)
        await exporter.drain()
    return ends.result(process)


@pytest.mark.parametrize("consumer", devices())
async def test_a_slot_is_refilled_only_after_the_readers_stream_is_done(consumer: str) -> None:
    """Field report 17.  Planted bug: the release event is not waited for (see the control)."""
    assert await refill_at_once(consumer, ROUNDS) == {"rounds": ROUNDS, "wrong": 0}


@pytest.mark.parametrize("consumer", devices())
async def test_control_without_the_release_fence_data_is_wrong(
    consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 17, the control."""
    monkeypatch.setattr(CudaExporterRegion, "release_fence", lambda self, peer, slot: None)
    found = await refill_at_once(consumer, 100)
    assert found["rounds"] == 100
    assert found["wrong"] > 0


async def publish_behind_kernel(consumer_device: str, rounds: int, broken: str) -> dict[str, int]:
    """Publish sources that a long kernel has yet to make, and free them at once."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("prompt_reader", name, consumer_device, 0, broken)
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes=2 * NBYTES, slots=2, close_timeout=60
    ) as exporter:
        other = torch.cuda.Stream()
        for turn in range(rounds):
            with torch.cuda.stream(other):
                torch.cuda._sleep(ends.LONGER)
                source = torch.full((NBYTES,), turn % 251, dtype=torch.uint8, device="cuda:0")
            torch.cuda.current_stream().wait_stream(other)
            await exporter.send({"x": source}, key=turn)
            del source
            with torch.cuda.stream(other):
                torch.full((NBYTES,), 255, dtype=torch.uint8, device="cuda:0")
        await exporter.drain()
    return ends.result(process)


@pytest.mark.parametrize("consumer", devices())
async def test_a_batch_is_read_only_after_the_producers_stream_is_done(consumer: str) -> None:
    """Field report 18, also on the second and later batch of one mapping (inv. 8).

    Planted bug: the ready event is not waited for, or only the first time (see the control).
    """
    found = await publish_behind_kernel(consumer, ROUNDS, "")
    assert found == {"rounds": ROUNDS, "wrong": 0}


@pytest.mark.parametrize("consumer", devices())
async def test_control_without_the_ready_wait_data_is_wrong(consumer: str) -> None:
    """Field report 18, the control."""
    found = await publish_behind_kernel(consumer, 100, "wait_ready")
    assert found["rounds"] == 100
    assert found["wrong"] > 0


async def test_a_given_up_reservation_drains_before_it_is_free() -> None:
    """Field report 20: cancelling is not the same as quiet.

    Planted bug: an abandoned slot goes to FREE at once, while a kernel still writes to it.
    """
    name = f"gpu-{uuid.uuid4().hex}"
    async with asyncvmm.open_exporter(name, device="cuda:0", pool_bytes=NBYTES, slots=1) as e:
        async with e.reserve({"x": asyncvmm.TensorSpec((NBYTES,), torch.uint8)}) as owner:
            torch.cuda._sleep(100 * ends.LONG)
            owner["x"].fill_(1)
        assert e.statistics().slots.draining == 1
        async with e.reserve({"x": asyncvmm.TensorSpec((NBYTES,), torch.uint8)}) as owner:
            assert torch.cuda.current_stream().query()
            owner["x"].fill_(2)


def capture_until(stop: threading.Event, failed: list[str], done: list[int]) -> None:
    """Capture and replay graphs in the default mode until told to stop."""
    x = torch.ones(1 << 16, device="cuda:0")
    while not stop.is_set():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(50):
                    x.mul_(1.0)
            graph.replay()
            done.append(1)
        except RuntimeError as error:
            failed.append(str(error))


async def captures_beside_pending(most: int) -> tuple[int, int]:
    """Keep 100 acknowledgements pending and capture beside them, until a capture fails.

    Returns the captures done and failed.
    """
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("holder", name, "cuda:0", 0)
    stop, failed, done = threading.Event(), list[str](), list[int]()
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes="1MiB", slots=100, close_timeout=60
    ) as exporter:
        source = torch.ones(64, dtype=torch.uint8, device="cuda:0")
        await (await exporter.send({"x": source}))  # the holder's kernels come after it
        acks = [await exporter.send({"x": source}) for _ in range(100)]
        async with asyncio.timeout(30):
            while exporter.statistics().slots.draining < 100:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        thread = threading.Thread(target=capture_until, args=(stop, failed, done))
        thread.start()
        pending = True
        while len(done) < most and not failed and pending:
            await asyncio.sleep(0.01)
            pending = not any(ack.done() for ack in acks)
        stop.set()
        await asyncio.to_thread(thread.join)
        if failed:
            process.kill()  # who cannot be asked about its fences keeps its slots until its death
            process.communicate()
    if not failed:
        assert ends.result(process) == {"done": 1}
    return len(done), len(failed)


async def test_graphs_are_captured_beside_100_pending_acknowledgements() -> None:
    """Field report 42.  Planted bug: fences are asked in the default capture mode (control)."""
    done, failed = await captures_beside_pending(30)
    assert done >= 30
    assert failed == 0


async def test_control_without_the_relaxed_mode_captures_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Field report 42, the control: not each capture meets a question, but one soon does."""
    monkeypatch.setattr(driver, "relaxed_capture", contextlib.nullcontext)
    _, failed = await captures_beside_pending(1000)
    assert failed > 0
