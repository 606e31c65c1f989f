"""What the host backend is tested for, on the device: contents, lifetimes, peers, growth."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import Callable

import pytest
import torch

import asyncvmm
from asyncvmm._backends import driver
from asyncvmm._core.layout import DTYPES
from asyncvmm._tensors.cuda import CudaPort
from tests.gpu import ends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

SKIPPED = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
"""Sub-byte integers: torch has no kernels for them on the device."""


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's values as bytes, in order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
    return bytes(flat.view(torch.uint8).tolist())


def random(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return a tensor with random bits (bool: valid values)."""
    count = dtype.itemsize
    for length in shape:
        count *= length
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.to(device).view(dtype).reshape(shape)


def shapes(dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Return tensors of every shape that is easy to get wrong."""
    return {
        "0-d": random(dtype, (1,), device).reshape(()),
        "empty": torch.empty((0, 4), dtype=dtype, device=device),
        "transposed": random(dtype, (5, 7), device).t(),
        "expanded": random(dtype, (1, 3), device).expand(4, 3),
        "slice": random(dtype, (100,), device)[3:64],
    }


@pytest.mark.parametrize("consumer", sorted({0, torch.cuda.device_count() - 1} - {-1}) or [0])
async def test_every_dtype_and_source_arrives_bit_exact(consumer: int) -> None:
    """Field report 51.  Sources on the pool's GPU, on another, in pageable and pinned memory."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("comparer", name, f"cuda:{consumer}", 0)
    sources = ["cuda:0", "cpu", "pinned"]
    if torch.cuda.device_count() > 1:
        sources.append("cuda:1")
    sent = 0
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes="8MiB", slots=8, close_timeout=60
    ) as exporter:
        for source in sources:
            for dtype_name in DTYPES:
                dtype = getattr(torch, dtype_name, None)
                if dtype is None or dtype_name in SKIPPED:
                    continue
                features = shapes(dtype, "cpu" if source == "pinned" else source)
                if source == "pinned":
                    features = {n: t.contiguous().pin_memory() for n, t in features.items()}
                expected = {name: bits(tensor) for name, tensor in features.items()}
                await exporter.send(features, metadata=expected)
                sent += len(features)
        await exporter.drain()
    assert ends.result(process) == {"right": sent, "wrong": 0}


async def test_a_stray_write_ends_the_writers_context_only() -> None:
    """Field report 52: the mapping is read-only on the device too."""
    name = f"gpu-{uuid.uuid4().hex}"
    processes = [
        ends.start("writer", name, "cuda:0", 0),
        ends.start("prompt_reader", name, "cuda:0", 1),
    ]
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes="8MiB", slots=4, route=asyncvmm.Broadcast(2)
    ) as exporter:
        source = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda:0")
        ack = await exporter.send({"x": source}, key=7, require="none")
        outcome = await ack
        assert outcome.lost == (0,)
        assert outcome.released == (1,)
        assert ends.result(processes[0]) == {"faulted": 1}
        await (await exporter.send({"x": source}, key=7, to=1))
        assert exporter.statistics().slots.free == 4
    assert ends.result(processes[1]) == {"rounds": 2, "wrong": 0}


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that only looking can tell."""
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - the driver and the pool's timer have no event for it
            await asyncio.sleep(0.05)


async def first_line(process: object) -> dict[str, int]:
    """Return the first JSON line of a consumer without blocking the loop."""
    line = await asyncio.to_thread(process.stdout.readline)  # type: ignore[attr-defined]  # Popen
    found: dict[str, int] = json.loads(line)
    return found


async def test_a_killed_consumer_gives_its_slots_back() -> None:
    """Field report 11."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("keeper", name, "cuda:0", 0)
    async with asyncvmm.open_exporter(name, device="cuda:0", pool_bytes="8MiB", slots=2) as e:
        source = torch.ones(1 << 20, dtype=torch.uint8, device="cuda:0")
        ack = await e.send({"x": source})
        assert await first_line(process) == {"holding": 1}
        process.send_signal(signal.SIGKILL)
        with pytest.raises(asyncvmm.DeliveryError) as caught:
            async with asyncio.timeout(10):
                await ack
        assert caught.value.outcome.lost == (0,)  # type: ignore[attr-defined]  # an Outcome
        assert e.statistics().slots.free == 2
    process.communicate()


