"""What the fragments of the documentation find when they run: names, ready to be used."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeAlias

import torch

import asyncvmm

Names: TypeAlias = dict[str, Any]
NAME = "documentation"

COMMON: Names = {
    "asyncio": asyncio,
    "asyncvmm": asyncvmm,
    "torch": torch,
    "features": {"x": torch.ones(64)},
    "pixels": torch.ones(256, 1024, dtype=torch.bfloat16),
}


def an_exporter(**options: Any) -> asyncvmm.open_exporter:
    """Open a small exporter that does not wait long for what a fragment left behind."""
    settings: Names = {"device": "cpu", "pool_bytes": "4MiB", "close_timeout": 5.0, **options}
    return asyncvmm.open_exporter(NAME, **settings)


async def _read(rank: int) -> None:
    async with asyncvmm.connect(NAME, rank=rank) as consumer:
        async for batch in consumer:
            batch.release()


@asynccontextmanager
async def exporter(ranks: int = 1) -> AsyncIterator[Names]:
    """An exporter whose ranks read and release what comes."""
    async with (
        asyncio.TaskGroup() as readers,
        an_exporter(route=asyncvmm.Broadcast(ranks)) as opened,
    ):
        for rank in range(ranks):
            readers.create_task(_read(rank))
        await opened.wait_attached(ranks)
        yield {"exporter": opened}


@asynccontextmanager
async def consumer() -> AsyncIterator[Names]:
    """A consumer for which three owners have come."""
    async with an_exporter() as opened, asyncvmm.connect(NAME, rank=0) as attached:
        for number in range(3):
            await opened.send({"x": torch.full((64,), number), "hidden": torch.ones(64)})
        yield {"consumer": attached}


@asynccontextmanager
async def tickets() -> AsyncIterator[Names]:
    """An exporter, and one consumer of it that redeems."""
    async with an_exporter() as opened, asyncvmm.connect(NAME, rank=0) as attached:
        channel = multiprocessing.get_context("spawn").Queue()
        try:
            yield {"exporter": opened, "consumer": attached, "channel": channel}
        finally:
            channel.close()
            channel.join_thread()


async def _two_exporters() -> None:
    for key in ("first", "second"):
        async with an_exporter() as opened:
            await opened.send({"x": torch.ones(64)}, key=key)


@asynccontextmanager
async def two_exporters() -> AsyncIterator[Names]:
    """A name under which one exporter follows another."""
    task = asyncio.create_task(_two_exporters())
    yield {"name": NAME}
    await task


@asynccontextmanager
async def owner() -> AsyncIterator[Names]:
    """An owner that was just received."""
    async with consumer() as names:
        batch = await names["consumer"].receive()
        yield {**names, "batch": batch, "owner": batch[0]}


@asynccontextmanager
async def slow_rank() -> AsyncIterator[Names]:
    """An exporter whose rank 0 holds all it can."""
    async with an_exporter(slots=2) as opened, asyncvmm.connect(NAME, rank=0) as attached:
        for _ in range(2):
            await opened.send({"x": torch.ones(64)})
        batches = [await attached.receive() for _ in range(2)]
        yield {"exporter": opened}
        for batch in batches:
            batch.release()


_DYING_RANK = f"""
import asyncio, os, asyncvmm
async def main():
    async with asyncvmm.connect({NAME!r}, rank=0, device="cpu", wait=True) as consumer:
        batch = await consumer.receive()
        os._exit(1)
asyncio.run(main())
"""

_DYING_EXPORTER = f"""
import asyncio, os, sys, torch, asyncvmm
async def main():
    async with asyncvmm.open_exporter({NAME!r}, device="cpu", pool_bytes="1MiB") as exporter:
        for number in range(2):
            await exporter.send({{"x": torch.full((64,), number)}})
        await exporter.wait_attached(1)
        await asyncio.to_thread(sys.stdin.read)
        os._exit(1)
asyncio.run(main())
"""


@asynccontextmanager
async def _process(program: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def dying_rank() -> AsyncIterator[Names]:
    """An exporter whose rank 0 dies with the first owner in its hand."""
    async with an_exporter() as opened, _process(_DYING_RANK):
        yield {"exporter": opened}


@asynccontextmanager
async def dying_exporter() -> AsyncIterator[Names]:
    """A consumer whose exporter sends two owners and dies."""
    async with (
        _process(_DYING_EXPORTER) as process,
        asyncvmm.connect(NAME, rank=0, wait=True) as attached,
    ):
        assert process.stdin is not None
        process.stdin.close()
        yield {"consumer": attached}


SETTINGS: dict[str, Callable[[], AbstractAsyncContextManager[Names]]] = {
    "exporter": exporter,
    "exporter of ranks 0 and 1": lambda: exporter(2),
    "exporter with a slow rank": slow_rank,
    "exporter whose rank 0 dies": dying_rank,
    "consumer": consumer,
    "consumer whose exporter dies": dying_exporter,
    "owner": owner,
    "tickets": tickets,
    "an exporter, and then another": two_exporters,
}
