"""Cancellation anywhere, always: no slot, no byte, no batch and no wake-up is lost.

Field reports 20, 28 and 35.  Cancels are placed by counting loop passes, so that over the rounds
they fall on every await there is; where threads are involved, on random ones.  Each test says how
many cancels were delivered, which together are more than ten thousand; ``cancel()`` counts as
delivered when the task was not done yet, and then the task must end as cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest
import torch

import asyncvmm
from asyncvmm import Acknowledgement, Batch, Consumer, Exporter, TensorSpec
from asyncvmm._tensors.host import OFFLOAD_BYTES, HostPort
from asyncvmm._tensors.plan import Plan
from asyncvmm.testing import Counters, open_pair
from tests.api.books import check_all_back, check_books, check_no_sleeper, passes, until

SMALL = torch.arange(64, dtype=torch.uint8)
LARGE = torch.arange(OFFLOAD_BYTES + 64, dtype=torch.int64).to(torch.uint8)  # copied in a thread

SIZES = pytest.mark.parametrize("tensor", [SMALL, LARGE], ids=["small", "large"])


class Cancels:
    """Counts the cancels that were delivered, and checks that none is swallowed."""

    def __init__(self) -> None:
        self.delivered = 0

    def cancel(self, task: asyncio.Task[Any]) -> bool:
        """Cancel a task; True if that reached it."""
        hit = task.cancel()
        self.delivered += hit
        return hit

    async def after(self, count: int, task: asyncio.Task[Any]) -> bool:
        """Let the loop go round ``count`` times, cancel, wait for the end; True if it was hit."""
        await passes(count)
        hit = self.cancel(task)
        await asyncio.wait([task])
        assert task.cancelled() is hit, f"a cancel was swallowed by {task}"
        return hit


def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


class Reader:
    """Receives whatever is published, checks its order and content, and lets go of it."""

    def __init__(self, consumer: Consumer, tensor: torch.Tensor) -> None:
        self.keys: list[object] = []
        self.paused = False
        self.waiting: deque[Batch] = deque()
        self._tensor = tensor
        self._consumer = consumer
        self._task = start(self._read())

    async def _read(self) -> None:
        async for batch in self._consumer:
            self.keys += [owner.key for owner in batch]
            assert all(torch.equal(owner["x"], self._tensor) for owner in batch)
            self.waiting.append(batch)
            del batch
            if not self.paused:
                self.let_go()

    def let_go(self) -> None:
        """Release everything that is held."""
        while self.waiting:
            self.waiting.popleft().release()

    async def stop(self) -> None:
        self.let_go()
        self._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._task


# -- send --------------------------------------------------------------------------------------


@SIZES
@pytest.mark.slow
async def test_send_cancelled_after_every_number_of_passes(tensor: torch.Tensor) -> None:
    """Room is there, so only the copy can be met.  300 cancels each.

    Kills: a chunk kept by a send that was cancelled, and one published all the same.
    """
    cancels = Cancels()
    async with open_pair(pool_bytes="8MiB", slots=4) as pair:
        exporter, reader = pair.exporter, Reader(pair.consumer, tensor)
        sent: list[int] = []
        for number in range(100_000):
            count = 0 if tensor is SMALL else number % 12
            if not await cancels.after(count, start(exporter.send({"x": tensor}, key=number))):
                sent.append(number)
            assert check_books(exporter).published == len(sent)
            if cancels.delivered == 300:
                break
        ack = await exporter.send({"x": tensor}, key="last")
        assert (await ack).complete
        await exporter.drain()
        assert reader.keys == [*sent, "last"]
        await until(lambda: exporter.statistics().used_bytes == 0)
        check_all_back(exporter)
        await reader.stop()


@SIZES
@pytest.mark.parametrize("first", ["cancel", "room"])
@pytest.mark.slow
async def test_send_cancelled_around_the_moment_its_room_appears(
    tensor: torch.Tensor, first: str
) -> None:
    """Five wait for a full pool; the head, or one behind it, is cancelled around its wake-up.

    For every distance in passes, the cancel before the room and after it.  100 cancels each.

    Kills: a waiter that was woken and then cancelled and keeps the room, or does not wake the
    next one; a waiter that is passed over although its room is there (field report 28).
    """
    cancels = Cancels()
    rounds = 0
    async with open_pair(pool_bytes=2 * LARGE.nbytes + 4096, slots=2) as pair:
        exporter, reader = pair.exporter, Reader(pair.consumer, tensor)
        while cancels.delivered < 100:
            rounds += 1
            distance, victim, both = rounds % 7, rounds % 3, rounds % 2
            reader.paused = True
            held = [await exporter.send({"x": tensor}, key="held") for _ in range(2)]
            await until(lambda: len(reader.waiting) == 2)
            tasks = [start(exporter.send({"x": tensor}, key=n)) for n in range(5)]
            await passes(2)
            assert check_books(exporter).waiting == 5
            if first == "room":
                reader.waiting.popleft().release()
                if both:
                    reader.let_go()
                await passes(distance)
                hit = cancels.cancel(tasks[victim])
            else:
                hit = cancels.cancel(tasks[victim])
                await passes(distance)
                reader.waiting.popleft().release()
                if both:
                    reader.let_go()
            for _ in range(6):
                check_books(exporter)
                check_no_sleeper(exporter)
                await passes(1)
            reader.paused = False
            reader.let_go()
            done, _ = await asyncio.wait(tasks)
            assert tasks[victim].cancelled() is hit
            acks = [task.result() for task in done if not task.cancelled()]
            assert len(acks) == 5 - hit
            for ack in [*held, *acks]:
                await ack
            await until(lambda: exporter.statistics().used_bytes == 0)
            check_all_back(exporter)
        expected = [key for key in range(5) if key != victim or not hit]
        order = reader.keys[-len(expected) :]
        if tensor is LARGE:  # two copies run at once, and whichever ends first is published first
            order.sort(key=str)
        assert order == expected  # first come, first served
        await reader.stop()


class Gated(HostPort):
    """Host memory into which copies go only while the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)

    def copy_in(self, address: int, plan: Plan, stream: int) -> None:
        self.begun.release()
        assert self.gate.wait(30)
        super().copy_in(address, plan, stream)