EXPORTER = """
import asyncio, sys, torch, asyncvmm
async def main():
    async with asyncvmm.open_exporter(
        sys.argv[1], device="cuda:0", pool_bytes="1GiB", slots=2
    ) as e:
        await e.send({"x": torch.ones(1 << 30, dtype=torch.uint8, device="cuda:0")})
        print("sent", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_killed_exporters_data_stays_readable_then_the_memory_returns() -> None:
    """Field report 4 (inv. 15)."""
    name = f"gpu-{uuid.uuid4().hex}"
    before = torch.cuda.mem_get_info(0)[0]
    exporter = ends.run_code(EXPORTER, name)
    consumer = ends.start("keeper", name, "cuda:0", 0)
    assert await first_line(consumer) == {"holding": 1}
    exporter.kill()
    exporter.communicate()
    found = await asyncio.to_thread(ends.result, consumer)
    assert found["same"] == 1
    granule = 2 << 20
    await until(lambda: torch.cuda.mem_get_info(0)[0] >= before - granule)


async def test_the_pool_grows_and_shrinks_on_the_device() -> None:
    """An elastic pool gives its memory back, in every process (field reports 22, 38)."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("prompt_reader", name, "cuda:0", 0)
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes="4MiB", max_pool_bytes="64MiB", slots=64,
        shrink_after=0.2, close_timeout=60,
    ) as exporter:  # fmt: skip
        sources = [
            torch.full((3 << 20,), turn % 251, dtype=torch.uint8, device="cuda:0")
            for turn in range(40)
        ]
        async with asyncio.TaskGroup() as tasks:
            for turn, source in enumerate(sources):
                tasks.create_task(exporter.send({"x": source}, key=turn))
        await exporter.drain()
        assert exporter.statistics().grown > 0
        await until(lambda: exporter.statistics().segments == 1)
        assert exporter.statistics().pool_bytes == 4 << 20
        await (await exporter.send({"x": sources[0]}, key=0))
    assert ends.result(process) == {"rounds": 41, "wrong": 0}


async def test_a_stream_that_is_another_in_each_thread_is_refused() -> None:
    """CU_STREAM_PER_THREAD, as the current stream and by its number; nothing is lost by it.

    Kills: a copy, or a release, whose event another thread records behind its own work.
    """
    per_thread = torch.cuda.ExternalStream(2, device="cuda:0")
    async with (
        asyncvmm.open_exporter(
            f"gpu-{uuid.uuid4().hex}", device="cuda:0", pool_bytes="2MiB", slots=2
        ) as exporter,
        asyncvmm.connect(exporter.name, device="cuda:0", rank=0) as consumer,
    ):
        ones = torch.ones(64, device="cuda:0")
        with torch.cuda.stream(per_thread), pytest.raises(asyncvmm.ArgumentError, match="thread"):
            await exporter.send({"x": ones})
        with pytest.raises(asyncvmm.ArgumentError, match="thread"):
            await exporter.send({"x": ones}, stream=per_thread)
        ack = await exporter.send({"x": ones})
        (owner,) = batch = await consumer.receive()
        with torch.cuda.stream(per_thread), pytest.raises(asyncvmm.ArgumentError, match="thread"):
            owner["x"]
        with pytest.raises(asyncvmm.ArgumentError, match="thread"):
            owner.release(stream=2)
        batch.release()
        assert (await ack).complete
        assert exporter.statistics().slots.free == 2


def test_streams_of_torch_last_and_those_of_others_may_not() -> None:
    """Kills: a stream that its maker may destroy, taken for one that is never destroyed."""
    port = CudaPort("cuda:0")
    own = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(own):
        assert port.lasting(port.current_stream())
    assert port.lasting(own.cuda_stream)
    made = torch.cuda.ExternalStream(int(driver.stream_create()), device="cuda:0")
    with torch.cuda.stream(made):
        assert not port.lasting(port.current_stream())
    assert not port.lasting(port.stream_of(made))
    second = torch.cuda.Stream("cuda:0")
    assert port.lasting(port.stream_of(second))
