"""A view keeps its owner: when slots come back, and what a view may do meanwhile (inv. 14)."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import asyncvmm
from asyncvmm._backends.memfd import POISON
from asyncvmm.testing import FakeDevice, FakePort, Pair, open_pair
from tests.api import steps as own_steps
from tests.api.books import check_all_back, check_books, passes, until
from tests.process import steps
from tests.process.harness import Peers
from tests.process.patterns import features, note

SOURCE = torch.arange(600)

kept: Any = None  # a global of this module


async def received(pair: Pair, key: str = "k") -> asyncvmm.Batch:
    """Send one owner and receive it."""
    await pair.exporter.send({"x": SOURCE, "y": torch.ones(2)}, key=key)
    return await pair.consumer.receive()


def keep_globally(view: torch.Tensor) -> object:
    global kept
    kept = view
    return None


KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda view: view,
    "a slice": lambda view: view[17:20],
    "one element": lambda view: view[3],
    "another dtype": lambda view: view.view(torch.uint8),
    "a transposed": lambda view: view.view(20, 30).t(),
    "detached": lambda view: view.detach(),
    "a DLPack import": lambda view: torch.utils.dlpack.from_dlpack(view),
    "a DLPack capsule": lambda view: view.__dlpack__(),
    "numpy's import": lambda view: np.from_dlpack(view),
    "a numpy array": lambda view: view.numpy(),
    "a slice of one": lambda view: view.numpy()[::2],
    "a memoryview": lambda view: memoryview(view.numpy()),  # type: ignore[arg-type]  # numpy's stubs
    "a storage": lambda view: view.untyped_storage(),
    "a numpy array of a slice, back in torch": lambda view: torch.from_numpy(view[5:].numpy()),
    "a global": keep_globally,
    "a closure": lambda view: lambda: view,
}


@pytest.mark.parametrize("what", KEEPERS)
async def test_whatever_shows_the_bytes_keeps_the_owner(what: str) -> None:
    """Release first, then let go of the last thing that shows the bytes; and the other way.

    Kills: a slot that goes back while something still shows its bytes (field report 21), one
    that never goes back, and a release that is sent twice.
    """
    global kept
    async with open_pair() as pair:
        for release_first in (True, False):
            batch = await received(pair)
            keeper: Any = KEEPERS[what](batch[0]["x"])
            if release_first:
                batch.release()
                await passes(5)
                state = pair.consumer.statistics()
                assert (state.held, state.viewed, state.pinned) == (1, 1, ("k",))
                assert check_books(pair.exporter).slots.held == 1
                keeper = kept = None
            else:
                keeper = kept = None
                await passes(5)
                state = pair.consumer.statistics()
                assert (state.held, state.viewed, state.pinned) == (1, 0, ())
                assert check_books(pair.exporter).slots.held == 1
                batch.release()
            assert keeper is None
            await pair.exporter.drain()
            stats = check_all_back(pair.exporter)
            assert stats.consumers[0].stale == 0
        state = pair.consumer.statistics()
        assert (state.held, state.viewed, state.released, state.refused) == (0, 0, 2, 0)


async def test_the_last_of_many_views_of_one_owner_counts() -> None:
    """Kills: counting views per feature, and taking the first that dies for the last."""
    async with open_pair() as pair:
        batch = await received(pair)
        views = [batch[0]["x"], batch[0]["x"][3:], batch[0]["y"], batch[0]["y"].numpy()]
        batch.release()
        while len(views) > 1:
            views.pop(0)
            await passes(5)
            assert check_books(pair.exporter).slots.held == 1
        views.clear()
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_a_view_without_bytes_keeps_nothing() -> None:
    """Kills: an empty tensor that pins a slot although it shows no byte."""
    async with open_pair() as pair:
        await pair.exporter.send({"none": torch.empty(0, 5), "x": SOURCE})
        with await pair.consumer.receive() as batch:
            empty = batch[0]["none"]
        await pair.exporter.drain()
        assert empty.shape == (0, 5)


async def test_a_loop_variable_pins_one_owner_and_the_statistics_name_it() -> None:
    """The view of the last turn lives until the next one begins; never more than one.

    Kills: a pinned owner that shows nowhere, and a view that pins the owners after it.
    """
    async with open_pair(slots=4) as pair:
        pinned = []
        for number in range(5):
            await pair.exporter.send({"x": SOURCE}, key=number)
            async with await pair.consumer.receive() as batch:
                for owner in batch:
                    view = owner["x"]  # the loop variable of the report
            assert view[1] == 1
            await passes(5)
            pinned.append(pair.consumer.statistics().pinned)
            (still,) = check_books(pair.exporter).owners
            assert (still.key, still.held_by) == (number, (0,))
        assert pinned == [(n,) for n in range(5)]
        del view
        await pair.exporter.drain()
        assert pair.consumer.statistics().pinned == ()


async def test_an_owner_that_is_dropped_while_viewed_is_released_with_the_view() -> None:
    """Kills: "dropped unread" said of an owner that was read, or said while a view lives."""
    async with open_pair() as pair:
        await pair.exporter.send({"x": SOURCE})
        view: Any = (await pair.consumer.receive())[0]["x"]
        await passes(5)
        assert check_books(pair.exporter).slots.held == 1
        assert pair.consumer.statistics().viewed == 1
        view = None
        await pair.exporter.drain()
        assert view is None
        assert pair.consumer.statistics().released == 1
        assert pair.exporter.statistics().refused == 0


async def test_a_released_owner_gives_no_more_views() -> None:
    """Kills: a view made of bytes that are another owner's by now."""
    async with open_pair() as pair:
        batch = await received(pair)
        owner = batch[0]
        before = owner.released
        view = owner["x"]
        for _ in range(2):  # again is a no-op
            owner.release()
            assert owner.released
            assert "released" in repr(owner)
            for use in (lambda: owner["x"], owner.clone, owner.items):
                with pytest.raises(asyncvmm.ReleasedError, match="'k'"):
                    use()
        assert not before
        del view
        await pair.exporter.drain()
        with pytest.raises(asyncvmm.ReleasedError):
            owner["x"]
        assert pair.exporter.statistics().consumers[0].stale == 0


