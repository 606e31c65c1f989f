"""Acknowledgements: what they answer, whom they wake, and that they need no timer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import Acknowledgement, DeliveryError, Outcome
from asyncvmm._consumer.lease import Lease
from asyncvmm._core.ledger import BatchRecord, Record
from asyncvmm._exporter.acknowledgement import Require
from asyncvmm._io import soon
from asyncvmm._io.fences import FenceWatcher
from asyncvmm._io.link import Link
from asyncvmm._io.soon import SoonFences
from asyncvmm.testing import FakeDevice, FakePort, open_pair
from tests.api.books import check_all_back, check_books, passes, until

ONE = torch.ones(3)


@contextmanager
def outstanding(match: str) -> Iterator[None]:
    """Expect the warning of an exporter that closes while owners are out."""
    with pytest.warns(asyncvmm.OwnersOutstandingWarning, match=match):
        yield


class Timers:
    """Counts the timers that are made on a loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.made: list[str] = []
        for name in ("call_later", "call_at"):
            self._count(monkeypatch, loop, name, getattr(loop, name))

    def _count(self, patch: pytest.MonkeyPatch, loop: object, name: str, real: Any) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.made.append(f"{name}{args}")
            return real(*args, **kwargs)

        patch.setattr(loop, name, counted)


# -- no timer, same turn -----------------------------------------------------------------------


@pytest.mark.parametrize("consumers", [1, 3])
async def test_the_waiter_runs_before_anything_scheduled_after_the_last_release(
    monkeypatch: pytest.MonkeyPatch, consumers: int
) -> None:
    """The waiter's step is queued while the packet with the last release is being read.

    Kills: an acknowledgement settled by ``call_soon``, by a task of its own, or by a timer.
    """
    order: list[str] = []
    deliver = Link._deliver

    def arrives(link: Link, *args: Any) -> None:
        before = exporter.statistics().acknowledged
        deliver(link, *args)
        if exporter.statistics().acknowledged > before:
            order.append("arrived")
            asyncio.get_running_loop().call_soon(order.append, "scheduled after")

    async def wait(ack: Acknowledgement) -> None:
        await ack
        order.append("waiter")

    async with open_pair(consumers=consumers) as pair:
        exporter = pair.exporter
        monkeypatch.setattr(Link, "_deliver", arrives)
        ack = await exporter.send({"x": ONE})
        waiters = [asyncio.create_task(wait(ack)) for _ in range(2)]
        for consumer in pair.consumers:
            (await consumer.receive()).release()
        await asyncio.gather(*waiters)
        await passes(2)
        monkeypatch.undo()
    assert order == ["arrived", "waiter", "waiter", "scheduled after"]


