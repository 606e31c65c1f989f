"""What a hostile consumer says to an exporter, and that nobody else notices (field report 53)."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import asyncvmm
from asyncvmm._core import wire
from asyncvmm._exporter import connections
from asyncvmm._types import RegionInfo
from asyncvmm.testing import Counters
from tests.patience import PROMPTLY
from tests.process.harness import turns, until
from tests.process.patterns import features, note, wrong
from tests.process.raw import RawConsumer, packet, welcome

HEADER = wire._HEADER.pack(wire.MAGIC, wire.VERSION)
HELLO = wire.encode_greeting(wire.Hello(1, None, "host"))
REGION = RegionInfo("host", 4096, 4096, 4)

RUBBISH: dict[str, bytes] = {
    "a pickle": pickle.dumps({"rank": 0}),
    "a pickle that runs": b"cos\nsystem\n(S'touch {folder}/ran'\ntR.",
    "random bytes": random.Random(1).randbytes(1000),
    "one byte": b"\x00",
    "an array of 4 Gi": b"\xdd\xff\xff\xff\xff",
    "an array of 4 Gi inside": b"\x91\xdd\xff\xff\xff\xff",
    "a map of 4 Gi": b"\xdf\xff\xff\xff\xff",
    "a text of 4 GiB": b"\x91\xdb\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\x94\x09\x00\x01\xc6\xff\xff\xff\xff",
    "nested 10,000 deep": b"\x91" * 10_000,
    "nested in a map": b"\x81" * 10_000,
    "more than a packet": b"\x90" * 65_537,
    "far more than a packet": b"\x90" * 200_000,
    "an extension": msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"x" * 100)),
    "a timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "no array": msgspec.msgpack.encode({"type": 1}),
    "text that is no text": b"\x91\x92\x0b\xa4\xff\xfe\xfd\xfc",
}


class Victim:
    """An exporter for two ranks, and an honest consumer that has rank 0."""

    def __init__(
        self, address: str, exporter: asyncvmm.Exporter, honest: asyncvmm.Consumer
    ) -> None:
        self.address = address
        self.exporter = exporter
        self.honest = honest
        self.descriptors = Counters.of().descriptors

    async def attacker(self) -> RawConsumer:
        """Return a consumer by hand that has rank 1."""
        raw = RawConsumer.to(self.address)
        await raw.hello(1)
        await raw.attach()
        await self.exporter.wait_attached(2)
        return raw

    async def send(self, owner: int, to: int) -> asyncvmm.Acknowledgement:
        data = features(owner, 0, 300)
        return await self.exporter.send(data, key=owner, metadata=note(owner, 0, 300), to=to)

    async def bury_attacker(self) -> None:
        """Have the exporter believe that the attacker's process is dead: it is our own."""
        (gone,) = (c for c in self.exporter._connections.open.values() if c.link.closed)
        self.exporter._connections._on_death(gone)

    async def unharmed(self) -> None:
        """Show that the honest one is served, and that nothing of the others is left."""
        await until(lambda: len(self.exporter.statistics().consumers) == 1)
        ack = await self.send(1, 0)
        async with asyncio.timeout(PROMPTLY):
            batch = await self.honest.receive()
        assert wrong(batch[0]) == ""
        batch.release()
        del batch
        assert await ack == asyncvmm.Outcome(released=(0,))
        assert self.exporter.statistics().slots.free == 4
        # A segment that was being exported in a thread for one that is gone is closed a bit later.
        await until(lambda: Counters.of().descriptors == self.descriptors)


@pytest.fixture
async def victim(folder: Path) -> AsyncIterator[Victim]:
    """An exporter to attack; no exception may reach its loop."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: unhandled.append(found))
    address = str(folder / "pool")
    options: dict[str, Any] = {"pool_bytes": "64KiB", "slots": 4, "close_timeout": 1}
    async with (
        asyncvmm.open_exporter(address, device="cpu", route=asyncvmm.Broadcast(2), **options) as e,
        asyncvmm.connect(address, device="cpu", rank=0) as honest,
    ):
        await e.wait_attached(1)
        yield Victim(address, e, honest)
    assert unhandled == []


# -- before it is let in -------------------------------------------------------------------------

FIRST: dict[str, bytes] = {
    **RUBBISH,
    **{f"{name}, after the magic": HEADER + data for name, data in RUBBISH.items()},
    "the magic alone": wire.MAGIC,
    "the header alone": HEADER,
    "a welcome": welcome(REGION),
    "an attached": wire.encode_greeting(wire.Attached()),
    "a rejection": wire.encode_greeting(wire.Rejected("rank", "no", [1, 2])),
    "a release": packet(wire.Release(0, 1)),
    "a hello and more": HELLO + b"\xc0",
    "a hello cut short": HELLO[:-3],
    "a huge secret": HEADER + wire.encode(wire.Hello(1, None, "host", secret=b"x" * 60_000)),
    "a huge name": HEADER + wire.encode(wire.Hello(1, "x" * 60_000, "host")),
    "a window of nothing": HEADER + wire.encode(wire.Hello(1, None, "host", window=0)),
    "a window below": HEADER + wire.encode(wire.Hello(1, None, "host", window=-1)),
    "a huge window": HEADER + wire.encode(wire.Hello(1, None, "host", window=1 << 40)),
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
async def test_what_is_no_hello_ends_its_connection(
    victim: Victim, folder: Path, first: bytes
) -> None:
    """Kills: an error that leaves the connection or the exporter's callback half done."""
    with RawConsumer.to(victim.address) as raw:
        await raw.send(first.replace(b"{folder}", bytes(folder)))
        assert await raw.rest() == []
    await victim.unharmed()
    assert not (folder / "ran").exists()