# -- other threads -------------------------------------------------------------------------------


async def test_a_view_that_dies_in_another_thread_wakes_the_loop() -> None:
    """Nothing else happens on the loop meanwhile, so only that thread can have told it.

    Kills: a release that waits for the next thing that happens, and one sent from the wrong
    thread through a socket that the loop uses.
    """
    async with open_pair() as pair:
        views: list[Any] = [None]
        batch = await received(pair)
        views[0] = batch[0]["x"]
        batch.release()
        drained = asyncio.create_task(pair.exporter.drain())
        await passes(10)
        threading.Thread(target=views.clear).start()
        await drained
        check_all_back(pair.exporter)


@pytest.mark.slow
async def test_views_and_owners_may_die_anywhere_at_any_time() -> None:
    """1,000 owners, whose views die in four threads while the loop releases them.

    Kills: an owner that is released twice or never when its last view and its release meet.
    """
    work: list[list[Any]] = []
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set():
            try:
                work.pop().clear()
            except IndexError:
                stop.wait(0.0001)

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        async with open_pair(slots=8) as pair:
            for number in range(1000):
                batch = await received(pair)
                work.append([batch[0]["x"], batch[0]["x"][number % 7 :], batch[0]["y"]])
                if number % 3 == 0:
                    await passes(1)
                if number % 5 == 0:
                    work.append([batch])  # the batch itself dies there, its owner unreleased
                else:
                    batch.release()
                del batch
            await until(lambda: not work)
            await pair.exporter.drain()
            stats = check_all_back(pair.exporter)
            assert stats.acknowledged == 1000
            assert stats.consumers[0].stale == 0
            assert pair.consumer.statistics().held == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# -- after the consumer, and after its loop ------------------------------------------------------


@pytest.mark.parametrize("where", ["here", "thread"])
@pytest.mark.parametrize("forgotten", [False, True], ids=["consumer kept", "only the view kept"])
async def test_a_view_outlives_its_consumer(where: str, forgotten: bool) -> None:
    """The view stays readable, and its end gives the slot back, also if nothing else is kept.

    Kills: a lease that the garbage collector takes with the consumer, so that the slot is
    quarantined until the process ends; a mapping that goes with the consumer.
    """
    async with asyncvmm.open_exporter("@outlives", device="cpu", pool_bytes="64KiB") as exporter:
        ack = await exporter.send({"x": SOURCE}, key="k")
        consumers = []

        async def connect_and_leave() -> torch.Tensor:
            async with asyncvmm.connect("@outlives", device="cpu", rank=0) as consumer:
                if not forgotten:
                    consumers.append(consumer)
                with await consumer.receive() as batch:
                    return batch[0]["x"]

        views = [await connect_and_leave()]
        gc.collect()
        await passes(5)
        stats = check_books(exporter)
        assert (stats.slots.held, stats.slots.quarantined) == (1, 0)
        assert (stats.consumers[0].state, stats.consumers[0].holding) == ("closing", 1)
        for consumer in consumers:
            assert consumer.statistics().pinned == ("k",)
            assert consumer.statistics().state == "closed"
        assert torch.equal(views[0], SOURCE)
        if where == "thread":
            thread = threading.Thread(target=views.clear)
            thread.start()
            thread.join()
        views.clear()
        assert (await ack).released == (0,)
        await until(lambda: not exporter.statistics().consumers)
        check_all_back(exporter)
        for consumer in consumers:
            assert consumer.statistics().held == 0


