"""Those who only look: what they see, and that they can do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import asyncvmm
from asyncvmm._core import observation, wire
from asyncvmm._core.ledger import Peer
from asyncvmm._exporter import observing, reporting
from asyncvmm._types import SegmentInfo
from asyncvmm.cli.observing import Observer, Watch
from asyncvmm.testing import Counters, open_pair
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers, until
from tests.process.patterns import features, note
from tests.process.raw import Raw, RawConsumer, packet

DATA = {"x": torch.arange(10)}
OBSERVE = wire.encode_greeting(wire.Observe())


@asynccontextmanager
async def exporting(folder: Path, **options: Any) -> AsyncIterator[asyncvmm.Exporter]:
    """Open an exporter in the folder, with two slots and no consumer."""
    settings = {"device": "cpu", "slots": 2, "pool_bytes": "64KiB", **options}
    async with asyncvmm.open_exporter(folder / "pool", **settings) as exporter:
        yield exporter


async def looked(watch: Watch) -> Observer:
    (observer,) = await asyncio.to_thread(watch.look, PROMPTLY)
    return observer


async def ask(end: Raw, secret: bytes = b"") -> observation.Snapshot | wire.Rejected:
    await end.send(wire.encode_greeting(wire.Observe(secret)))
    answer = await end.packet()
    assert answer is not None
    message = wire.decode_greeting(answer)
    assert isinstance(message, observation.Snapshot | wire.Rejected)
    return message


def fields(line: object, names: tuple[str, ...]) -> list[Any]:
    return [getattr(line, name) for name in names]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How many snapshots were worked out."""
    found: list[None] = []
    real = reporting.report

    def count(*args: Any) -> asyncvmm.PoolStatistics:
        found.append(None)
        return real(*args)

    monkeypatch.setattr(observing, "report", count)
    return found


# -- what is seen --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::asyncvmm.OwnersOutstandingWarning")
async def test_what_is_seen_is_what_statistics_say(peers: Peers, folder: Path) -> None:
    """Every number, with owners out, one rank that holds them and one that never came.

    Kills: a field that is mixed up on its way, and an owner or consumer that does not show.
    """
    async with exporting(folder, route=asyncvmm.Broadcast(2), close_timeout=0.0) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, exporter.name, 0)
        ack = await exporter.send(DATA, key="done", to=0, require="none")
        await peer.call(steps.drop, 1)
        await ack
        for owner in range(2):
            await exporter.send(features(owner, 0, 99), key=owner, metadata=note(owner, 0, 99))
        await peer.call(steps.take, 2)
        with closing(Watch([exporter.name])) as watch:
            before = exporter.statistics()
            now = (await looked(watch)).now
            after = exporter.statistics()
        assert now is not None
        assert (now.name, now.pid) == (exporter.name, os.getpid())
        assert now.route == "broadcast to 2"
        assert now.pool == msgspec.convert(before, observation.PoolLine, from_attributes=True)
        for name in now.pool.__struct_fields__:
            if name not in ("slots", "handoff", "release", "wait"):
                assert getattr(now.pool, name) == getattr(before, name), name
        assert now.pool.handoff.counts == before.handoff.counts
        assert sum(now.pool.handoff.counts) == 1
        assert now.pool.slots.held == 2
        (seen,), (told,), (later,) = now.consumers, before.consumers, after.consumers
        names = tuple(name for name in seen.__struct_fields__ if name != "oldest")
        assert fields(seen, names) == fields(told, names)
        assert told.oldest <= seen.oldest <= later.oldest
        assert (seen.member, seen.pid, seen.holding) == (0, peer.pid, 2)
        assert [owner.key for owner in now.owners] == [0, 1]
        assert now.owners_out == len(before.owners) == 2
        assert now.explanation.startswith("nobody waits: none of 2 slots is free")
        assert "rank 1 is not attached" in now.explanation


async def test_an_answer_fits_a_packet_whatever_there_is() -> None:
    """A thousand consumers with long names, owners with the longest keys.

    Kills: an answer that grows with the exporter until it cannot be sent.
    """
    longest = "é" * wire.MAX_KEY
    async with open_pair(slots=1024, route=asyncvmm.Compete(), prefetch=100) as pair:
        for _ in range(100):
            await pair.exporter.send({"x": torch.zeros(1)}, key=longest, require="none")
        peers = pair.exporter._core.peers
        real = dict(peers)
        for number in range(1000, 2000):
            peers[number] = Peer(number, f"{number}" + "n" * 1000, 2)
        answer = observing.snapshot(pair.exporter)
        peers.clear()
        peers.update(real)
        data = wire.encode_greeting(answer)
        assert len(data) <= wire.PACKET_LIMIT
        assert (len(answer.consumers), answer.consumers_known) == (64, 1001)
        assert (len(answer.owners), answer.owners_out) == (16, 100)
        assert wire.decode_greeting(data) == answer
        for _ in range(100):
            (await pair.consumer.receive()).release()


# -- nothing but looking -------------------------------------------------------------------------

WORDS: dict[str, bytes] = {
    "hello": wire.encode_greeting(wire.Hello(0, None, "host")),
    "resume": wire.encode_greeting(wire.Resume(b"e" * 16, 0)),
    "attached": wire.encode_greeting(wire.Attached()),
    "release": packet(wire.Release(0, 1)),
    "refuse": packet(wire.Refuse(0, 1, "no")),
    "goodbye": packet(wire.Goodbye()),
    "take": packet(wire.Take(0, 1)),
    "segment": packet(wire.Segment(SegmentInfo(0, 0, 4096))),
    "rubbish": b"\xff",
}


