"""Every wait ends, and everything comes back, when the process at the other end is killed."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm.testing.counters import descriptors, pool_mappings
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.chaos import KILLS, Chaos, ReconnectingChaos
from tests.process.harness import Peers, kill, turns, until
from tests.process.patterns import features, note, wrong

SPEC = {"x": asyncvmm.TensorSpec((8,), torch.uint8)}


async def send(exporter: asyncvmm.Exporter, owner: int, **terms: Any) -> asyncvmm.Acknowledgement:
    return await exporter.send(
        features(owner, 0, 500), key=owner, metadata=note(owner, 0, 500), **terms
    )


def open_exporter(name: str, ranks: int = 1, **options: Any) -> asyncvmm.open_exporter:
    route = asyncvmm.Broadcast(ranks) if ranks else asyncvmm.Compete()
    options = {"slots": 4, **options}
    return asyncvmm.open_exporter(name, device="cpu", pool_bytes="64KiB", route=route, **options)


# -- every awaitable -----------------------------------------------------------------------------


async def wait_to_send(exporter: asyncvmm.Exporter) -> str:
    await send(exporter, 9)
    return "sent"


async def wait_to_reserve(exporter: asyncvmm.Exporter) -> str:
    async with exporter.reserve(SPEC):
        return "reserved"


async def wait_for_the_acknowledgement(exporter: asyncvmm.Exporter) -> str:
    ack = await send(exporter, 9)
    with pytest.raises(asyncvmm.DeliveryError) as caught:
        await ack
    assert caught.value.outcome == asyncvmm.Outcome(lost=(0,))
    return "lost"


async def wait_to_drain(exporter: asyncvmm.Exporter) -> str:
    await exporter.drain()
    return "drained"


@pytest.mark.parametrize(
    ("wait", "out", "outcome"),
    [
        (wait_to_send, 4, "sent"),
        (wait_to_reserve, 4, "reserved"),
        (wait_for_the_acknowledgement, 1, "lost"),
        (wait_to_drain, 2, "drained"),
    ],
)
async def test_an_exporters_wait_ends_with_the_consumer_it_waits_for(
    peers: Peers,
    wait: Callable[[asyncvmm.Exporter], Awaitable[str]],
    out: int,
    outcome: str,
) -> None:
    """Hold owners in a consumer, wait for them, kill it; a send and a reservation get the room.

    Kills: a death that settles nothing, one that settles and wakes nobody.
    """
    async with open_exporter("pool") as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        for owner in range(out):
            await send(exporter, owner)
        await peer.call(steps.take, out)
        task = asyncio.ensure_future(wait(exporter))
        await turns(5)
        assert not task.done()
        await peer.killed()
        async with asyncio.timeout(PROMPTLY):
            assert await task == outcome
        successor = peers.start()  # it gets what was sent since
        await successor.call(steps.connect, "pool", 0)
        await successor.call(
            steps.take, exporter.statistics().published - out - (outcome == "lost")
        )
        await successor.call(steps.give_back)
        await exporter.drain()


async def test_closing_an_exporter_ends_with_the_consumer_it_waits_for(peers: Peers) -> None:
    """Kills: a close that waits for its time limit although nothing is out any more."""
    manager = open_exporter("pool", close_timeout=60)
    exporter = await manager.__aenter__()
    peer = peers.start()
    await peer.call(steps.connect, "pool", 0)
    ack = await send(exporter, 0, require="none")
    await peer.call(steps.take, 1)
    closing = asyncio.ensure_future(manager.__aexit__(None, None, None))
    await turns(5)
    assert not closing.done()
    await peer.killed()
    async with asyncio.timeout(PROMPTLY):
        await closing
    assert (await ack).lost == (0,)


async def iterate(consumer: asyncvmm.Consumer) -> None:
    async for _ in consumer:
        pass


async def receive(consumer: asyncvmm.Consumer) -> None:
    await consumer.receive()


@pytest.mark.parametrize("wait", [iterate, receive])
async def test_a_consumers_wait_ends_with_its_exporter(
    peers: Peers, wait: Callable[[asyncvmm.Consumer], Awaitable[None]]
) -> None:
    """Kills: a loss that wakes only one of those who wait."""
    peer = peers.start()
    await peer.call(steps.open_exporter, "pool", 1)
    async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
        tasks = [asyncio.ensure_future(wait(consumer)) for _ in range(3)]
        await turns(5)
        await peer.killed()
        for task in tasks:
            with pytest.raises(asyncvmm.PeerLostError) as caught:
                async with asyncio.timeout(PROMPTLY):
                    await task
            assert caught.value.peer == "exporter"
    await take_the_name(peers, "pool")


async def test_leaving_ends_with_the_exporter_that_does_not_answer(peers: Peers) -> None:
    """Kills: a goodbye that waits for its time limit although nobody is left to answer."""
    peer = peers.start()
    await peer.call(steps.open_exporter, "pool", 1)
    async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
        peer.stop()
        leaving = asyncio.ensure_future(consumer.aclose())
        await turns(5)
        assert not leaving.done()
        await peer.killed()
        async with asyncio.timeout(PROMPTLY):
            await leaving
    await take_the_name(peers, "pool")


@pytest.mark.parametrize("point", ["accept", "export"])
async def test_connecting_ends_with_the_exporter(peers: Peers, point: str) -> None:
    """Kill it before it accepts, and between its welcome and its pool.

    Kills: a handshake that waits for segments after the link has ended.
    """
    peer = peers.start()
    await peer.call(steps.open_exporter, "pool", 1, None, [point])
    if point == "accept":
        peer.stop()
    manager = asyncvmm.connect("pool", device="cpu", rank=0)
    sockets = descriptors()["socket"]
    connecting = asyncio.ensure_future(manager.__aenter__())
    if point == "accept":
        await until(lambda: descriptors()["socket"] > sockets)  # it is connected at once
    else:
        await peer.at(point)
    assert not connecting.done()
    await peer.killed()
    with pytest.raises(asyncvmm.PeerLostError):
        async with asyncio.timeout(PROMPTLY):
            await connecting
    assert pool_mappings() == []
    await take_the_name(peers, "pool")


@pytest.mark.parametrize("point", ["attach", "map"])
async def test_a_consumer_that_dies_while_it_connects_leaves_its_rank_free(
    peers: Peers, point: str
) -> None:
    """Kills: a death before the consumer was open that gives back no seat."""
    async with open_exporter("pool") as exporter:
        peer = peers.start()
        connecting = peer.begin(steps.connect, "pool", 0, None, [point])
        await peer.at(point)
        await peer.killed()
        connecting.cancel()
        successor = peers.start()
        await until(lambda: not exporter.statistics().consumers)
        await successor.call(steps.connect, "pool", 0)
        ack = await send(exporter, 1)
        await successor.call(steps.take, 1)
        await successor.call(steps.give_back)
        assert (await ack).complete


async def take_the_name(peers: Peers, name: str) -> None:
    """Show that a killed exporter's name can be had by the next, which leaves nothing of it."""
    async with open_exporter(name):
        pass


