"""What a consumer in another process can be told to do; see ``tests.process.steps`` for more."""

from __future__ import annotations

import os
import pickle
from typing import Any

import asyncvmm
from tests.process.harness import until
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
