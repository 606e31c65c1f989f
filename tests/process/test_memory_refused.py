"""Memory that one process is refused harms neither its link nor anybody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import asyncvmm
from asyncvmm import BackendError
from asyncvmm._io.names import resolve
from asyncvmm.testing import FakeDevice, FakePort
from asyncvmm.testing.counters import pool_mappings
from tests.patience import PROMPTLY
from tests.process.harness import turns, until
from tests.process.patterns import features, note, wrong
from tests.process.ports import WatchedPort
from tests.process.raw import RawConsumer

PAGE = 4096
ELASTIC: dict[str, Any] = {"pool_bytes": PAGE, "max_pool_bytes": 2 * PAGE, "slots": 4}


class Refusing:
    """Refuses some calls to a pool's memory for as long as the test likes."""

    def __init__(self, *calls: str) -> None:
        self.calls = set(calls)
        self.after = 0
        """How many calls are let through first."""
        self.refused = 0

    def __call__(self, name: str) -> None:
        if name in self.calls and self.after:
            self.after -= 1
        elif name in self.calls:
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


async def test_a_segment_that_one_consumer_cannot_be_given_is_withdrawn(folder: Path) -> None:
    """The exporter lacks a descriptor for the second rank: the pool stays at its size for both.

    Kills: a rank that is hung up on for its exporter's lack, a pool that half of the ranks have,
    a segment that stays mapped and unused, and a send that waits for room that never comes.
    """
    refusing = Refusing()
    port = WatchedPort(refusing)
    options: dict[str, Any] = {**ELASTIC, "route": asyncvmm.Broadcast(2), "shrink_after": 60.0}
    async with asyncvmm.open_exporter("pool", device="cpu", _port=port, **options) as exporter:
        first = await asyncvmm.connect("pool", device="cpu", rank=0).__aenter__()
        second = await asyncvmm.connect("pool", device="cpu", rank=1).__aenter__()
        await exporter.wait_attached(2)
        refusing.calls, refusing.after = {"export"}, 1
        with pytest.raises(BackendError, match="export was refused"):
            await send(exporter, 0, 6000)
        assert refusing.refused == 1
        statistics = exporter.statistics()
        assert (statistics.segments, statistics.pool_bytes) == (1, PAGE)
        assert [each.state for each in statistics.consumers] == ["open", "open"]
        assert len(pool_mappings()) == 3
        refusing.calls = set()
        ack = await send(exporter, 1, 6000)
        for consumer in (first, second):
            (await take(consumer, 1)).release()
            await consumer.aclose()
        assert (await ack).complete


async def test_who_never_says_that_it_has_mapped_loses_its_seat(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a rank that is taken for as long as a silent process lives."""
    address = resolve("pool").sockaddr
    async with asyncvmm.open_exporter("pool", device="cpu", **ELASTIC) as exporter:
        with RawConsumer.to(address) as raw:
            await raw.hello(0)
            with pytest.raises(asyncvmm.RankError):
                await asyncvmm.connect("pool", device="cpu", rank=0).__aenter__()
        await until(lambda: exporter.statistics().consumers == ())
        with monkeypatch.context() as impatient, RawConsumer.to(address) as raw:
            impatient.setattr("asyncvmm._exporter.connections.ATTACHING_SECONDS", 0.05)
            await raw.hello(0)
            assert await raw.rest() == []
            await until(lambda: exporter.statistics().consumers == ())
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            await exporter.wait_attached(1)
            (conn,) = exporter._connections.open.values()
            assert conn.deadline is None  # for who has said it
            await send(exporter, 0, 100)
            (await take(consumer, 0)).release()


# -- consumers that leave while their work runs ---------------------------------------------------


async def test_reads_of_who_has_left_are_waited_for_while_another_holds_the_owner(
    folder: Path,
) -> None:
    """The first rank releases behind a kernel that runs on, and leaves; the second is later.

    Kills: events that are given back with their consumer's connection, and bytes that are free
    while they are read (inv. 4).
    """
    device = FakeDevice(hold_release=True)
    options: dict[str, Any] = {"device": "cpu", "_port": FakePort(device)}
    route = asyncvmm.Broadcast(2)
    async with (
        asyncvmm.open_exporter("pool", slots=2, route=route, **options) as exporter,
        asyncvmm.connect("pool", rank=1, **options) as second,
    ):
        async with asyncvmm.connect("pool", rank=0, **options) as first:
            ack = await send(exporter, 0, 100)
            with await first.receive() as batch:
                batch[0]["bytes"]
            del batch
        await until(lambda: [c.member for c in exporter.statistics().consumers] == [1])
        (pending,) = device.pending("release")
        with await second.receive() as batch:
            batch[0]["bytes"]
        del batch
        await until(lambda: exporter.statistics().slots.draining == 1)
        for fence in device.pending("release"):
            if fence is not pending:
                fence.finish()
        await turns(20)
        assert exporter.statistics().slots.draining == 1
        assert not ack.done()
        pending.finish()
        assert (await ack).complete
        assert list(exporter._connections.open) == [0]


async def test_a_fence_that_broke_after_its_consumer_left_ends_with_the_process(
    folder: Path,
) -> None:
    """Nobody may say when its reads are over but the end of its process.

    Kills: a slot that is quarantined for ever because nobody watches over who has left.
    """
    device = FakeDevice(hold_release=True)
    options: dict[str, Any] = {"device": "cpu", "_port": FakePort(device)}
    async with asyncvmm.open_exporter("pool", slots=2, **options) as exporter:
        async with asyncvmm.connect("pool", rank=0, **options) as consumer:
            ack = await send(exporter, 0, 100)
            with await consumer.receive() as batch:
                batch[0]["bytes"]
            del batch
        await until(lambda: exporter.statistics().consumers == ())
        (fence,) = device.pending("release")
        fence.fail(BackendError("it is broken", call="cuEventQuery", code="?"))
        await until(lambda: exporter.statistics().slots.quarantined == 1)
        (conn,) = exporter._connections.open.values()
        exporter._connections._on_death(conn)  # as if its process had ended
        async with asyncio.timeout(PROMPTLY):
            assert (await ack).released == (0,)
        assert exporter.statistics().slots.free == 2
        assert not exporter._connections.open


async def test_views_that_outlive_their_consumer_are_released_stream_by_stream(
    folder: Path,
) -> None:
    """Two owners were read on two streams, and the first stream is slow.

    Kills: releases of all streams in one lane, where the quick one waits behind the slow one.
    """
    device = FakeDevice(hold_release=True)
    options: dict[str, Any] = {"device": "cpu", "_port": FakePort(device)}
    async with asyncvmm.open_exporter("pool", slots=2, **options) as exporter:
        acks = [await send(exporter, owner, 100) for owner in range(2)]
        async with asyncvmm.connect("pool", rank=0, **options) as consumer:
            views = []
            for device.stream in (7, 8):
                batch = await consumer.receive()
                views.append(batch[0]["bytes"])
                batch.release()
                del batch
        while views:
            del views[0]
        await until(lambda: exporter.statistics().slots.draining == 2)
        slow, quick = device.pending("release")
        assert (slow.streams, quick.streams) == ((7,), (8,))
        quick.finish()
        async with asyncio.timeout(PROMPTLY):
            assert (await acks[1]).complete
        assert not acks[0].done()
        slow.finish()
        assert (await acks[0]).complete