# -- what the dead one held ----------------------------------------------------------------------


@pytest.mark.slow
async def test_a_killed_consumer_gives_back_what_it_took_and_what_was_queued(peers: Peers) -> None:
    """Kill a consumer with k owners in hand, of N sent to it, for each k (field report 11).

    Kills: a death that settles what was taken and forgets what was queued, or the reverse.
    """
    slots = 6
    async with open_exporter("pool", slots=slots) as exporter:
        for taken in range(slots + 1):
            peer = peers.start()
            await peer.call(steps.connect, "pool", 0)
            acks = [await send(exporter, owner, require="none") for owner in range(slots)]
            assert await peer.call(steps.take, taken) == list(range(taken))
            given_back = taken // 2
            await peer.call(steps.give_back, given_back)
            await peer.killed()
            async with asyncio.timeout(PROMPTLY):
                outcomes = [await ack for ack in acks]
            assert outcomes[:given_back] == [asyncvmm.Outcome(released=(0,))] * given_back
            left = slots - given_back
            assert outcomes[given_back:] == [asyncvmm.Outcome(lost=(0,))] * left
            statistics = exporter.statistics()
            assert statistics.slots.free == slots
            assert statistics.free_bytes == statistics.largest_gap == statistics.pool_bytes
            assert statistics.consumers == ()


async def test_a_consumer_killed_before_it_reads_a_message_gives_the_owner_back(
    peers: Peers,
) -> None:
    """Stop it, send, kill it: the message was sent and not read (field report 11)."""
    async with open_exporter("pool") as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        peer.stop()
        ack = await send(exporter, 1, require="none")
        await peer.killed()
        async with asyncio.timeout(PROMPTLY):
            assert await ack == asyncvmm.Outcome(lost=(0,))
        assert exporter.statistics().slots.free == 4


async def test_last_words_count(peers: Peers) -> None:
    """A release that was sent before the death is a release, not a loss.

    Kills: a death that settles before it reads what the socket still holds.
    """
    async with open_exporter("pool") as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        acks = [await send(exporter, owner) for owner in range(4)]
        await peer.call(steps.take, 4)
        # No await until the process is dead, so both its words and its end are there at once.
        dying = peer.begin(steps.give_back_and_die)
        while not peer.dead:
            pass
        dying.cancel()
        async with asyncio.timeout(PROMPTLY):
            assert [await ack for ack in acks] == [asyncvmm.Outcome(released=(0,))] * 4


