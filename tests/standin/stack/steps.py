"""What a consumer in another process can be told to do; see ``tests.process.steps`` for more."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import random
from typing import Any

import torch

import asyncvmm
from tests.process.harness import until
from tests.process.patterns import wrong
from tests.process.puppet import Me
from tests.standin import Ledger, Standin
from tests.standin.port import READS, StandinPort


async def connect(
    me: Me, name: str, rank: int | None = 0, options: dict[str, Any] | None = None
) -> None:
    """Connect on the stand-in's GPU."""
    port = me.kept["port"] = StandinPort(READS)
    me.consumer = await me.exits.enter_async_context(
        asyncvmm.connect(name, rank=rank, _port=port, **(options or {}))
    )


async def control(me: Me, name: str, *args: Any) -> Any:
    """Call a method of this process's stand-in, such as ``hold``."""
    return getattr(Standin(), name)(*args)


async def ended(me: Me) -> None:
    """Wait until this process has given everything back; what others have of the memory counts."""
    await until(lambda: Standin().ledger()[:7] == Ledger()[:7])


async def limit_memory(me: Me, nbytes: int) -> None:
    """Let the stand-in's GPU have so many bytes, for this process's calls."""
    os.environ["STANDIN_MEMORY"] = str(nbytes)


async def refused(me: Me) -> int:
    """Return how many owners this consumer refused."""
    return me.consumer.statistics().refused


async def read(me: Me, count: int) -> list[float]:
    """Receive that many batches of one owner, look at its feature "x", give it back."""
    found = []
    for _ in range(count):
        batch = await me.consumer.receive()
        with batch:
            found += [float(owner["x"].sum()) for owner in batch]
        del batch
    return found


async def reconstruct(me: Me, tickets: dict[str, bytes], stream: int | None = None) -> list[float]:
    """Reconstruct tickets that were pickled apart; return what they hold, in sum."""
    found = []
    for data in tickets.values():
        tensor = await me.consumer.reconstruct(pickle.loads(data), stream=stream)
        found.append(float(tensor.sum()))
    return found


async def acknowledge(me: Me, ticket: bytes) -> None:
    """Release the owner of a ticket unread."""
    me.consumer.acknowledge(pickle.loads(ticket).owner)


class _Reads:
    """Reads that the stand-in leaves pending: their bytes must stay what they were."""

    def __init__(self) -> None:
        self._driver = Standin()
        self._driver.hold()
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []

    def queue(self, view: torch.Tensor) -> None:
        """Begin to read a view's bytes by their address, as a kernel does: that holds nothing."""
        if not view.nbytes:
            return
        address = (ctypes.c_ubyte * view.nbytes).from_address(view.data_ptr())
        bytes_there = torch.frombuffer(address, dtype=torch.uint8)
        self._queued.append((bytes_there, bytes_there.clone()))

    def finish(self) -> None:
        """See what was read in the end."""
        for now, before in self._queued:
            if not torch.equal(now, before):
                raise AssertionError(f"refilled under a read: {before[:4]} became {now[:4]}")
        self._queued.clear()
        self._driver.finish()


async def read_slowly(me: Me, seed: int) -> int:
    """Receive and release until the end, on one of three streams, with reads pending after it."""
    chance = random.Random(seed)
    reads = _Reads()
    count = 0
    async for batch in me.consumer:
        for owner in batch:
            if problem := wrong(owner):
                raise AssertionError(problem)
            for name in owner:
                reads.queue(owner[name])
            stream = READS + chance.randrange(3)
            if chance.random() < 0.5:
                owner.record_stream(stream)
            else:
                owner.release(stream=stream)
            count += 1
        del owner
        batch.release()
        del batch
        asyncio.get_running_loop().call_later(chance.random() / 50, reads.finish)
    reads.finish()
    return count
