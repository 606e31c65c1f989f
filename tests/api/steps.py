"""Steps of other processes that only the tests of the public face need."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch

import asyncvmm
from asyncvmm._io import busy
from asyncvmm.testing import Counters
from tests.api.syscalls import SystemCalls
from tests.process.puppet import Me

LARGEST = 32 * 1024
"""Bytes of the largest owner of a soak; torch copies more than that in several threads."""

_bits = torch.randint(
    0, 256, (LARGEST + 65_521,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)


def expected(owner: int, generation: int, nbytes: int) -> torch.Tensor:
    """Return what an owner holds: no two owners or generations agree, nor any two offsets."""
    start = (owner * 7919 + generation * 104_729) % 65_521
    return _bits[start : start + nbytes]


_chance = random.Random(1)
_sizes = [
    int(_chance.choice((0, 1, 255, 257, 3000, 3001, 20_000, LARGEST)) * _chance.random())
    for _ in range(4099)
]


def size_of(owner: int) -> int:
    """Return the bytes of an owner: mostly small, a few large, sometimes none."""
    return _sizes[owner % 4099]


async def begin(me: Me) -> None:
    """Return once the loop has opened what it opens for itself, also for its first thread."""
    await asyncio.to_thread(int)


async def write_into_a_view(me: Me) -> None:
    """Write into a view of the oldest batch that was kept, as a careless program might."""
    owner = me.batches[0][0]
    owner["words"].add_(1)


async def soak(me: Me, first: int, count: int) -> dict[str, Any]:
    """Receive ``count`` owners from number ``first`` on, check every byte; return counters.

    Some are held for a while.  Raises AssertionError if one is lost, doubled, out of order or
    wrong.
    """
    held: deque[asyncvmm.Batch] = deque()
    chance = random.Random(first)
    for number in range(first, first + count):
        batch = await me.consumer.receive()
        (owner,) = batch
        # What came by ``send`` was filled before anybody knew its generation.
        generation = owner.generation if owner.metadata else 0
        if owner.key != number:
            raise AssertionError(f"{owner!r} came as number {number}")
        if not torch.equal(owner["x"], expected(number, generation, size_of(number))):
            raise AssertionError(f"{owner!r} of {size_of(number)} bytes is wrong")
        held.append(batch)
        while len(held) > 8 or (held and chance.random() < 0.5):
            held.popleft().release()
    for batch in held:
        batch.release()
    return vars(Counters.of())


async def why_not_connected(me: Me, name: str, rank: int) -> list[str]:
    """Try to connect; return the kind and the text of what was raised."""
    try:
        await asyncvmm.connect(name, device="cpu", rank=rank).__aenter__()
    except asyncvmm.AsyncVMMError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


async def use_both_ends_in_a_fork(me: Me) -> dict[str, Any]:
    """Open both ends, fork, use them in the child; return what each use raised there."""
    exporter = await me.exits.enter_async_context(
        asyncvmm.open_exporter("fork", device="cpu", pool_bytes="64KiB", slots=2)
    )
    consumer = await me.exits.enter_async_context(asyncvmm.connect("fork", device="cpu", rank=0))
    spec = {"x": asyncvmm.TensorSpec((3,), "int8")}
    early = exporter.reserve(spec)
    loan = exporter.reserve(spec)
    owner = await loan.__aenter__()
    uses: dict[str, Callable[[], Any]] = {
        "send": lambda: exporter.send({"x": torch.ones(3)}),
        "send_nowait": lambda: exporter.send_nowait({"x": torch.ones(3)}),
        "reserve": lambda: exporter.reserve(spec),
        "enter": early.__aenter__,
        "publish": owner.publish,
        "drain": exporter.drain,
        "wait_attached": lambda: exporter.wait_attached(1),
        "receive": consumer.receive,
        "receive_nowait": consumer.receive_nowait,
    }
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = {}
        texts = True
        for name, use in uses.items():
            try:
                result = use()
                if inspect.iscoroutine(result):
                    result.send(None)
                said[name] = "nothing"
            except asyncvmm.ForkError as error:
                said[name] = "ForkError"
                texts &= error.used_in == os.getpid() and error.made_in == os.getppid()
                texts &= str(error.made_in) in str(error) and "spawn" in str(error)
            except BaseException as error:
                said[name] = repr(error)
        os.write(writer, msgspec.msgpack.encode({**said, "said": texts}))
        os._exit(0)
    os.close(writer)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    found: dict[str, Any] = msgspec.msgpack.decode(os.read(reader, 10_000))
    os.close(reader)
    # The parent goes on as if nothing had been.
    await loan.__aexit__(None, None, None)
    ack = await exporter.send({"x": torch.ones(3)})
    (await consumer.receive()).release()
    await ack
    assert exporter.statistics().slots.free == 2
    await me.exits.aclose()
    return {**found, "status": status}


async def keep_the_core(me: Me) -> None:
    """Go on turning for answers also where others need the core."""
    busy.WANTED_SECONDS = 3600.0


async def receive_and_release(me: Me, count: int = 1) -> None:
    """Receive that many batches, and let go of each before the next."""
    for _ in range(count):
        (await me.consumer.receive()).release()


async def count_system_calls(me: Me, count: int) -> dict[str, dict[str, int]]:
    """Receive, view and release that many batches; return the system calls that this took."""
    me.tell("counting")
    with SystemCalls(me.consumer._link._sock) as calls:
        for _ in range(count):
            with await me.consumer.receive() as batch:
                for name in batch[0]:
                    batch[0][name].data_ptr()
        await asyncio.sleep(0)  # the last release leaves in the next turn
        await asyncio.sleep(0)
    return {"sockets": calls.sockets, "polls": calls.polls, "others": calls.others}