async def test_what_a_dead_competitor_had_not_taken_goes_to_another(peers: Peers) -> None:
    """Credit means taken: what was in its queue is another's, what was in its hands is lost.

    Kills: a death that loses untaken batches, and one that hands out taken ones again.
    """
    async with open_exporter("pool", 0, slots=8) as exporter:
        first, second = peers.start(), peers.start()
        await first.call(steps.connect, "pool", None, {"member": "first", "prefetch": 3})
        acks = [await send(exporter, owner, require="none") for owner in range(6)]
        assert await first.call(steps.take, 2) == [0, 1]
        await first.call(steps.give_back, 1)
        await first.killed()
        await second.call(steps.connect, "pool", None, {"member": "second", "prefetch": 3})
        assert await second.call(steps.take, 4) == [2, 3, 4, 5]
        await second.call(steps.give_back)
        async with asyncio.timeout(PROMPTLY):
            outcomes = [await ack for ack in acks]
        assert outcomes == [
            asyncvmm.Outcome(released=("first",)),
            asyncvmm.Outcome(lost=("first",)),
            *[asyncvmm.Outcome(released=("second",))] * 4,
        ]


async def test_a_batch_that_was_begun_is_never_begun_again(peers: Peers) -> None:
    """Die in the loop turn in which the batch was received: it is lost, not another's.

    Kills: a credit that is given back with the turn's other messages, after the work has begun.
    """
    async with open_exporter("pool", 0) as exporter:
        first, second = peers.start(), peers.start()
        await first.call(steps.connect, "pool", None, {"member": "first"})
        acks = [await send(exporter, owner, require="none") for owner in range(2)]
        first.begin(steps.take_and_die)
        await second.call(steps.connect, "pool", None, {"member": "second"})
        assert await second.call(steps.take, 1) == [1]
        await second.call(steps.give_back)
        async with asyncio.timeout(PROMPTLY):
            outcomes = [await ack for ack in acks]
        lost, other = asyncvmm.Outcome(lost=("first",)), asyncvmm.Outcome(released=("second",))
        assert outcomes == [lost, other]


# -- the exporter goes first ---------------------------------------------------------------------


async def test_what_a_killed_exporter_left_stays_readable_until_it_is_released(
    peers: Peers,
) -> None:
    """Hold two batches and leave two unread, kill the exporter (field report 4).

    Kills: a loss that keeps the mapping for ever, and an error that is kept and raised again to
    everybody, and so keeps the frames and the views of whoever caught it.
    """
    peer = peers.start()
    await peer.call(steps.open_exporter, "pool", 1)
    async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
        await peer.call(steps.send, [0, 1, 2, 3])
        held = [await consumer.receive(), await consumer.receive()]
        view = held[0][0]["bytes"]
        await until(lambda: consumer.statistics().unread == 2)
        await peer.killed()
        with pytest.raises(asyncvmm.PeerLostError) as caught:
            async with asyncio.timeout(PROMPTLY):
                await consumer.receive()
        await ask_with_a_view(consumer, held[1][0])
        assert caught.value.__notes__ == ["2 batches had been delivered and not received"]
        assert [wrong(batch[0]) for batch in held] == ["", ""]
        assert len(pool_mappings()) == 1
        for batch in held:
            batch.release()
        assert view.tolist() == features(0, 0, 1000)["bytes"].tolist()
        assert len(pool_mappings()) == 1
        del view, batch, held
        await turns()
        assert pool_mappings() == []
    await take_the_name(peers, "pool")


async def ask_with_a_view(consumer: asyncvmm.Consumer, owner: asyncvmm.Owner) -> None:
    """Be told of the loss in a frame that has a view."""
    view = owner["words"]
    with suppress(asyncvmm.PeerLostError):
        await consumer.receive()
    assert view.numel() > 0