async def test_a_send_cancelled_in_its_copy_ends_at_once_and_its_slot_only_later() -> None:
    """Field report 20: "I stop caring" is not "nothing touches it any more".

    Kills: a chunk handed to the next send while a cancelled one still copies into it, and a
    cancelled send that waits for its copy.
    """
    port = Gated()
    async with open_pair(port=port, pool_bytes=LARGE.nbytes, slots=2) as pair:
        exporter = pair.exporter
        port.gate.clear()
        task = start(exporter.send({"x": torch.zeros_like(LARGE)}, key="cancelled"))
        await asyncio.to_thread(port.begun.acquire)
        task.cancel()
        await passes(1)
        assert task.cancelled()
        stats = check_books(exporter)
        assert (stats.slots.draining, stats.slots.free, stats.published) == (1, 1, 0)
        following = start(exporter.send({"x": LARGE}, key="following"))
        await passes(20)
        assert check_books(exporter).waiting == 1
        assert exporter._draining.copying
        port.gate.set()
        ack = await following
        async with await pair.consumer.receive() as batch:
            assert batch[0].key == "following"
            assert torch.equal(batch[0]["x"], LARGE)
        await ack
        assert not exporter._draining.copying
        check_all_back(exporter)


async def test_a_copy_that_fails_after_its_send_was_cancelled_gives_the_chunk_back_too() -> None:
    """Kills: a slot that drains for ever because its last fence ended with an exception."""

    class Failing(Gated):
        def copy_in(self, address: int, plan: Plan, stream: int) -> None:
            super().copy_in(address, plan, stream)
            raise ZeroDivisionError

    port = Failing()
    async with open_pair(port=port, pool_bytes=LARGE.nbytes, slots=2) as pair:
        port.gate.clear()
        task = start(pair.exporter.send({"x": LARGE}))
        await asyncio.to_thread(port.begun.acquire)
        task.cancel()
        await passes(2)
        assert check_books(pair.exporter).slots.draining == 1
        port.gate.set()
        await until(lambda: pair.exporter.statistics().slots.free == 2)
        check_all_back(pair.exporter)