REFUSED: dict[str, tuple[bytes, str, list[int]]] = {
    "another version": (
        wire.encode_greeting(wire.Hello(1, None, "host"), version=wire.VERSION + 1),
        "version",
        [wire.VERSION],
    ),
    "a rank below": (wire.encode_greeting(wire.Hello(-1, None, "host")), "rank", [-1, 2]),
    "a huge rank": (wire.encode_greeting(wire.Hello(2**63, None, "host")), "rank", [2**63, 2]),
    "no rank": (wire.encode_greeting(wire.Hello(None, "x", "host")), "rank", [-1, 2]),
    "a taken rank": (wire.encode_greeting(wire.Hello(0, None, "host")), "rank", [0, 2]),
    "other memory": (wire.encode_greeting(wire.Hello(1, None, "cuda")), "kind", []),
    "unknown memory": (wire.encode_greeting(wire.Hello(1, None, "\x00" * 1024)), "kind", []),
    "writable views": (
        wire.encode_greeting(wire.Hello(1, None, "host", writable=True)),
        "writable",
        [],
    ),
    "a secret": (
        wire.encode_greeting(wire.Hello(1, None, "host", secret=b"x")),
        "access_denied",
        [],
    ),
}


@pytest.mark.parametrize(("hello", "reason", "numbers"), REFUSED.values(), ids=REFUSED)
async def test_a_hello_that_does_not_fit_is_told_why_and_gets_no_second_try(
    victim: Victim, hello: bytes, reason: str, numbers: list[int]
) -> None:
    """Send a right hello behind the wrong one: it must take no rank and get no descriptor.

    Kills: a refused connection that is let in when it says hello again.
    """
    with RawConsumer.to(victim.address) as raw:
        await raw.send(hello, HELLO, HELLO)
        answer, *more = await raw.rest()
        rejected = wire.decode_greeting(answer)
        assert isinstance(rejected, wire.Rejected)
        assert (rejected.reason, rejected.numbers) == (reason, numbers)
        assert more == []
    await victim.unharmed()
    (await victim.attacker()).close()  # the rank is free