@pytest.mark.slow
async def test_an_exporter_that_leaves_with_owners_out_waits_and_then_names_them(
    peers: Peers,
) -> None:
    """How many, held by whom, how old; and what was received stays readable (field report 4).

    Kills: a close that drops what is out without a word, and one that waits for ever.
    """
    holder, late = peers.start(), peers.start()
    manager = open_exporter("pool", 2, close_timeout=0.3)
    exporter = await manager.__aenter__()
    await holder.call(steps.connect, "pool", 0)
    await late.call(steps.connect, "pool", 1)
    acks = [await send(exporter, owner) for owner in range(2)]
    for peer in (holder, late):
        await peer.call(steps.take, 2)
    await late.call(steps.give_back)
    with pytest.warns(asyncvmm.OwnersOutstandingWarning) as caught:
        await manager.__aexit__(None, None, None)
    (warning,) = caught
    text = str(warning.message)
    found = re.search(
        r"closed after 0.3 s with 2 owners still out, held by .* consumers 0; .* (\d+\.\d) s", text
    )
    assert found, text
    assert float(found[1]) >= 0.3
    for ack in acks:
        with pytest.raises(asyncvmm.ClosedError):
            await ack
    assert holder.counters().mappings == 1
    await holder.call(steps.look_again)
    await holder.call(steps.give_back)
    await holder.call(steps.leave)
    assert holder.counters().mappings == 0
    assert holder.printed == []


@pytest.mark.parametrize("hooks", [True, False], ids=["os.fork", "fork"])
async def test_an_exporters_death_is_seen_while_a_child_of_it_lives(
    peers: Peers, hooks: bool
) -> None:
    """A forked child keeps sockets open, so end-of-file says nothing.

    Kills: a consumer that knows of its exporter's end by end-of-file alone, and one that keeps
    the pidfd of a process that has ended.
    """
    peer = peers.start()
    await peer.call(steps.open_exporter, "pool", 1)
    before = descriptors()["pidfd"]
    async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
        child = await peer.call(steps.fork, hooks)
        try:
            await peer.killed()
            with pytest.raises(asyncvmm.PeerLostError):
                async with asyncio.timeout(PROMPTLY):
                    await consumer.receive()
            # A look for a way back, begun by the end-of-file, may just be being cancelled.
            await until(lambda: descriptors()["pidfd"] == before)
        finally:
            kill(child)
    await take_the_name(peers, "pool")


async def test_a_name_is_free_while_a_child_of_the_dead_exporter_has_its_socket(
    peers: Peers,
) -> None:
    """The child was forked past Python and accepts nobody.

    Kills: a name that stays taken by a process that is dead, and a consumer that waits for an
    answer of nobody.
    """
    peer = peers.start()
    await peer.call(steps.open_exporter, "pool", 1)
    child = await peer.call(steps.fork, False)
    try:
        await peer.killed()
        with pytest.raises(asyncvmm.ExporterNotFoundError):
            async with asyncio.timeout(PROMPTLY):
                await asyncvmm.connect("pool", device="cpu", rank=0).__aenter__()
        waiting = asyncio.ensure_future(
            asyncvmm.connect("pool", device="cpu", rank=0, wait=True).__aenter__()
        )
        await turns(20)
        async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB"):
            await (await waiting).aclose()
    finally:
        kill(child)


@pytest.mark.parametrize("hooks", [True, False], ids=["os.fork", "fork"])
async def test_a_consumers_death_is_seen_while_a_child_of_it_lives(
    peers: Peers, hooks: bool
) -> None:
    """Kills: an exporter that knows of its consumer's end by end-of-file alone."""
    async with open_exporter("pool") as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        ack = await send(exporter, 1, require="none")
        await peer.call(steps.take, 1)
        child = await peer.call(steps.fork, hooks)
        try:
            await peer.killed()
            async with asyncio.timeout(PROMPTLY):
                assert (await ack).lost == (0,)
        finally:
            kill(child)


# -- kills at random moments ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2], ids=["compete", "broadcast"])
async def test_kills_at_random_moments_cost_only_what_died(peers: Peers, ranks: int) -> None:
    """Kill the exporter, a consumer, or both, ten times under load (field reports 4, 6, 11).

    Each time the survivors find every slot back, the contents right and at most one line printed,
    and the successors work under the same name.
    """
    chance = random.Random(20 + ranks)
    chaos = Chaos(peers, ranks, chance)
    await chaos.open()
    for _ in range(10):
        await chaos.happen(chance.choice(KILLS))
    await chaos.some_progress()
    await chaos.finish()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2], ids=["compete", "broadcast"])
async def test_consumers_that_reconnect_go_on_after_kills_at_random_moments(
    peers: Peers, ranks: int
) -> None:
    """The same with consumers that go on by themselves, each loss being told once.

    Kills: a loss that is told twice or never, owners of a lost exporter that come after it, and
    descriptors that each reconnection leaves behind.
    """
    chance = random.Random(40 + ranks)
    chaos = ReconnectingChaos(peers, ranks, chance)
    await chaos.open()
    for mishap in ("kill_exporter", "kill_both", "start_again", "leave_and_return", *KILLS):
        await chaos.happen(mishap)
    await chaos.some_progress()
    await chaos.finish()