# -- reserve -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_reserve_cancelled_after_every_number_of_passes() -> None:
    """On entering, inside and on leaving the block, with and without room.  1,000 cancels.

    Kills: a loan that ends twice or never (inv. 3), and an owner published by a cancelled block.
    """
    cancels = Cancels()
    published: list[int] = []
    spec = {"x": TensorSpec(tuple(SMALL.shape), SMALL.dtype)}

    async def fill(number: int) -> None:
        async with exporter.reserve(spec, key=number) as owner:
            await passes(number % 3)
            owner["x"].copy_(SMALL)
            await passes(number % 2)
            if number % 5:
                owner.publish()
                published.append(number)
            await passes(number % 4)

    async with open_pair(slots=2) as pair:
        exporter, reader = pair.exporter, Reader(pair.consumer, SMALL)
        number = 0
        while cancels.delivered < 1000:
            number += 1
            # Every second time with a full pool, whose owners are let go at some point.
            reader.paused = number % 2 == 0
            tasks = [start(fill(number * 10 + n)) for n in range(1 + number % 4)]
            await passes(number % 11)
            cancels.cancel(tasks[number % len(tasks)])
            check_books(exporter)
            check_no_sleeper(exporter)
            await passes(number % 3)
            reader.paused = False
            reader.let_go()
            await asyncio.wait(tasks)
            assert all(task.cancelled() or task.exception() is None for task in tasks)
            check_books(exporter)
            check_no_sleeper(exporter)
        await exporter.drain()
        assert reader.keys == published
        check_all_back(exporter)
        await reader.stop()


