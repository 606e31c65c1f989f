"""Batches at random on a GPU of streams: nothing is read, and nothing is free, too early."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import Acknowledgement, Batch, Consumer, WouldBlock
from tests.api.books import check_all_back, check_books, check_no_sleeper, passes, until
from tests.api.streams import StreamPort, Streams

STEPS = 250


class Reader:
    """One consumer, with streams of its own and what it keeps."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self.streams = [10 * (len(world.streams) + 1) + at for at in range(2)]
        world.streams += self.streams
        self.port = StreamPort(world.gpu, self.streams[0])
        self.kept: list[Batch] = []
        options: dict[str, Any] = {"device": "cpu", "rank": rank, "_port": self.port}
        self.opening = asyncvmm.connect(world.exporter.name, prefetch=4, **options)
        self.consumer: Consumer


class World:
    """An exporter, its readers, and what happens to them."""

    def __init__(self, exporter: asyncvmm.Exporter, gpu: Streams, chance: random.Random) -> None:
        self.exporter, self.gpu, self.chance = exporter, gpu, chance
        self.streams: list[int] = []
        self.readers: list[Reader] = []
        self.sends: list[asyncio.Task[list[Acknowledgement]]] = []
        self.writers = chance.choice([(1,), (1, 2)])
        self.key = 0
        drained = exporter._core.drained

        def look(*records: Any) -> None:
            for record in records:
                gpu.freed(record)
            drained(*records)

        exporter._core.drained = look  # type: ignore[method-assign]  # looks first

    async def come(self, rank: int) -> None:
        reader = Reader(self, rank)
        reader.consumer = await reader.opening.__aenter__()
        self.readers.append(reader)

    async def send(self) -> None:
        """Begin to send a batch, unless several wait; think better of it now and then."""
        if self.exporter.statistics().waiting > 2:
            return
        count = self.chance.randrange(1, len(self.exporter._core.slots.states) // 2 + 1)
        keys = range(self.key, self.key + count)
        self.key += count
        tensors = [torch.full((self.chance.choice([1, 90]),), key % 97) for key in keys]
        to = self.chance.choice([None, None, 0])
        batch = [{"x": tensor} for tensor in tensors]
        terms: dict[str, Any] = {"keys": keys, "to": to, "require": "none"}
        stream = self.chance.choice(self.writers)
        send = asyncio.create_task(self.exporter.send_all(batch, stream=stream, **terms))
        self.sends.append(send)
        if self.chance.random() < 0.2:
            await passes(self.chance.randrange(5))
            send.cancel()

    async def receive(self) -> None:
        reader = self.chance.choice(self.readers)
        try:
            reader.kept.append(reader.consumer.receive_nowait())
        except WouldBlock:
            await self.work()

    async def look(self) -> None:
        """Read some owners of a batch, on some streams."""
        reader = self.chance.choice(self.readers)
        if not reader.kept:
            return await self.receive()
        for owner in self.chance.choice(reader.kept):
            if not owner.released and self.chance.random() < 0.8:
                reader.port.stream = self.chance.choice(reader.streams)
                assert owner["x"].unique().tolist() == [int(owner.key) % 97]
                self.gpu.read(owner, reader.port.stream)

    async def let_go(self) -> None:
        """Release a batch in one of all ways, or a part of it."""
        reader = self.chance.choice(self.readers)
        if not reader.kept:
            return
        at = self.chance.randrange(len(reader.kept))
        way = self.chance.choice(["all", "all", "part", "thread", "stream", "drop"])
        if way == "part":
            self.chance.choice(reader.kept[at].owners).release()
            return
        batch = reader.kept.pop(at)
        if way == "thread":
            await asyncio.to_thread(batch.release)
        elif way != "drop":
            batch.release(stream=self.chance.choice(reader.streams) if way == "stream" else None)

    async def work(self) -> None:
        """Let some streams go on."""
        for stream in self.gpu.busy():
            if self.chance.random() < 0.5:
                self.gpu.advance(stream, self.chance.randrange(1, 20))

    async def kill(self) -> None:
        """End a reader's process, with its last words read or not; another takes its rank."""
        reader = self.readers.pop(self.chance.randrange(len(self.readers)))
        if self.chance.random() < 0.5:
            for batch in reader.kept:
                batch.release()
            reader.consumer._link.flush()
        self.gpu.kill(reader.streams)
        connections = self.exporter._connections
        for conn in [*connections.open.values()]:
            if conn.peer is not None and conn.peer.member == reader.rank:
                connections._on_death(conn)
        reader.kept.clear()
        await reader.opening.__aexit__(None, None, None)
        await self.come(reader.rank)

    async def step(self) -> None:
        ways = [self.send, self.receive, self.look, self.look, self.let_go, self.work, self.kill]
        weights = [3, 4, 5, 5, 4, 4, 0.3]
        (way,) = self.chance.choices(ways, weights)
        await way()
        await passes(self.chance.randrange(3))
        assert self.gpu.faults == []
        check_books(self.exporter)
        check_no_sleeper(self.exporter)

    def settle(self) -> bool:
        """Let everything go on; say whether all is back."""
        for reader in self.readers:
            while reader.kept:
                reader.kept.pop().release()
            with contextlib.suppress(WouldBlock):
                reader.consumer.receive_nowait().release()
        self.gpu.run_dry()
        return all(send.done() for send in self.sends) and not self.exporter._core.records


@pytest.mark.parametrize("seed", range(8))
async def test_batches_at_random_are_read_in_time_and_free_in_time(seed: int) -> None:
    """One rank or two, several streams, owners let go of together, in part, elsewhere, by death.

    Kills: owners of a batch that are free before the copy that another's event stands for, or
    before reads on a stream that their shared event was not recorded on, and a second stream that
    reads without having waited.
    """
    chance = random.Random(seed)
    gpu, ranks = Streams(), 1 + seed % 2
    options: dict[str, Any] = {"pool_bytes": "24KiB", "slots": chance.choice([6, 32])}
    async with asyncvmm.open_exporter(
        f"@order-{seed}",
        device="cpu",
        route=asyncvmm.Broadcast(ranks),
        _port=StreamPort(gpu, 1),
        **options,
    ) as exporter:
        world = World(exporter, gpu, chance)
        for rank in range(ranks):
            await world.come(rank)
        for _ in range(STEPS):
            await world.step()
        await until(world.settle)
        assert gpu.faults == []
        check_all_back(exporter)
        acks = [ack for send in world.sends if not send.cancelled() for ack in send.result()]
        assert all(ack.done() for ack in acks)
        for reader in world.readers:
            await reader.opening.__aexit__(None, None, None)