@pytest.mark.parametrize("word", WORDS)
async def test_an_observer_can_do_nothing_but_look(folder: Path, word: str) -> None:
    """Whatever else it says ends its connection, and the owner that a rank holds stays held.

    Kills: an observer that takes a seat, or whose releases count.
    """
    async with (
        exporting(folder) as exporter,
        asyncvmm.connect(exporter.name, device="cpu", rank=0) as consumer,
    ):
        await exporter.send(DATA, key="k", require="none")
        batch = await consumer.receive()
        with RawConsumer.to(exporter.name) as end:
            assert isinstance(await ask(end), observation.Snapshot)
            await end.send(WORDS[word])
            assert await end.rest() == []
        statistics = exporter.statistics()
        assert [each.member for each in statistics.consumers] == [0]
        assert statistics.slots.held == 1
        assert statistics.consumers[0].stale == 0
        batch.release()
        await exporter.drain()
        assert not exporter._connections.handshake.observers._known


async def test_a_consumer_cannot_observe_on_its_connection(folder: Path) -> None:
    async with exporting(folder) as exporter:
        with RawConsumer.to(exporter.name) as end:
            await end.hello(0)
            await end.send(OBSERVE)
            assert await end.rest() == []


async def test_a_wrong_secret_is_refused(folder: Path) -> None:
    """Kills: numbers for whoever may not even connect."""
    async with exporting(folder, secret=b"open sesame") as exporter:
        with RawConsumer.to(exporter.name) as end:
            refused = await ask(end)
            assert isinstance(refused, wire.Rejected)
            assert refused.reason == "access_denied"
            assert await end.rest() == []
        with (
            closing(Watch([exporter.name])) as watch,
            pytest.raises(asyncvmm.AccessDeniedError, match="secret"),
        ):
            await looked(watch)
        with closing(Watch([exporter.name], b"open sesame")) as watch:
            assert (await looked(watch)).now is not None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused(peers: Peers, folder: Path) -> None:
    """Kills: an observer that is let in without the look at who it is."""
    # Reachable by every user, so only the kernel's word keeps him out.
    name = f"@asyncvmm-observers-{os.getpid()}"
    async with asyncvmm.open_exporter(name, device="cpu", pool_bytes="64KiB", slots=2):
        stranger = peers.start()
        await stranger.call(steps.become, 65534, 65534)
        assert await stranger.call(steps.observe, name) == "access_denied"


# -- what observers cost -------------------------------------------------------------------------


async def test_nothing_is_worked_out_for_who_does_not_ask(
    folder: Path, answers: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An observer that stands still is no cost, and no obstacle to a close.

    Kills: snapshots by a timer, and a close that waits for an observer to hang up.
    """
    async with exporting(folder) as exporter:
        with RawConsumer.to(exporter.name) as end:
            await ask(end)
            assert len(answers) == 1
            async with asyncvmm.connect(exporter.name, device="cpu", rank=0) as consumer:
                for _ in range(50):
                    ack = await exporter.send(DATA)
                    (await consumer.receive()).release()
                    await ack
            assert len(answers) == 1
            async with asyncio.timeout(PROMPTLY):
                await exporter._connections.finish()
            assert await end.rest() == []


async def test_questions_without_end_are_answered_one_by_one(
    folder: Path, answers: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: an observer that keeps the exporter busy by asking all the time."""
    monkeypatch.setattr(observing, "PAUSE_SECONDS", 60.0)
    async with exporting(folder) as exporter:
        with RawConsumer.to(exporter.name) as end:
            await end.send(*[OBSERVE] * 50)
            assert await end.packet() is not None
            async with asyncvmm.connect(exporter.name, device="cpu", rank=0) as consumer:
                for _ in range(10):
                    ack = await exporter.send(DATA)
                    (await consumer.receive()).release()
                    await ack
            assert len(answers) == 1


async def test_whoever_asks_and_does_not_read_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: answers that are queued for an observer until the memory is full."""
    monkeypatch.setattr(observing, "PAUSE_SECONDS", 0.0)
    async with exporting(folder) as exporter:
        with RawConsumer.to(exporter.name) as end:
            most = 0
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(5000):
                    with contextlib.suppress(BlockingIOError):
                        end.put(OBSERVE)
                    await asyncio.sleep(0)
                    for conn in exporter._connections.handshake.observers._known:
                        most = max(most, conn.link.queued)
            assert most <= 1
            await until(lambda: not exporter._connections.handshake.observers._known)


async def test_only_so_many_look_at_once_and_none_takes_a_descriptor_along(folder: Path) -> None:
    """Kills: observers without number, and descriptors of those that left."""
    async with exporting(folder) as exporter:
        before = Counters.of().descriptors
        ends = [RawConsumer.to(exporter.name) for _ in range(observing.MOST_OBSERVERS + 1)]
        for end in ends[:-1]:
            assert isinstance(await ask(end), observation.Snapshot)
        refused = await ask(ends[-1])
        assert isinstance(refused, wire.Rejected)
        assert refused.reason == "observers"
        for end in ends:
            end.close()
        await until(lambda: Counters.of().descriptors == before)
        with RawConsumer.to(exporter.name) as end:
            assert isinstance(await ask(end), observation.Snapshot)


async def test_a_killed_observer_leaves_nothing(peers: Peers, folder: Path) -> None:
    async with exporting(folder) as exporter:
        peer = peers.start()
        before = Counters.of().descriptors
        assert await peer.call(steps.observe, exporter.name, True) == exporter.name
        await peer.killed()
        await until(lambda: not exporter._connections.handshake.observers._known)
        assert Counters.of().descriptors == before