@pytest.mark.parametrize("by", ["loop", "thread"])
async def test_the_waiter_runs_in_the_turn_in_which_the_last_fence_is_told(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """With fences the acknowledgement waits for the last of them, and then for nothing else.

    Kills: settling when the release arrives although its fence is pending, settling after the
    first of two fences, and settling later than in the turn that tells of the last.
    """
    device = FakeDevice(hold_release=True)
    order: list[str] = []
    who, what = (SoonFences, "_turn") if by == "loop" else (FenceWatcher, "_on_wake")
    tell = getattr(who, what)

    def told(watcher: object) -> None:
        tell(watcher)
        if ack.done():
            order.append("told")
            asyncio.get_running_loop().call_soon(order.append, "scheduled after")

    monkeypatch.setattr(who, what, told)
    monkeypatch.setattr(soon, "SOON_SECONDS", 3600.0 if by == "loop" else 0.0)

    async def wait() -> None:
        await ack
        order.append("waiter")

    async with open_pair(consumers=2, port=FakePort(device)) as pair:
        ack = await pair.exporter.send({"x": ONE})
        waiter = asyncio.create_task(wait())
        for consumer in pair.consumers:
            with await consumer.receive() as batch:
                assert batch[0]["x"][0] == 1
        await until(lambda: pair.exporter.statistics().slots.draining == 1)
        first, last = device.pending("release")
        first.finish()
        seen = last.asked
        await until(lambda: last.asked > seen + 2)
        assert not ack.done()
        assert check_books(pair.exporter).slots.draining == 1
        last.finish()
        await waiter
        await passes(2)
        check_all_back(pair.exporter)
    assert order == ["told", "waiter", "scheduled after"]


@pytest.mark.parametrize("held", [False, True], ids=["host", "fences"])
async def test_no_timer_is_made_on_the_way(monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """Kills: polling an acknowledgement or a fence by ``call_later``."""
    device = FakeDevice(hold_release=held, hold_ready=held)
    async with open_pair(port=FakePort(device) if held else None) as pair:
        timers = Timers(monkeypatch)
        for _ in range(20):
            ack = await pair.exporter.send({"x": ONE})
            with await pair.consumer.receive() as batch:
                batch[0]["x"]
            if held:
                await until(lambda: bool(device.pending("release")))
                device.finish()
            await ack
        assert timers.made == []
        monkeypatch.undo()


async def test_a_slot_that_nobody_read_drains_until_the_producers_own_fence_is_done() -> None:
    """Invariant 4: what touched the bytes is the copy in as well as every read.

    A release behind a read stands for both, since the read waited for the copy.  Kills: freeing
    a slot that was released unread while the copy into it still runs.
    """
    device = FakeDevice(hold_ready=True)
    async with open_pair(port=FakePort(device)) as pair:
        ack = await pair.exporter.send({"x": ONE})
        with await pair.consumer.receive():
            pass
        (ready,) = device.pending()
        await until(lambda: ready.asked > 3)
        assert not ack.done()
        ready.finish()
        assert (await ack).complete


async def test_a_fence_that_fails_quarantines_the_slot_and_never_frees_it_by_guess() -> None:
    """Kills: taking an error from a fence for "done" (field report 43)."""
    device = FakeDevice(hold_release=True)
    with outstanding("1 owners still out"):
        async with open_pair(port=FakePort(device), slots=2, close_timeout=0.0) as pair:
            ack = await pair.exporter.send({"x": ONE})
            with await pair.consumer.receive() as batch:
                batch[0]["x"]
            await until(lambda: bool(device.pending()))
            device.pending()[0].fail(asyncvmm.BackendError("gone", call="cuEventQuery"))
            await until(lambda: check_books(pair.exporter).slots.quarantined == 1)
            assert not ack.done()
            # Nobody else is harmed.
            other = await pair.exporter.send({"x": ONE})
            with await pair.consumer.receive() as batch:
                batch[0]["x"]
            await until(lambda: len(device.pending()) == 2)
            device.pending()[1].finish()
            await other
            assert check_books(pair.exporter).slots.quarantined == 1
    with pytest.raises(asyncvmm.ClosedError):
        await ack


# -- what it answers ---------------------------------------------------------------------------


async def test_everybody_released() -> None:
    """Kills: an outcome that forgets a rank, and one that is there before the last rank."""
    async with open_pair(consumers=3) as pair:
        ack = await pair.exporter.send({"x": ONE}, key="mine")
        assert ack.key == "mine"
        assert "pending" in repr(ack)
        with pytest.raises(asyncio.InvalidStateError, match="mine"):
            ack.result()
        for consumer in pair.consumers:
            assert not ack.done()
            assert ack.outcome is None
            (await consumer.receive()).release()
            await passes(5)
        outcome = await ack
        assert sorted(outcome.released) == [0, 1, 2]
        assert outcome.complete
        assert ack.done()
        assert ack.result() == ack.outcome == outcome
        assert await ack == outcome  # again


@pytest.mark.parametrize(
    ("require", "releasing", "raises"),
    [
        ("all", 2, False),
        ("all", 1, True),
        ("all", 0, True),
        ("any", 2, False),
        ("any", 1, False),
        ("any", 0, True),
        ("none", 0, False),
    ],
)
async def test_what_is_required(require: Require, releasing: int, raises: bool) -> None:
    """Kills: each of the three words taken for another, and a refusal that counts as a release."""
    async with open_pair(consumers=2) as pair:
        ack = await pair.exporter.send({"x": ONE}, key="k", require=require)
        for rank, consumer in enumerate(pair.consumers):
            batch = await consumer.receive()
            if rank < releasing:
                batch.release()
            del batch  # dropped unread: refused
        if raises:
            with pytest.raises(DeliveryError, match=f"'k': {releasing} released it") as caught:
                await ack
            outcome = caught.value.outcome
            with pytest.raises(DeliveryError):
                ack.result()
            with pytest.raises(DeliveryError):
                await ack
        else:
            outcome = await ack
        assert isinstance(outcome, Outcome)
        assert outcome == ack.outcome
        assert outcome.released == tuple(range(releasing))
        assert outcome.refused == tuple((rank, "dropped unread") for rank in range(releasing, 2))
        assert outcome.complete is (releasing == 2)
        stats = check_all_back(pair.exporter)
        assert stats.acknowledged == 1
        assert stats.refused == 2 - releasing


def all_done(acks: list[Acknowledgement]) -> bool:
    return all(ack.done() for ack in acks)


async def test_every_way_out_of_receiving_settles() -> None:
    """Field report 1: ten rounds of the whole pool, left in every way there is.

    Kills: a release tied to reading instead of receiving.
    """

    async def drop(batch: asyncvmm.Batch) -> None:
        del batch

    async def fail(batch: asyncvmm.Batch) -> None:
        async with batch:
            raise ZeroDivisionError

    async def fail_with_view(batch: asyncvmm.Batch) -> None:
        with batch[0] as owner:
            owner["x"]
            raise ZeroDivisionError

    async def be_cancelled(batch: asyncvmm.Batch) -> None:
        me = asyncio.current_task()
        assert me is not None
        me.cancel()
        with batch:
            await asyncio.sleep(0)

    async def read(batch: asyncvmm.Batch) -> None:
        assert batch[0]["x"][0] == 1

    async with open_pair(slots=4) as pair:
        for round_ in range(10):
            for way in (drop, fail, fail_with_view, be_cancelled, read):
                acks = [await pair.exporter.send({"x": ONE}) for _ in range(4)]
                for _ in acks:
                    task = asyncio.create_task(way(await pair.consumer.receive()))
                    await asyncio.wait([task])
                    if not task.cancelled():
                        task.exception()
                    del task
                await until(partial(all_done, acks), f"{way} in {round_}")
                check_all_back(pair.exporter)
                outcomes = [ack.outcome for ack in acks]
                refused = way is drop
                assert all(o is not None and o.complete is not refused for o in outcomes), way


async def test_an_exporter_that_closes_answers_every_acknowledgement() -> None:
    """Kills: an awaited acknowledgement that hangs after its exporter is gone."""
    acks = []
    waiters = []

    async def fail_inside() -> None:
        async with open_pair(route=asyncvmm.Broadcast(2)) as pair:
            acks.append(await pair.exporter.send({"x": ONE}))
            waiters.append(asyncio.ensure_future(outcome_of(acks[0])))
            await passes(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    assert isinstance(await waiters[0], asyncvmm.ClosedError)
    with pytest.raises(asyncvmm.ClosedError, match="before everybody let go"):
        acks[0].result()


async def outcome_of(ack: Acknowledgement) -> object:
    try:
        return await ack
    except asyncvmm.AsyncVMMError as error:
        return error


async def test_owners_nobody_came_for_are_refused_by_name_when_the_exporter_closes() -> None:
    """Kills: an acknowledgement of an owner that waited for an absent rank left unanswered."""
    with outstanding("waiting for consumers 1"):
        async with open_pair(route=asyncvmm.Broadcast(2), close_timeout=0.0) as pair:
            ack = await pair.exporter.send({"x": ONE})
            (await pair.consumer.receive()).release()
            await until(lambda: pair.exporter.statistics().owners[0].held_by == ())
    with pytest.raises(DeliveryError) as caught:
        await ack
    assert caught.value.outcome == Outcome(
        released=(0,), refused=((1, "nobody came for it"),), lost=()
    )


# -- several waiters, cancelled waiters --------------------------------------------------------


async def test_many_may_wait_and_cancelling_one_changes_nothing_for_the_others() -> None:
    """Kills: waiters that share one future, of which a cancelled waiter is the end for all."""
    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": ONE})
        waiters = [asyncio.create_task(outcome_of(ack)) for _ in range(10)]
        await passes(2)
        for waiter in waiters[::2]:
            waiter.cancel()
        await passes(2)
        assert [waiter.cancelled() for waiter in waiters] == [True, False] * 5
        assert not ack.done()
        (await pair.consumer.receive()).release()
        outcomes = await asyncio.gather(*waiters[1::2])
        assert all(outcome == ack.outcome for outcome in outcomes)


async def test_waiters_that_gave_up_leave_nothing_behind() -> None:
    """Kills: a list of futures that grows with every timeout somebody puts around an await."""
    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": ONE})
        for _ in range(100):
            waiter = asyncio.create_task(outcome_of(ack))
            await passes(1)
            waiter.cancel()
            await passes(2)
        assert not ack._waiters
        (await pair.consumer.receive()).release()
        await ack


async def test_nothing_of_an_owner_is_kept_after_it_is_back() -> None:
    """The garbage collector has nothing to do with it, so it is off.

    Kills: a record that is kept after its owner is back, or that is part of a circle.
    """
    async with open_pair() as pair:
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await pair.exporter.send({"x": ONE})
                (await pair.consumer.receive()).release()
            last = await pair.exporter.send({"x": ONE})
            (await pair.consumer.receive()).release()
            await last
            kept = [o for o in gc.get_objects() if type(o) in (Record, BatchRecord, Lease)]
            assert len(kept) == 1
            assert kept[0] is last._record
        finally:
            gc.enable()
        assert check_all_back(pair.exporter).acknowledged == 21


@pytest.mark.parametrize("how", ["back", "awaited", "outstanding"])
async def test_an_acknowledgement_keeps_nothing_of_an_exporter_that_is_closed(how: str) -> None:
    """Kills: one that knows its exporter's waits, and by them all of its books, for ever."""

    device = FakeDevice(hold_release=how == "outstanding")

    async def closed() -> tuple[Acknowledgement, weakref.ref[object]]:
        async with open_pair(port=FakePort(device), close_timeout=0) as pair:
            ack = await pair.exporter.send({"x": ONE})
            waiting = asyncio.create_task(outcome_of(ack))
            await passes(1)
            with await pair.consumer.receive() as batch:
                batch[0]["x"]
            if how == "outstanding":
                waiting.cancel()
            else:
                await (pair.exporter.drain() if how == "back" else waiting)
            return ack, weakref.ref(pair.exporter._core)

    with outstanding("1 owner") if how == "outstanding" else nullcontext():
        ack, core = await closed()

    def collected() -> bool:
        gc.collect()
        return core() is None

    await until(collected)  # a thread that asked for fences may have its last frame still
    assert ack.done()