async def test_the_seat_of_a_consumer_that_left_is_free_while_its_views_live() -> None:
    """Kills: a rank that cannot come back before the garbage of the one before it is gone."""
    async with open_pair() as pair:
        await pair.exporter.send({"x": SOURCE})
        view: Any = (await pair.consumer.receive())[0]["x"]
        await pair.consumer.aclose()
        async with asyncvmm.connect(pair.exporter.name, device="cpu", rank=0) as second:
            ack = await pair.exporter.send({"x": SOURCE + 1})
            async with await second.receive() as batch:
                assert batch[0]["x"][0] == 1
            await ack
        assert view[0] == 0
        view = None
        await pair.exporter.drain()
        assert view is None


AFTER_THE_LOOP = """
import asyncvmm

async def main():
    global view
    async with asyncvmm.connect("pool", device="cpu", rank=0, wait=True) as consumer:
        with await consumer.receive() as batch:
            view = batch[0]["words"]

run(main())
me = tell.__self__
me.tell("left", value=int(view[1]))
me.block("drop")
{drop}
me.tell("dropped")
me.block("end")
"""


@pytest.mark.parametrize(
    "drop",
    ["del view", "import threading; t = threading.Thread(target=globals().pop, args=('view',)); "
     "t.start(); t.join()"],
    ids=["here", "thread"],
)  # fmt: skip
async def test_a_view_outlives_its_event_loop(peers: Peers, drop: str) -> None:
    """In a process whose loop has ended, the thread that drops the view says so itself.

    Kills: a release that needs a loop, and one that only the end of the process replaces.
    """
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
        peer = peers.start(script=AFTER_THE_LOOP.format(drop=drop))
        sources = features(1, 0, 500)
        ack = await exporter.send(sources, key=1)
        assert await peer.at("left") == {"value": int(sources["words"][1])}
        assert check_books(exporter).slots.held == 1
        assert not ack.done()
        peer.go("drop")
        assert (await ack).released == (0,)
        await peer.at("dropped")
        peer.go("end")
        await until(lambda: not exporter.statistics().consumers)
        check_all_back(exporter)
        assert await peer.ends() == 0
        assert peer.printed == []


AT_EXIT = """
import asyncvmm

async def main():
    global consumer, batch, view
    connection = asyncvmm.connect("pool", device="cpu", rank=0, wait=True)
    consumer = await connection.__aenter__()
    batch = await consumer.receive()
    view = batch[0]["words"]
    if {close}:
        batch.release()
        await connection.__aexit__(None, None, None)

run(main())
"""


@pytest.mark.parametrize("close", [True, False], ids=["closed", "left open"])
async def test_a_process_may_end_with_views_in_globals(peers: Peers, close: bool) -> None:
    """Kills: a finaliser that prints, hangs or crashes while the interpreter goes down."""
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
        peer = peers.start(script=AT_EXIT.format(close=close))
        ack = await exporter.send(features(1, 0, 500), key=1, require="none")
        outcome = await ack
        assert set(outcome.released) | set(outcome.lost) == {0}
        await until(lambda: not exporter.statistics().consumers)
        check_all_back(exporter)
        assert await peer.ends() == 0
        assert peer.printed == []


# -- force, and debug ----------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
async def test_force_gives_back_at_once(debug: bool) -> None:
    """The view then shows what comes next, or poison in debug mode; it never crashes.

    Kills: a forced release that waits for views, that is said again when the view dies, or that
    leaves a freed chunk unpoisoned in debug mode.
    """
    async with open_pair(debug=debug, slots=2) as pair:
        batch = await received(pair)
        view: Any = batch[0]["x"]
        batch[0].release(force=True)
        assert batch[0].released
        with pytest.raises(asyncvmm.ReleasedError):
            batch[0]["x"]
        batch[0].release(force=True)
        batch[0].release()
        await pair.exporter.drain()
        check_all_back(pair.exporter)
        state = pair.consumer.statistics()
        assert (state.held, state.viewed, state.pinned) == (0, 0, ())
        poisoned = bool((view.view(torch.uint8) == POISON).all())
        assert poisoned is debug
        assert debug or torch.equal(view, SOURCE)
        await pair.exporter.send({"x": SOURCE + 9})
        assert torch.equal(view, SOURCE + 9)  # another owner's bytes, as force was warned about
        view = None
        with await pair.consumer.receive() as batch:
            assert torch.equal(batch[0]["x"], SOURCE + 9)
        await pair.exporter.drain()
        assert view is None
        stats = check_all_back(pair.exporter)
        assert stats.consumers[0].stale == 0
        assert pair.consumer.statistics().released == 2


