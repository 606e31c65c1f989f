"""Memory that one process is refused harms neither its link nor anybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncvmm
from asyncvmm import BackendError
from tests.process.harness import until
from tests.process.patterns import features, note, wrong
from tests.process.ports import WatchedPort

PAGE = 4096
ELASTIC: dict[str, Any] = {"pool_bytes": PAGE, "max_pool_bytes": 2 * PAGE, "slots": 4}


class Refusing:
    """Refuses some calls to a pool's memory for as long as the test likes."""

    def __init__(self, *calls: str) -> None:
        self.calls = set(calls)
        self.refused = 0

    def __call__(self, name: str) -> None:
        if name in self.calls:
            self.refused += 1
            raise BackendError(f"{name} was refused", call=name, code="EAGAIN")


async def send(exporter: asyncvmm.Exporter, owner: int, nbytes: int) -> asyncvmm.Acknowledgement:
    data = features(owner, 0, nbytes)
    return await exporter.send(data, key=owner, metadata=note(owner, 0, nbytes), require="none")


async def take(consumer: asyncvmm.Consumer, owner: int) -> asyncvmm.Batch:
    batch = await consumer.receive()
    assert batch[0].key == owner
    assert wrong(batch[0]) == ""
    return batch


async def test_a_consumer_that_cannot_unmap_goes_on(folder: Path) -> None:
    """The segment stays mapped; one that comes in its place is refused until it can be unmapped.

    Kills: a link that ends with the refusal, bytes of the old segment that are read for the new
    one's, and a place that stays unusable once the refusal has passed.
    """
    refusing = Refusing()
    elastic = asyncvmm.open_exporter("pool", device="cpu", shrink_after=0.01, **ELASTIC)
    async with (
        elastic as exporter,
        asyncvmm.connect("pool", device="cpu", rank=0, _port=WatchedPort(refusing)) as consumer,
    ):
        await send(exporter, 0, 3000)
        first = await take(consumer, 0)
        outcomes = []
        for owner in range(1, 5):
            ack = await send(exporter, owner, 3000)  # grows the pool
            if owner != 2:
                (await take(consumer, owner)).release()
            outcomes.append(await ack)
            refusing.calls = {"unmap"} if owner == 1 else set()
            await until(lambda owner=owner: exporter.statistics().shrunk == owner)  # type: ignore[misc]  # a default
        assert [outcome.released for outcome in outcomes] == [(0,), (), (0,), (0,)]
        ((rank, reason),) = outcomes[1].refused
        assert rank == 0
        assert "unmap was refused" in reason
        assert refusing.refused == 2
        assert wrong(first[0]) == ""
        first.release()
