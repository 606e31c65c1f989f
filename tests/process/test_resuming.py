"""A consumer whose link broke, and whose process lives, gives back what it holds."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import asyncvmm
from asyncvmm import Outcome, PeerLostError, RemoteProtocolError
from asyncvmm._core import wire
from asyncvmm._fds import OwnedFd
from asyncvmm._io.names import resolve
from asyncvmm.testing import FakeDevice, FakePort, ProcessRaisedError
from asyncvmm.testing.counters import descriptors, pool_mappings
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers, turns, until
from tests.process.patterns import features, note
from tests.process.raw import RawConsumer


def open_exporter(ranks: int, **options: Any) -> asyncvmm.open_exporter:
    route = asyncvmm.Broadcast(ranks) if ranks else asyncvmm.Compete()
    options = {"pool_bytes": "64KiB", "slots": 6, "close_timeout": 1.0, **options}
    return asyncvmm.open_exporter("pool", device="cpu", route=route, **options)


async def send(exporter: asyncvmm.Exporter, owner: int) -> asyncvmm.Acknowledgement:
    data = features(owner, 0, 500)
    return await exporter.send(data, key=owner, metadata=note(owner, 0, 500), require="none")


def drop(exporter: asyncvmm.Exporter, peer: int = 0) -> None:
    """Have the exporter drop a link with everything on it that it has not read."""
    connections = exporter._connections
    conn = connections.open[peer]
    conn.link.abort()
    connections._on_end(conn, RemoteProtocolError("as a test wants it"))


def quarantined(exporter: asyncvmm.Exporter) -> int:
    return exporter.statistics().slots.quarantined


# -- giving back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 0])
@pytest.mark.parametrize("reconnect", [False, True])
async def test_what_is_held_is_released_over_another_link(
    peers: Peers, ranks: int, reconnect: bool
) -> None:
    """Two were taken, one is unread; the process goes on (field reports 12, 19).

    Kills: a quarantine that only the process's death ends, owners that another link loses, and an
    unread batch that is kept from the other competitor.
    """
    async with open_exporter(ranks) as exporter:
        peer = peers.start()
        options = {"reconnect": reconnect, "prefetch": 3}
        await peer.call(steps.connect, "pool", 0 if ranks else None, options)
        acks = [await send(exporter, owner) for owner in range(3)]
        await peer.call(steps.take, 2)
        if reconnect:
            await peer.call(steps.break_link_of_current)
        else:
            await peer.call(steps.break_link)
        if not ranks:
            async with asyncvmm.connect("pool", device="cpu", member="other") as other:
                (await other.receive()).release()
                await acks[2]
        async with asyncio.timeout(PROMPTLY):
            third = await acks[2]
        if ranks:
            assert third == Outcome(refused=((0, "it was lost with the link"),))
        else:
            assert third == Outcome(released=("other",))
        await until(lambda: quarantined(exporter) == 0)
        assert exporter.statistics().slots.held == 2
        assert not any(ack.done() for ack in acks[:2])
        await peer.call(steps.look_again)
        await peer.call(steps.give_back)
        async with asyncio.timeout(PROMPTLY):
            assert [len((await ack).released) for ack in acks[:2]] == [1, 1]
        await until(lambda: exporter.statistics().slots.free == 6)
        assert not peer.dead
        if not reconnect:
            await until(lambda: exporter.statistics().consumers == ())
            await until(lambda: peer.counters().mappings == 0)
        await peer.call(steps.leave)


@pytest.mark.parametrize("lost", ["releases", "takes", "a delivery"])
async def test_what_was_lost_on_the_way_is_said_again(folder: Path, lost: str) -> None:
    """The exporter drops the link with releases unread, or with a delivery not yet read here.

    Kills: a release that is said once and lost, a batch that another competitor begins because
    the word that it was taken was lost, and an owner that never came and stays owed.
    """
    ranks = 0 if lost == "takes" else 1
    async with open_exporter(ranks) as exporter:
        options: dict[str, Any] = {"rank": 0 if ranks else None, "device": "cpu"}
        async with asyncvmm.connect("pool", **options) as consumer:
            acks = [await send(exporter, owner) for owner in range(2)]
            batches = [await consumer.receive() for _ in acks]
            if lost == "releases":
                for batch in batches:
                    batch.release()
                consumer._link.flush()
            elif lost == "a delivery":
                batches.pop(0).release()
                await acks.pop(0)
                acks.append(await send(exporter, 2))
                exporter._connections.open[0].link.flush()
                consumer._link.pause()
            drop(exporter)
            if lost == "a delivery":
                consumer._link._sock.shutdown(2)
                consumer._link.start()
            await until(lambda: consumer.statistics().losses == 1)
            await until(lambda: quarantined(exporter) == 0)
            if lost == "takes":
                assert exporter.statistics().slots.held == 2
                async with asyncvmm.connect("pool", device="cpu", member="other") as other:
                    await turns(10)
                    assert other.statistics().delivered == 0
            for batch in batches:
                batch.release()
            async with asyncio.timeout(PROMPTLY):
                outcomes = [await ack for ack in acks]
            assert all(outcome.complete or lost == "a delivery" for outcome in outcomes)
            assert exporter.statistics().slots.free == 6


@pytest.mark.parametrize("ranks", [1, 0])
@pytest.mark.parametrize("passes", range(6))
async def test_who_leaves_as_its_link_breaks_owes_nothing(
    folder: Path, ranks: int, passes: int
) -> None:
    """It has nothing in hand, but what it said last, or has not read, may be lost with the link.

    It leaves before it has seen the end, while it is told of that, and afterwards.  Kills: owners
    that stay quarantined for as long as the process lives, since nobody in it speaks for them.
    """
    async with open_exporter(ranks) as exporter:
        options: dict[str, Any] = {"rank": 0 if ranks else None, "device": "cpu"}
        async with asyncvmm.connect("pool", **options) as consumer:
            await exporter.wait_attached(1)
            acks = [await send(exporter, owner) for owner in range(2)]
            (await consumer.receive()).release()
            drop(exporter)
            await turns(passes)
        await until(lambda: quarantined(exporter) == 0)
        if not ranks:
            async with asyncvmm.connect("pool", **options) as other:
                for ack in acks:
                    if not ack.done():
                        (await other.receive()).release()
                        await ack
        await until(lambda: exporter.statistics().slots.free == 6)
        assert all(ack.done() for ack in acks)


async def test_who_leaves_as_its_exporter_hangs_up_is_not_kept(folder: Path) -> None:
    """Kills: pauses between looks for an exporter that is not there, while nothing is in hand."""
    looks = 0
    opening = open_exporter(1)
    exporter = await opening.__aenter__()
    consumer = await asyncvmm.connect("pool", rank=0, device="cpu").__aenter__()
    await exporter.wait_attached(1)
    resuming = consumer._resuming
    assert resuming is not None
    ask = resuming._ask

    async def look() -> Any:
        nonlocal looks
        looks += 1
        return await ask()

    resuming._ask = look  # type: ignore[method-assign]  # counts
    await send(exporter, 0)
    consumer._link.pause()
    await opening.__aexit__(LookupError, LookupError(), None)
    consumer._link.start()
    await consumer.aclose()
    assert looks == 1


async def test_a_release_that_was_lost_is_still_behind_its_event(folder: Path) -> None:
    """The device reads on while the link breaks; so it does where the release comes in between.

    Kills: a release that is said again without its event, and one that is made without an event
    because nobody listens at the moment (inv. 4).
    """
    device = FakeDevice(hold_release=True)
    exporting = asyncvmm.open_exporter("pool", device="cpu", slots=4, _port=FakePort(device))
    async with (
        exporting as exporter,
        asyncvmm.connect("pool", device="cpu", rank=0, _port=FakePort(device)) as consumer,
    ):
        acks = [await send(exporter, owner) for owner in range(3)]
        batches = [await consumer.receive() for _ in acks]
        for batch in batches:
            batch[0]["bytes"]
        batches[0].release()
        consumer._link.flush()  # lost, for the exporter does not read it
        drop(exporter)
        while not consumer.statistics().losses:
            await turns(1)
        batches[1].release()  # said when there is a link again
        assert quarantined(exporter) == 3
        await until(lambda: exporter.statistics().slots.draining == 2)
        batches[2].release()
        await until(lambda: exporter.statistics().slots.draining == 3)
        await turns(10)
        assert not any(ack.done() for ack in acks)
        device.finish()
        async with asyncio.timeout(PROMPTLY):
            assert all([(await ack).complete for ack in acks])


async def test_leaving_after_the_link_broke_gives_back_first(folder: Path) -> None:
    """A program that is told of the loss leaves at once.

    Kills: a consumer that leaves before it has found another link, and what it held with it.
    """
    async with open_exporter(1) as exporter:
        acks = [await send(exporter, owner) for owner in range(2)]
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            kept = await consumer.receive()
            view = kept[0]["bytes"]
            await until(lambda: consumer.statistics().unread == 1)
            drop(exporter)
            while not consumer.statistics().losses:
                await turns(1)  # no longer, so that we are the first to know
            with pytest.raises(PeerLostError):
                await consumer.receive()
            assert quarantined(exporter) == 2  # no other link is there yet
        async with asyncio.timeout(PROMPTLY):
            assert (await acks[1]).refused
        await turns(10)
        assert not acks[0].done()  # a view of it is alive
        del view
        async with asyncio.timeout(PROMPTLY):
            assert (await acks[0]).complete


async def test_the_memory_goes_when_the_last_owner_is_back(peers: Peers) -> None:
    """Also if the exporter dies while the second link is there.

    Kills: a mapping or a descriptor that the second link keeps.
    """
    host = peers.start()
    await host.call(steps.open_exporter, "pool", 1)
    before = descriptors()
    async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
        await host.call(steps.send, [0, 1])
        kept = [await consumer.receive() for _ in range(2)]
        consumer._link._sock.shutdown(2)
        await until(lambda: consumer.statistics().state == "closing")
        kept.pop().release()
        assert pool_mappings()
        await host.killed()
        await until(lambda: consumer.statistics().state == "closed")
        assert pool_mappings()
        kept.pop().release()
        await until(lambda: not pool_mappings())
        assert descriptors() == before
    os.unlink(resolve("pool").sockaddr)  # the killed one left it to its successor


async def test_a_link_that_breaks_again_leaves_the_rest_to_the_end_of_the_process(
    peers: Peers,
) -> None:
    """Kills: an exporter that counts the second break as a death, and one that forgets it."""
    async with open_exporter(1) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        ack = await send(exporter, 0)
        await peer.call(steps.take, 1)
        drop(exporter)
        await until(lambda: exporter.statistics().slots.held == 1)
        drop(exporter)
        await until(lambda: quarantined(exporter) == 1)
        await peer.call(steps.give_back)
        await turns(20)
        assert not ack.done()
        await peer.killed()
        async with asyncio.timeout(PROMPTLY):
            assert await ack == Outcome(lost=(0,))
        assert exporter.statistics().consumers == ()


# -- who may --------------------------------------------------------------------------------------


async def test_only_the_same_process_is_believed(peers: Peers) -> None:
    """Another process of the same user knows every number (field report 19).

    Kills: a claim that is believed for its numbers, one for another life of the exporter, one
    without the secret, and one that takes a link away from a consumer that has it.
    """
    async with open_exporter(2, secret="sesame") as exporter:
        victim, absent = peers.start(), peers.start()
        for rank, peer in enumerate((victim, absent)):
            await peer.call(steps.connect, "pool", rank, {"secret": "sesame"})
        ack = await send(exporter, 0)
        for peer in (victim, absent):
            await peer.call(steps.take, 1)
        absent.stop()
        drop(exporter, 1)
        assert quarantined(exporter) == 0  # the other rank holds it
        identity = exporter._connections.handshake.identity
        address = resolve("pool").sockaddr
        for claim in (
            wire.Resume(identity, 0, b"sesame"),
            wire.Resume(identity, 1, b"sesame"),
            wire.Resume(identity, 7, b"sesame"),
            wire.Resume(identity, 1, b"sesam"),
            wire.Resume(bytes(16), 1, b"sesame"),
        ):
            with RawConsumer.to(address) as raw:
                await raw.send(wire.encode_greeting(claim))
                packet = await raw.packet()
                assert packet is not None
                answer = wire.decode_greeting(packet)
                assert isinstance(answer, wire.Rejected)
                wrong_secret = claim.secret != b"sesame"
                assert answer.reason == ("access_denied" if wrong_secret else "nothing_owed")
                await raw.send(wire.frame([wire.encode(wire.Release(0, 1))]))
                assert await raw.rest() == []
        # The right process, but of another exporter: its numbers mean something else there.
        claim_of_another = await victim.call(steps.claim, address, bytes(16), 0, "sesame")
        assert claim_of_another == "nothing_owed"
        assert [each.holding for each in exporter.statistics().consumers] == [1, 1]
        await victim.call(steps.give_back)
        await until(lambda: quarantined(exporter) == 1)
        assert not ack.done()
        absent.resume()
        await absent.call(steps.give_back)
        async with asyncio.timeout(PROMPTLY):
            assert sorted((await ack).released) == [0, 1]
        for peer in (victim, absent):
            await peer.call(steps.leave)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a pid namespace")
async def test_a_process_is_known_again_from_another_pid_namespace(peers: Peers) -> None:
    """There its pid is 0, as everybody's is; the pidfd's inode tells (Linux 6.9).

    Kills: two processes of other namespaces that are taken for one because of their pid.
    """
    host, first, second = (peers.start(namespace=True) for _ in range(3))
    await host.call(steps.open_exporter, "pool", 2)
    for rank, peer in enumerate((first, second)):
        await peer.call(steps.connect, "pool", rank)
    assert [pid for _, pid, _ in await host.call(steps.consumers)] == [0, 0]
    sending = host.begin(steps.send, [0], 0, 1000, True)
    for peer in (first, second):
        await peer.call(steps.take, 1)
    identity, address = await host.call(steps.identity), resolve("pool").sockaddr
    assert await first.call(steps.claim, address, identity, 1) == "nothing_owed"
    same = await first.call(steps.claim, address, identity, 0)
    assert same == ("" if pidfds_have_inodes() else "nothing_owed")
    await second.call(steps.give_back)
    await first.killed()
    with pytest.raises(ProcessRaisedError, match=r"DeliveryError.*lost: \[0\]"):
        await sending
    await second.call(steps.leave)
    await host.call(steps.leave)


def pidfds_have_inodes() -> bool:
    """Say whether a pidfd's inode is its process's own here; else it cannot be told who it is."""
    with OwnedFd(os.pidfd_open(os.getpid())) as pidfd, OwnedFd(os.eventfd(0)) as other:
        return os.fstat(pidfd.fileno()).st_dev != os.fstat(other.fileno()).st_dev


# -- the other way round --------------------------------------------------------------------------


async def test_an_exporter_that_closed_for_good_is_not_looked_for(folder: Path) -> None:
    """Its process lives, its name is gone.

    Kills: a memory that waits for a link that never comes.
    """
    exporting = open_exporter(1)
    exporter = await exporting.__aenter__()
    consumer = await asyncvmm.connect("pool", device="cpu", rank=0).__aenter__()
    await send(exporter, 0)
    kept = await consumer.receive()
    await exporting.__aexit__(LookupError, LookupError(), None)
    with pytest.raises(PeerLostError):
        await consumer.receive()
    kept.release()
    async with asyncio.timeout(PROMPTLY):
        await until(lambda: not pool_mappings())
        await consumer.aclose()