async def test_force_after_an_ordinary_release_that_waits_for_a_view() -> None:
    """Kills: a force that does nothing because the owner was released already."""
    async with open_pair(debug=True) as pair:
        batch = await received(pair)
        view = batch[0]["x"]
        batch.release()
        await passes(5)
        assert check_books(pair.exporter).slots.held == 1
        batch[0].release(force=True)
        await pair.exporter.drain()
        assert view.view(torch.uint8)[0] == POISON


# -- writing -------------------------------------------------------------------------------------


async def test_writable_on_both_ends_is_shared_memory() -> None:
    """Kills: a writable pool that is mapped read-only, and a private copy on write."""
    async with open_pair(writable=True, consumers=2) as pair:
        await pair.exporter.send({"x": torch.zeros(100)})
        batches = [await consumer.receive() for consumer in pair.consumers]
        batches[0][0]["x"].add_(7)
        assert batches[1][0]["x"].sum() == 700
        for batch in batches:
            batch.release()


@pytest.mark.parametrize("exporter", [True, False])
async def test_writable_on_one_end_is_refused(exporter: bool) -> None:
    """Kills: a consumer that may write because only one side said so."""
    async with asyncvmm.open_exporter(
        "@writable", device="cpu", pool_bytes="64KiB", writable=exporter
    ) as opened:
        with pytest.raises(asyncvmm.HandshakeError, match=f"writable={not exporter}") as caught:
            await asyncvmm.connect(
                "@writable", device="cpu", rank=0, writable=not exporter
            ).__aenter__()
        assert caught.value.reason == "writable"
        async with asyncvmm.connect("@writable", device="cpu", rank=0, writable=exporter):
            await opened.wait_attached(1)


async def test_a_stray_write_ends_its_process_and_nobody_elses(peers: Peers) -> None:
    """Rank 0 writes into its view.  The exporter and rank 1 go on, over unchanged bytes.

    Kills: a pool that consumers can write, a private mapping in which the write succeeds, and a
    writer whose slot never comes back.
    """
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="64KiB", slots=2, route=asyncvmm.Broadcast(2)
    ) as exporter:
        writer, reader = peers.start(), peers.start()
        await writer.call(steps.connect, "pool", 0)
        await reader.call(steps.connect, "pool", 1)
        ack = await exporter.send(features(5, 0, 3000), metadata=note(5, 0, 3000), key=5)
        await writer.call(steps.take, 1)
        assert not ack.done()
        writer.begin(own_steps.write_into_a_view)
        await writer.died()
        assert writer.status() == -11  # SIGSEGV
        assert await reader.call(steps.take, 1) == [5]  # which checks every byte
        await reader.call(steps.give_back)
        with pytest.raises(asyncvmm.DeliveryError) as caught:
            await ack
        assert caught.value.outcome == asyncvmm.Outcome(released=(1,), lost=(0,))
        check_all_back(exporter)
        for owner in (6, 7, 8):
            ack = await exporter.send(features(owner, 0, 3000), metadata=note(owner, 0, 3000),
                                      key=owner, to=1)  # fmt: skip
            assert await reader.call(steps.take, 1) == [owner]
            await reader.call(steps.give_back)
            assert (await ack).complete


# -- streams -------------------------------------------------------------------------------------


async def test_every_stream_that_reads_waits_for_the_owner_and_is_waited_for() -> None:
    """Invariant 8, on a fake device: one wait per batch and stream, every time.

    Kills: waiting only the first time a slot is used, waiting again for each view, and a release
    that forgets a stream it was told of (field reports 17, 18).
    """
    device = FakeDevice()
    async with open_pair(port=FakePort(device), slots=1) as pair:
        for number in range(3):
            device.waits.clear()
            await pair.exporter.send({"x": SOURCE, "y": SOURCE})
            batch = await pair.consumer.receive()
            assert device.waits == []
            device.stream = 1
            batch[0]["x"], batch[0]["y"], batch[0].clone()
            device.stream = 2
            batch[0]["x"]
            assert device.waits == [(0, 1), (0, 2)]
            batch[0].record_stream(3)
            batch[0].release(stream=4)
            await pair.exporter.drain()
            releases = [fence for fence in device.fences if fence.kind == "release"]
            assert len(releases) == number + 1
            assert sorted(releases[-1].streams) == [1, 2, 3, 4]
        # An owner that nobody read has nothing to wait for.
        await pair.exporter.send({"x": SOURCE})
        (await pair.consumer.receive()).release()
        await pair.exporter.drain()
        assert len([fence for fence in device.fences if fence.kind == "release"]) == 3