async def test_who_says_nothing_is_hung_up_on(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a connection without a deadline, and one whose deadline also ends the patient."""
    monkeypatch.setattr(connections, "GREETING_SECONDS", 0.05)
    silent = [RawConsumer.to(victim.address) for _ in range(20)]
    await turns(50)
    for raw in silent:
        with raw:
            assert await raw.rest() == []
    await victim.unharmed()


async def test_those_who_say_nothing_are_few_at_once(victim: Victim) -> None:
    """Three hundred connections that say nothing; an honest one comes in behind them.

    Kills: quiet connections that are kept without a bound, and a bound that shuts others out.
    """
    quiet = []
    for _ in range(300):
        quiet.append(RawConsumer.to(victim.address))
        await turns()  # the backlog holds fewer
    await until(lambda: len(victim.exporter._connections._greeting) == connections.MOST_GREETING)
    most = connections.MOST_GREETING * 2 + len(quiet) + 10  # a socket and a pidfd, and our own ends
    assert sum((Counters.of().descriptors - victim.descriptors).values()) <= most
    (await victim.attacker()).close()
    for raw in quiet:
        raw.close()
    await victim.unharmed()


HALF_WAY: dict[str, list[bytes]] = {
    "a release": [packet(wire.Release(0, 1))],
    "another hello": [HELLO],
    "a goodbye": [packet(wire.Goodbye())],
    "rubbish": [RUBBISH["random bytes"]],
    "another version": [wire.encode_greeting(wire.Attached(), version=wire.VERSION + 1)],
    "attached twice": [wire.encode_greeting(wire.Attached())] * 2,
}


@pytest.mark.parametrize("packets", HALF_WAY.values(), ids=HALF_WAY)
async def test_messages_before_attached_end_the_connection(
    victim: Victim, packets: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Kills: a message that is taken from a consumer to which nothing was delivered yet.

    The second version it gives is its fault, too, and not a bug here.
    """
    with RawConsumer.to(victim.address) as raw:
        await raw.hello(1)
        await raw.send(*packets)
        assert await raw.rest() == []
    await victim.unharmed()
    assert "met a bug" not in caplog.text


async def test_attached_before_the_pool_was_sent_ends_the_connection(victim: Victim) -> None:
    """Kills: deliveries that begin while segments are still on their way."""
    with RawConsumer.to(victim.address) as raw:
        await raw.send(HELLO, wire.encode_greeting(wire.Attached()))
        await raw.rest()
    await victim.unharmed()


# -- once it is in -------------------------------------------------------------------------------

INSIDE: dict[str, bytes] = {
    **RUBBISH,
    "a hello": HELLO,
    "a segment": b"\x91" + msgspec.msgpack.encode([4, [0, 0, 4096]]),
    "an event in host memory": packet(wire.Release(0, 1, b"x" * 64)),
    "an event for a slot below": b"\x91" + msgspec.msgpack.encode([9, -1, 1, b"x" * 64]),
    "an event for a slot above": packet(wire.Release(4, 1, b"x" * 64)),
    "an event for a huge slot": packet(wire.Release(1 << 62, 1, b"x" * 64)),
    "a huge event": b"\x91" + msgspec.msgpack.encode([9, 0, 1, b"x" * 65]),
    "a slot of 64 bits": b"\x91" + msgspec.msgpack.encode([9, 2**63, 1]),
    "a slot below": b"\x91" + msgspec.msgpack.encode([9, -1, 1]),
    "a slot that is text": b"\x91" + msgspec.msgpack.encode([9, "0", 1]),
    "a slot that is true": b"\x91" + msgspec.msgpack.encode([9, True, 1]),
    "an unknown message": b"\x91" + msgspec.msgpack.encode([99, 0]),
    "a message too short": b"\x91" + msgspec.msgpack.encode([9, 0]),
    "a long reason": b"\x91" + msgspec.msgpack.encode([10, 0, 1, "x" * 1025]),
    "a huge lane": b"\x91" + msgspec.msgpack.encode([9, 0, 1, b"", 1 << 20]),
    "right and wrong": packet(wire.Goodbye()) + b"\x00",
}


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
async def test_what_is_no_packet_ends_its_connection(
    victim: Victim, folder: Path, inside: bytes
) -> None:
    """Kills: a packet that is judged after half of it was acted upon, and an assert on its data."""
    with await victim.attacker() as raw:
        await raw.send(inside.replace(b"{folder}", bytes(folder)))
        assert await raw.rest() == []
    await victim.unharmed()
    assert not (folder / "ran").exists()


async def test_what_is_not_its_own_to_release_stays_as_it_is(victim: Victim) -> None:
    """Name others' owners, old ones, none, all doubled (field report 19).

    Kills: releases that are counted and not named, and a second one that frees the next use.
    """
    raw = await victim.attacker()
    theirs = await victim.send(1, 0)
    batch = await victim.honest.receive()
    for _ in range(3):
        mine = await victim.send(2, 1)
        (frame,) = await raw.batch()
        for slot in (*range(5), 1 << 62):
            for generation in (0, frame.generation - 1, frame.generation + 1, 1 << 62):
                await raw.say(wire.Release(slot, generation), wire.Refuse(slot, generation, "x"))
        await raw.say(wire.Release(batch[0].slot, batch[0].generation))
        await raw.say(wire.Take(batch[0].slot, batch[0].generation))
        await turns(20)
        assert not mine.done()
        assert not theirs.done()
        await raw.say(*[wire.Release(frame.slot, frame.generation)] * 3)
        assert await mine == asyncvmm.Outcome(released=(1,))
    await raw.say(wire.Goodbye(), wire.Goodbye(lingering=1 << 62), wire.Goodbye())
    assert wire.decode_from_exporter(await raw.packet() or b"") == [wire.Goodbye()]
    (stale,) = (c.stale for c in victim.exporter.statistics().consumers if c.member == 1)
    assert stale == 3 * (6 * 4 * 2 + 2 + 2)
    assert not theirs.done()
    batch.release()
    assert await theirs == asyncvmm.Outcome(released=(0,))
    raw.close()
    del batch
    await victim.unharmed()


async def test_a_batch_that_is_taken_twice_gives_one_credit(folder: Path) -> None:
    """Under Compete, with a window of one; also take what is not there, and release untaken.

    Kills: credit that is counted up by messages instead of by batches.
    """
    address = str(folder / "pool")
    options: dict[str, Any] = {"pool_bytes": "64KiB", "route": asyncvmm.Compete()}
    async with asyncvmm.open_exporter(address, device="cpu", **options) as exporter:
        with RawConsumer.to(address) as raw:
            await raw.hello(name="greedy", window=1)
            await raw.attach()
            for owner in range(4):
                data = features(owner, 0, 100)
                await exporter.send(data, metadata=note(owner, 0, 100), require="none")
            (first,) = await raw.batch()
            take = wire.Take(first.slot, first.generation)
            await raw.say(take, take, wire.Take(first.slot, first.generation + 1), take)
            (second,) = await raw.batch()
            await raw.say(*[wire.Release(second.slot, second.generation)] * 2)  # that is taking it
            (third,) = await raw.batch()
            await turns(20)
            (greedy,) = exporter.statistics().consumers
            assert (greedy.holding, greedy.untaken, greedy.stale) == (2, 1, 2)
            with pytest.raises(BlockingIOError):
                raw.sock.recv(1)
            for frame in (first, third):
                await raw.say(wire.Release(frame.slot, frame.generation))
            (fourth,) = await raw.batch()
            await raw.say(wire.Release(fourth.slot, fourth.generation))
            await exporter.drain()


async def test_what_a_dropped_attacker_holds_is_quarantined_and_nothing_else(
    victim: Victim,
) -> None:
    """It broke the rules, but its process lives and may still read (inv. 7)."""
    with await victim.attacker() as raw:
        ack = await victim.send(2, 1)
        await raw.batch()
        await raw.send(b"rubbish")
        assert await raw.rest() == []
    await until(lambda: victim.exporter.statistics().slots.quarantined == 1)
    theirs = await victim.send(1, 0)
    (await victim.honest.receive()).release()
    assert (await theirs).complete
    assert not ack.done()
    await victim.bury_attacker()
    with pytest.raises(asyncvmm.DeliveryError):
        await ack


async def test_unwanted_descriptors_are_closed(victim: Victim) -> None:
    """A thousand of them, at every stage (field report 33).

    Kills: an exporter that reads with room for descriptors nobody asked for.
    """
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        stages: list[RawConsumer] = [RawConsumer.to(victim.address), RawConsumer.to(victim.address)]
        await stages[1].hello(1)
        await stages[1].attach()
        await victim.exporter.wait_attached(2)
        before = Counters.of().descriptors
        for raw in stages:
            await raw.send(*[b"\x90"] * 4, fds=[null] * 250)
            await turns(50)
        after = Counters.of().descriptors
        assert sum((after - before).values()) == 0
        for raw in stages:
            raw.close()
    finally:
        os.close(null)
    await victim.unharmed()


@pytest.mark.slow
async def test_a_consumer_that_does_not_read_is_dropped_at_a_bound(victim: Victim) -> None:
    """It releases unseen, so owners never run out; what waits for it must (field report 63).

    Kills: a queue of outgoing packets without a bound (inv. 11).
    """
    data = {"x": torch.zeros(8)}
    with await victim.attacker() as raw:
        sent = 0
        while not victim.exporter.statistics().slots.quarantined:
            ack = await victim.exporter.send(data, to=1, require="none")
            (record,) = victim.exporter._core.records.values()
            await raw.say(wire.Release(record.slot, record.generation))
            while not ack.done() and not victim.exporter.statistics().slots.quarantined:
                await turns(1)
            sent += 1
            assert sent < 10_000
        assert sent > 4096
    await victim.bury_attacker()
    await victim.unharmed()


@pytest.mark.slow
async def test_a_thousand_attacks_leave_memory_as_it_was(victim: Victim, folder: Path) -> None:
    """Kills: whatever is kept of a connection that is over."""
    attacks = [*FIRST.values(), *(hello for hello, _, _ in REFUSED.values())]

    async def attack(rounds: int) -> int:
        for _ in range(rounds):
            for first in attacks:
                with RawConsumer.to(victim.address) as raw:
                    await raw.send(first, HELLO)
                    await raw.rest()
            with await victim.attacker() as raw:
                await raw.send(*INSIDE.values())
                await raw.rest()
            await until(lambda: len(victim.exporter.statistics().consumers) == 1)
        return Counters.of().rss

    before = await attack(5)
    after = await attack(1000 // len(attacks))
    assert after - before < 8 << 20
    await victim.unharmed()
