"""Reads stay pending while consumers die and stand still and the pool grows and shrinks."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

import asyncvmm
from asyncvmm.testing import Process
from tests.patience import PROMPTLY
from tests.process.harness import Peers, until
from tests.process.patterns import features, note
from tests.standin import Standin
from tests.standin.stack import steps
from tests.standin.stack.conftest import NAME, exporting

SIZES = (0, 1, 1000, 70_000, (1 << 19) + 1, 3 << 19)
ELASTIC: dict[str, Any] = {
    "pool_bytes": "2MiB", "max_pool_bytes": "8MiB", "shrink_after": 0.02, "slots": 8,
}  # fmt: skip
OWNERS, MISHAPS = 15, 5


def stand_still(peer: Process, seconds: float) -> None:
    """Stop a process for a moment, from a thread: it may have the stand-in's lock, and this
    process's loop then waits for it."""
    peer.stop()
    time.sleep(seconds)
    peer.resume()


class Readers:
    """Two consumers; whoever is killed has a successor."""

    def __init__(self, peers: Peers, ranks: tuple[int | None, int | None], seed: int) -> None:
        self._peers = peers
        self._ranks = ranks
        self._chance = random.Random(seed)
        self._peer: list[Process] = []
        self._reading: list[asyncio.Future[int]] = []

    async def start(self, place: int) -> None:
        """Have one connect, and read until the end."""
        peer = self._peers.start()
        await peer.call(steps.connect, NAME, self._ranks[place])
        reading = peer.begin_long(1e6, steps.read_slowly, self._chance.randrange(1 << 30))
        self._peer[place : place + 1] = [peer]
        self._reading[place : place + 1] = [reading]

    async def mishap(self) -> None:
        """Kill one, or have it stand still for a moment."""
        place = self._chance.randrange(2)
        peer, reading = self._peer[place], self._reading[place]
        assert not reading.done(), reading.result()
        if self._chance.random() < 0.5:
            await peer.killed()
            reading.exception()
            await self.start(place)
        else:
            await asyncio.to_thread(stand_still, peer, self._chance.random() / 20)

    async def ended(self) -> int:
        """Return how many owners those who are left have seen, once they are at the end."""
        async with asyncio.timeout(PROMPTLY):
            return sum([await reading for reading in self._reading])


@pytest.mark.parametrize("compete", [False, True])
async def test_chaos(driver: Standin, peers: Peers, compete: bool) -> None:
    """Kills: a slot that is free before its reads are over, and one that never is."""
    chance = random.Random(11)
    readers = Readers(peers, (None, None) if compete else (0, 1), 12)
    route = asyncvmm.Compete() if compete else asyncvmm.Broadcast(2)
    acks: list[asyncvmm.Acknowledgement] = []

    async def produce() -> None:
        for owner in range(OWNERS):
            number, nbytes = len(acks), chance.choice(SIZES)
            acks.append(
                await exporter.send(
                    features(number, 0, nbytes), metadata=note(number, 0, nbytes), require="none"
                )
            )
            if owner % 5 == 4:
                await asyncio.sleep(chance.random() / 20)  # time to shrink

    async with exporting(route=route, **ELASTIC) as exporter:
        for place in range(2):
            await readers.start(place)
        for _ in range(MISHAPS):
            producing = asyncio.create_task(produce())
            await asyncio.sleep(chance.random() / 20)
            await readers.mishap()
            async with asyncio.timeout(PROMPTLY):
                await producing
        for ack in acks:
            async with asyncio.timeout(PROMPTLY):
                await ack
        await until(lambda: exporter.statistics().shrunk == exporter.statistics().grown)
        found = exporter.statistics()
        assert found.slots.free == found.slots.total
        assert found.used_bytes == 0
        assert found.segments == 1
        assert found.grown > 0
    assert await readers.ended() > 0
