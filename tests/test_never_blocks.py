"""The event loop is never blocked, from opening to closing (inv. 10)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
import torch
from blockbuster import blockbuster_ctx

import asyncvmm
from tests.patience import PROMPTLY


@pytest.fixture
def blocking_is_an_error() -> Iterator[None]:
    """Make a blocking call from below this package raise while a loop runs in its thread."""
    with blockbuster_ctx(scanned_modules=["asyncvmm"]):
        yield


async def consume(name: str) -> float:
    """Take everything, each number twice: from a view and from a copy."""
    total = 0.0
    async with asyncvmm.connect(name, device="cpu", rank=0, wait=True) as consumer:
        async for batch in consumer:
            async with batch:
                for owner in batch:
                    total += owner["x"].sum().item()
                    total += owner.clone()["x"].sum().item()
                    consumer.statistics()
    return total


async def produce(name: str) -> None:
    """Send more than fits at once, by copy and in place."""
    async with asyncvmm.open_exporter(name, device="cpu", pool_bytes="1MiB", slots=2) as exporter:
        await exporter.wait_attached(1)
        for step in range(6):
            await exporter.send({"x": torch.full((9,), float(step))}, key=step)
        async with exporter.reserve({"x": asyncvmm.TensorSpec((9,), torch.float32)}) as owner:
            owner["x"].fill_(1.0)
            acknowledgement = owner.publish()
        await acknowledgement
        exporter.statistics()


@pytest.mark.usefixtures("blocking_is_an_error")
@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param("", id="private folder"),
        pytest.param("@", id="abstract"),
    ],
)
async def test_a_whole_session_blocks_nowhere(prefix: str) -> None:
    """Kills the planted bug of a socket file that is unlinked, or a page prepared, on the loop."""
    name = f"{prefix}never-blocks-{os.getpid()}"
    async with asyncio.timeout(PROMPTLY), asyncio.TaskGroup() as tasks:
        consumer = tasks.create_task(consume(name))
        tasks.create_task(produce(name))
    assert consumer.result() == 2 * 9 * (0 + 1 + 2 + 3 + 4 + 5 + 1)


@pytest.mark.usefixtures("blocking_is_an_error")
async def test_the_fixture_sees_a_blocking_call() -> None:
    """Kills the planted bug of a fixture that watches nothing."""
    from asyncvmm._io import names

    with pytest.raises(Exception, match="Blocking call"):
        names.resolve("any")
