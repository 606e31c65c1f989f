"""The blocking facade on the device: the streams are those of the threads that call it."""

from __future__ import annotations

import uuid

import pytest
import torch

import asyncvmm
from asyncvmm import blocking
from asyncvmm._backends.cuda import CudaExporterRegion
from tests.gpu import ends

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]

NBYTES = 1 << 20

READER = f"""
import json, sys
import torch
from asyncvmm import blocking

rounds, wrong = 0, torch.zeros((), dtype=torch.int64, device="cuda:0")
with blocking.connect(sys.argv[1], device="cuda:0", rank=0, wait=True) as consumer:
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch in consumer:
            with batch:
                torch.cuda._sleep({ends.LONGER})
                wrong += torch.ne(batch[0]["x"], int(batch[0].key) % 251).sum()
            rounds += 1
        print(json.dumps({{"rounds": rounds, "wrong": int(wrong)}}))
"""


def publish_on_a_side_stream(rounds: int, *, right: bool) -> dict[str, int]:
    """Send what a long kernel on this thread's current stream has yet to make."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.start("prompt_reader", name, "cuda:0", 0)
    stream = None if right else torch.cuda.default_stream()
    with (
        blocking.open_exporter(
            name, device="cuda:0", pool_bytes=2 * NBYTES, slots=2, close_timeout=60
        ) as exporter,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        source = torch.full((NBYTES,), 255, dtype=torch.uint8, device="cuda:0")
        for turn in range(rounds):
            torch.cuda._sleep(ends.LONGER)
            source.fill_(turn % 251)
            exporter.send({"x": source}, key=turn, stream=stream)
        exporter.drain()
    return ends.result(process)


def test_a_copy_waits_for_the_calling_threads_stream() -> None:
    """Planted bug: the copy is queued on the loop thread's stream (see the control)."""
    assert publish_on_a_side_stream(200, right=True) == {"rounds": 200, "wrong": 0}


def test_control_on_another_stream_the_copy_is_wrong() -> None:
    """The control: what a loop thread's current stream, the default one, would do."""
    found = publish_on_a_side_stream(50, right=False)
    assert found["rounds"] == 50
    assert found["wrong"] > 0


async def refill_at_once(rounds: int) -> dict[str, int]:
    """Send through a slot of one, as fast as a blocking reader in another process allows."""
    name = f"gpu-{uuid.uuid4().hex}"
    process = ends.run_code(READER, name)
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes=NBYTES, slots=1, close_timeout=60
    ) as exporter:
        for turn in range(rounds):
            source = torch.full((NBYTES,), turn % 251, dtype=torch.uint8, device="cuda:0")
            await exporter.send({"x": source}, key=turn)
        await exporter.drain()
    return ends.result(process)


async def test_a_release_waits_for_the_stream_of_the_thread_that_read() -> None:
    """Planted bug: the release is recorded on the loop thread's stream (see the control)."""
    assert await refill_at_once(200) == {"rounds": 200, "wrong": 0}


async def test_control_without_the_release_fence_what_is_read_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control."""
    monkeypatch.setattr(CudaExporterRegion, "release_fence", lambda self, peer, slot: None)
    found = await refill_at_once(50)
    assert found["rounds"] == 50
    assert found["wrong"] > 0