# -- receive -----------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [asyncvmm.Broadcast(1), asyncvmm.Compete()], ids=str)
@pytest.mark.slow
async def test_receive_cancelled_around_the_arrival_of_a_batch(route: asyncvmm.Broadcast) -> None:
    """Three receive, one is cancelled some passes before or after a batch was sent.

    800 cancels each.

    Kills: a batch that goes down with the receiver that was woken for it, a wake-up that is not
    passed on, and an order that changes.
    """
    cancels = Cancels()
    async with open_pair(route=route, slots=8) as pair:
        exporter, consumer = pair.exporter, pair.consumer
        got: list[object] = []

        async def receive() -> None:
            async with await consumer.receive() as batch:
                got.append(batch[0].key)

        receivers = [start(receive()) for _ in range(3)]
        number = 0
        while cancels.delivered < 800:
            victim = receivers[number % 3]
            if number % 2:
                await exporter.send({"x": SMALL}, key=number)
                await passes(number // 2 % 9)
                cancels.cancel(victim)
            else:
                cancels.cancel(victim)
                await passes(number // 2 % 4)
                await exporter.send({"x": SMALL}, key=number)
            number += 1
            await passes(1)
            check_books(exporter)
            for at, task in enumerate(receivers):
                if task.done():
                    assert task.cancelled() or task.exception() is None
                    receivers[at] = start(receive())
        for task in receivers:
            task.cancel()
        await passes(2)
        while len(got) < number:
            await receive()
        assert got == list(range(number))
        assert consumer.statistics().unread == 0
        assert consumer.statistics().waiting == 0
        await exporter.drain()
        check_all_back(exporter)


async def test_the_next_receiver_is_woken_in_place_of_a_cancelled_one() -> None:
    """Kills: a receiver that sleeps although a batch is there, because the wake-up for it went
    to a receiver that was cancelled in the same turn (inv. 9).
    """
    async with open_pair() as pair:
        consumer = pair.consumer
        first, second = start(consumer.receive()), start(consumer.receive())
        await passes(2)
        wake = consumer._wake

        def wake_and_cancel(count: int = 1) -> None:
            wake(count)
            if not first.done():
                first.cancel()

        consumer._wake = wake_and_cancel  # type: ignore[method-assign]  # to meet the very moment
        await pair.exporter.send({"x": SMALL}, key="x")
        batch = await second
        assert first.cancelled()
        assert batch[0].key == "x"
        batch.release()


# -- acknowledgements, drain, wait_attached ----------------------------------------------------


@pytest.mark.slow
async def test_waiters_of_acknowledgements_cancelled_around_the_release() -> None:
    """Three await one acknowledgement, one of them is cancelled.  800 cancels.

    Kills: an outcome that travels in the future of a waiter that was cancelled.
    """
    cancels = Cancels()

    async def wait(ack: Acknowledgement) -> asyncvmm.Outcome:
        return await ack

    async with open_pair() as pair:
        number = 0
        while cancels.delivered < 800:
            number += 1
            ack = await pair.exporter.send({"x": SMALL})
            batch = await pair.consumer.receive()
            waiters = [start(wait(ack)) for _ in range(3)]
            await passes(number % 3)
            if number % 2:
                batch.release()
            await passes(number % 5)
            hit = cancels.cancel(waiters[number % 3])
            batch.release()
            await asyncio.wait(waiters)
            outcomes = [waiter.result() for waiter in waiters if not waiter.cancelled()]
            assert len(outcomes) == 3 - hit
            assert (await ack).released == (0,)
            check_books(pair.exporter)
        check_all_back(pair.exporter)


async def second_attached(exporter: Exporter) -> None:
    """Wait for a consumer that never comes; asked for openly, one seat too many is refused."""
    await exporter._connections.wait_attached(2, exporter._guard)


async def test_drain_and_wait_attached_may_be_cancelled() -> None:
    """Kills: a second drainer that is never woken because the first was cancelled."""
    cancels = Cancels()
    async with open_pair() as pair:
        for number in range(50):
            ack = await pair.exporter.send({"x": SMALL})
            drains = [start(pair.exporter.drain()) for _ in range(3)]
            attached = [start(second_attached(pair.exporter)) for _ in range(2)]
            await passes(number % 3)
            cancels.cancel(drains[0])
            cancels.cancel(attached[0])
            (await pair.consumer.receive()).release()
            await asyncio.wait(drains)
            assert ack.done()
            assert [drain.cancelled() for drain in drains] == [True, False, False]
            await cancels.after(0, attached[1])
        assert cancels.delivered == 150


# -- opening and connecting --------------------------------------------------------------------


@pytest.mark.slow
async def test_connect_cancelled_after_every_number_of_passes() -> None:
    """A rank whose consumer was cancelled while it came is free again.  150 cancels.

    Kills: a seat, a descriptor or a mapping kept by a handshake that never ended.
    """
    cancels = Cancels()

    async def come_and_go() -> None:
        async with asyncvmm.connect("@cancel-connect", device="cpu", rank=0) as consumer:
            (await consumer.receive()).release()

    async with asyncvmm.open_exporter(
        "@cancel-connect", device="cpu", pool_bytes="1MiB", slots=4
    ) as exporter:
        generator = random.Random(1)
        acks: deque[Acknowledgement] = deque()
        while cancels.delivered < 150:
            if not acks:
                acks.append(await exporter.send({"x": SMALL}))
            task = start(come_and_go())
            count = generator.randrange(400)
            for _ in range(count):
                if task.done():
                    break
                await passes(1)
            await cancels.after(0, task)
            if not task.cancelled():
                task.result()
            check_books(exporter)
            # The one that leaves may still be on its way out, for nothing tells us when it is.
            await until(lambda: not exporter.statistics().consumers, "the seat is free")
            while acks and acks[0].done():
                acks.popleft()
        if acks:
            await come_and_go()
        await exporter.send({"x": SMALL})
        await come_and_go()
        await until(lambda: exporter.statistics().used_bytes == 0)
        check_all_back(exporter)


@pytest.mark.slow
async def test_open_exporter_cancelled_after_every_number_of_passes() -> None:
    """A name whose exporter was cancelled on its way in or out is free again.  100 cancels.

    Kills: a pool, a socket or a name kept by an exporter that never opened.
    """
    cancels = Cancels()

    async def open_and_send() -> None:
        async with (
            asyncvmm.open_exporter(
                "@cancel-open", device="cpu", pool_bytes="64KiB", slots=4
            ) as exporter,
            asyncvmm.connect("@cancel-open", device="cpu", rank=0) as consumer,
        ):
            await exporter.send({"x": SMALL})
            (await consumer.receive()).release()

    generator = random.Random(2)
    while cancels.delivered < 100:
        task = start(open_and_send())
        for _ in range(generator.randrange(1000)):
            if task.done():
                break
            await passes(1)
        await cancels.after(0, task)
        if not task.cancelled():
            task.result()
    await open_and_send()


# -- everything at once ------------------------------------------------------------------------


class Storm:
    """Tasks that send, reserve, receive and wait at random, and are cancelled at random."""

    def __init__(self, exporter: Exporter, consumers: tuple[Consumer, ...], seed: int) -> None:
        self.cancels = Cancels()
        self.random = random.Random(seed)
        self.exporter = exporter
        self.consumers = consumers
        self.published = 0
        self.got: list[list[object]] = [[] for _ in consumers]
        self.acks: list[Acknowledgement] = []
        self._spec = {"x": TensorSpec(tuple(SMALL.shape), SMALL.dtype)}

    async def act(self) -> None:
        """Do one thing of each kind, as often as it takes to be cancelled or done."""
        choice = self.random.randrange(8)
        if choice < 2:
            self.note(await self.exporter.send({"x": SMALL}))
        elif choice == 2:
            self.note(await self.exporter.send({"x": LARGE}))
        elif choice == 3:
            with contextlib.suppress(asyncvmm.WouldBlock):
                self.note(await self.exporter.send_nowait({"x": SMALL}))
        elif choice == 4:
            async with self.exporter.reserve(self._spec) as owner:
                owner["x"].copy_(SMALL)
                await passes(self.random.randrange(3))
                self.note(owner.publish())
        elif choice < 7 or not self.acks:
            await self.receive(self.random.randrange(len(self.consumers)))
        else:
            await self.random.choice(self.acks)

    def note(self, ack: Acknowledgement) -> None:
        self.published += 1
        self.acks = [*self.acks[-20:], ack]

    async def receive(self, at: int) -> None:
        batch = await self.consumers[at].receive()
        self.got[at].append(batch[0].key)
        try:
            view = batch[0]["x"]
            assert torch.equal(view, SMALL if view.shape == SMALL.shape else LARGE)
            del view
            await passes(self.random.randrange(4))
        finally:
            batch.release()

    async def empty(self) -> None:
        """Receive what is left."""
        while min(len(got) for got in self.got) < self.published:
            for at, got in enumerate(self.got):
                if len(got) < self.published:
                    await self.receive(at)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.slow
async def test_a_storm_of_everything_cancelled_at_random(seed: int) -> None:
    """Fifty tasks over a pool of six slots, the books checked after every step.

    1,500 cancels each.  The test itself awaits none of them: it replaces them, and with six slots
    every one of fifty may wait for what only their successors do.

    Kills: whatever the tests above miss because only one thing at a time was cancelled.
    """
    async with open_pair(consumers=2, pool_bytes=3 * LARGE.nbytes, slots=6) as pair:
        storm = Storm(pair.exporter, pair.consumers, seed)
        tasks = {start(storm.act()) for _ in range(50)}
        while storm.cancels.delivered < 1500:
            await passes(storm.random.randrange(3))
            for victim in storm.random.sample(sorted(tasks, key=id), 4):
                storm.cancels.cancel(victim)
            check_books(pair.exporter)
            check_no_sleeper(pair.exporter)
            await passes(1)
            for task in [task for task in tasks if task.done()]:
                if not task.cancelled():
                    task.result()
                tasks.discard(task)
                tasks.add(start(storm.act()))
            if storm.random.random() < 0.1:
                await passes(30)  # a lull, in which some come to their end
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        check_no_sleeper(pair.exporter)
        stats = check_books(pair.exporter)
        assert stats.waiting == 0
        assert stats.published == storm.published > 50
        await storm.empty()
        await until(lambda: pair.exporter.statistics().used_bytes == 0)
        check_all_back(pair.exporter)
        assert storm.got[0] == storm.got[1] == list(range(storm.published))


@pytest.mark.slow
async def test_timeouts_near_the_grant() -> None:
    """Field report 28: fifty waiters under ``timeout`` and ``wait_for`` with almost no time.

    About 600 timeouts.  Kills: room that is granted and thrown away by a timeout wrapper.
    """
    generator = random.Random(3)
    expired = granted = 0

    async def send(number: int) -> None:
        nonlocal expired, granted
        patience = generator.choice([0.0, 1e-5, 1e-4, 1e-3])
        try:
            if number % 2:
                async with asyncio.timeout(patience):
                    await pair.exporter.send({"x": SMALL})
            else:
                await asyncio.wait_for(pair.exporter.send({"x": SMALL}), patience)
        except TimeoutError:
            expired += 1
        else:
            granted += 1

    async with open_pair(slots=2) as pair:
        reader = Reader(pair.consumer, SMALL)
        while expired < 600 or granted < 50:
            sends = [start(send(number)) for number in range(50)]
            while not all(task.done() for task in sends):
                check_books(pair.exporter)
                check_no_sleeper(pair.exporter)
                await passes(1)
            for task in sends:
                task.result()
        await pair.exporter.drain()
        check_all_back(pair.exporter)
        assert len(reader.keys) == pair.exporter.statistics().published
        await reader.stop()


@pytest.mark.slow
async def test_cancels_never_break_the_framing() -> None:
    """Field report 35: socket buffers for a few packets, descriptors on the way, 400 cancels.

    The pool grows and shrinks meanwhile, so that messages with descriptors are among the others.

    Kills: a packet that a cancelled send or receive leaves half written or half read, a message
    without its descriptor, and a queue of unsent messages that grows with every cancel.
    """
    cancels = Cancels()
    async with open_pair(
        pool_bytes="64KiB", max_pool_bytes="512KiB", slots=64, shrink_after=0.0
    ) as pair:
        exporter, reader = pair.exporter, Reader(pair.consumer, torch.arange(9_000))
        (connection,) = exporter._connections.open.values()
        for link in (connection.link, pair.consumer._link):
            link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_608)
        generator = random.Random(4)
        loop, reading = asyncio.get_running_loop(), pair.consumer._link
        most = blocked = 0
        tasks: set[asyncio.Task[Any]] = set()
        tensor = {"x": torch.arange(9_000)}

        async def settle() -> None:
            loop.add_reader(reading._fd, reading._on_readable)
            reader.paused = False
            reader.let_go()
            if tasks:
                await asyncio.wait(tasks)
            await exporter.drain()

        while cancels.delivered < 400 or blocked <= 20:  # else the socket was never full
            settles = generator.random() < 0.05
            if settles:  # while somebody waits it does not shrink
                await settle()
                await until(lambda: exporter.statistics().segments == 1)
            loop.remove_reader(reading._fd)
            # So that the kernel takes few packets, and none once the pool has grown for them.
            tasks |= {start(exporter.send(tensor, metadata="m" * 3_000)) for _ in range(4)}
            if settles:
                tasks |= {start(exporter.send(tensor, metadata="m" * 3_000)) for _ in range(4)}
                await until(lambda: connection.link._blocked)
            await passes(generator.randrange(5))
            blocked += connection.link._blocked
            cancels.cancel(generator.choice(sorted(tasks, key=id)))
            (numbers,) = check_books(exporter).consumers
            most = max(most, numbers.queued)
            if generator.random() < 0.6:
                loop.add_reader(reading._fd, reading._on_readable)
                await passes(generator.randrange(20))
            reader.paused = generator.random() < 0.7
            if not reader.paused:
                reader.let_go()
            tasks = {task for task in tasks if not task.done()}
        await settle()
        stats = exporter.statistics()
        assert stats.grown > 1
        assert stats.shrunk > 0
        assert most <= 64 + stats.grown + stats.shrunk
        assert reader.keys == list(range(stats.published))
        await reader.stop()


@pytest.mark.parametrize("orderly", [False, True], ids=["error", "orderly"])
async def test_an_exporter_is_closed_though_every_task_of_the_loop_is_cancelled(
    orderly: bool,
) -> None:
    """As ``asyncio.run`` does when a task exits; the name, the memory and the link are all back.

    Kills: closing in a task that may be cancelled before it begins, or in its middle.
    """

    def held() -> tuple[object, int]:
        counters = Counters.of()
        return counters.descriptors, counters.mappings

    for count in range(1, 9):
        before = held()
        opening = asyncvmm.open_exporter("@every-task", device="cpu", pool_bytes="64KiB")
        exporter = await opening.__aenter__()
        consumer = await asyncvmm.connect("@every-task", device="cpu", rank=0).__aenter__()
        await exporter.send({"x": SMALL})
        (await consumer.receive()).release()
        error = None if orderly else ZeroDivisionError()
        closing = start(opening.__aexit__(error and type(error), error, None))
        await passes(count)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([closing])
        with pytest.raises((asyncvmm.EndOfStream, asyncvmm.PeerLostError)):
            await consumer.receive()
        await consumer.aclose()
        del exporter, consumer, opening, closing, error
        if held() != before:
            gc.collect()
        assert held() == before


@pytest.mark.parametrize("viewed", [False, True])
async def test_what_comes_while_a_consumer_hangs_up_at_once_is_refused(viewed: bool) -> None:
    """Though its process lives on; what it views is its own, until the view is gone.

    Kills: what it never read is quarantined until the process ends.
    """
    async with open_pair(slots=2) as pair:
        acks, views = [], []
        if viewed:
            acks.append(await pair.exporter.send({"x": SMALL}))
            views.append((await pair.consumer.receive())[0]["x"])
        late = await pair.exporter.send({"x": SMALL}, require="none")
        with anyio.CancelScope() as scope:  # which lets nothing be awaited any more
            scope.cancel()
            await pair.consumer.aclose()
        if viewed:
            assert torch.equal(views[0], SMALL)
            views.clear()
            assert (await acks[0]).complete
        assert [rank for rank, _ in (await late).refused] == [0]
        assert pair.exporter.statistics().slots.free == 2


async def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    """A program may look every second, for days, whether the pool is idle or a rank is there.

    Kills: wake-ups that are kept for those who wait no more, until there is something to tell.
    """

    async def give_up(wait: Coroutine[Any, Any, Any]) -> None:
        task = start(wait)
        await passes(2)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    def wake_ups() -> int:
        return sum(issubclass(type(each), asyncio.Future) for each in gc.get_objects())

    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": SMALL})
        before = wake_ups()
        for _ in range(20):
            await give_up(pair.exporter.drain())
            await give_up(second_attached(pair.exporter))
        assert wake_ups() - before < 20
        (await pair.consumer.receive()).release()
        await ack
        await pair.exporter.drain()
