"""The pool bounds memory: who waits, for how long, in which order, and that it shows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import Batch, TensorSpec, WouldBlock
from asyncvmm._backends.base import ExporterRegion
from asyncvmm._backends.memfd import HostExporterRegion
from asyncvmm._exporter.elastic import Elastic
from asyncvmm._fds import OwnedFd
from asyncvmm._tensors.host import HostPort
from asyncvmm._types import SegmentInfo
from asyncvmm.testing import Counters, Pair, open_pair
from tests.api import steps as own_steps
from tests.api.books import check_all_back, check_books, check_no_sleeper, passes, until
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers

KIB = 1024


def chunk(kib: float, value: int = 0) -> dict[str, torch.Tensor]:
    """Return an owner of so many KiB."""
    return {"x": torch.full((int(kib * KIB),), value, dtype=torch.uint8)}


async def take(pair: Pair, count: int = 1) -> list[Batch]:
    return [await pair.consumer.receive() for _ in range(count)]


# -- a producer that is too fast -----------------------------------------------------------------


@pytest.mark.parametrize(("pool_kib", "slots"), [(64, 256), (1024, 4)], ids=["bytes", "slots"])
async def test_a_fast_producer_waits_and_the_statistics_say_so(pool_kib: int, slots: int) -> None:
    """Bounded by bytes, or by slots; the consumer is a hundred passes slower than the producer.

    Kills: a pool that takes more than its size, a wait that is not counted, and an owner that is
    lost or comes out of order where the producer had to wait.
    """
    got: list[object] = []

    async def produce() -> None:
        for number in range(60):
            await exporter.send(chunk(10, number), key=number)

    async def consume() -> None:
        while len(got) < 60:
            async with await pair.consumer.receive() as batch:
                await passes(100)
                got.append(batch[0].key)
                assert torch.equal(batch[0]["x"], chunk(10, len(got) - 1)["x"])

    async with open_pair(pool_bytes=pool_kib * KIB, slots=slots) as pair:
        exporter = pair.exporter
        consumer, producer = asyncio.create_task(consume()), asyncio.create_task(produce())
        most = 0
        while not consumer.done():
            stats = check_books(exporter)
            most = max(most, stats.used_bytes)
            assert stats.used_bytes <= stats.high_water <= stats.pool_bytes == pool_kib * KIB
            assert (stats.waiting > 0) is (stats.oldest_wait > 0)
            assert len(stats.owners) <= slots
            check_no_sleeper(exporter)
            await passes(1)
        await producer
        await consumer
        stats = exporter.statistics()
        assert got == list(range(60))
        assert most == stats.high_water == min(6, slots) * 10 * KIB
        assert stats.waits >= 50
        assert 0 < stats.longest_wait <= stats.total_wait
        assert (stats.copies, stats.copied_bytes) == (60, 600 * KIB)


async def test_statistics_name_each_owner_its_age_and_who_holds_it() -> None:
    """Three ranks, of which one is late and one absent (field report 26).

    Kills: owners listed without the one who is late, ages that are not ages, and a gap that is
    not the largest.
    """
    async with open_pair(
        consumers=2, route=asyncvmm.Broadcast(3), pool_bytes=64 * KIB, slots=8, close_timeout=0.0
    ) as pair:
        exporter = pair.exporter
        for number in range(4):
            await exporter.send(chunk(16, number), key=f"owner {number}")
        batches = [await pair.consumers[0].receive() for _ in range(4)]
        late = [await pair.consumers[1].receive() for _ in range(4)]
        batches[1].release()
        await until(lambda: exporter.statistics().owners[1].held_by == (1,))
        stats = check_books(exporter)
        assert [owner.key for owner in stats.owners] == [f"owner {n}" for n in range(4)]
        assert [owner.held_by for owner in stats.owners] == [(0, 1), (1,), (0, 1), (0, 1)]
        assert [owner.waiting_for for owner in stats.owners] == [(2,)] * 4
        ages = [owner.age for owner in stats.owners]
        assert ages == sorted(ages, reverse=True)
        assert ages[-1] > 0
        assert {owner.state for owner in stats.owners} == {"held"}
        assert [owner.nbytes for owner in stats.owners] == [16 * KIB] * 4
        assert (stats.largest_gap, stats.gaps, stats.free_bytes) == (0, 0, 0)
        by_member = {consumer.member: consumer for consumer in stats.consumers}
        assert by_member[0].holding == 3
        assert by_member[1].holding == 4
        assert by_member[1].oldest == max(ages)
        assert by_member[0].released == 1
        # The third rank comes; what everybody has let go of comes back, and leaves two gaps.
        async with asyncvmm.connect(exporter.name, device="cpu", rank=2) as third:
            for _ in range(4):
                (await third.receive()).release()
            for batch in (late[1], batches[3], late[3]):
                batch.release()
            await until(lambda: len(exporter.statistics().owners) == 2)
            stats = check_books(exporter)
            assert (stats.largest_gap, stats.gaps, stats.free_bytes) == (16 * KIB, 2, 32 * KIB)
        for batch in [*batches, *late]:
            batch.release()
        await exporter.drain()
        check_all_back(exporter)


async def test_a_filling_owner_shows_as_filling() -> None:
    """Kills: a reservation that is invisible while it is written."""
    async with open_pair() as pair:
        async with pair.exporter.reserve({"x": TensorSpec((5,), "int8")}) as owner:
            (shown,) = check_books(pair.exporter).owners
            assert (shown.state, shown.held_by) == ("filling", ())
            assert shown.age > 0
            owner.publish()
        assert check_books(pair.exporter).owners[0].state == "held"


# -- who goes first ------------------------------------------------------------------------------


async def test_first_come_first_served_and_no_large_one_is_starved() -> None:
    """A large request waits; small ones that would fit come after it and wait behind it.

    Kills: a small request that overtakes, at its arrival or when room appears, and a large one
    that is passed over for ever.
    """
    async with open_pair(pool_bytes=8 * KIB, slots=16) as pair:
        exporter = pair.exporter
        for number in range(8):
            await exporter.send(chunk(1, number))
        batches = await take(pair, 8)
        done: list[str] = []

        async def send(kib: int, name: str) -> None:
            await exporter.send(chunk(kib), key=name)
            done.append(name)

        large = asyncio.create_task(send(4, "large"))
        await passes(1)
        small = [asyncio.create_task(send(1, f"small {n}")) for n in range(3)]
        await passes(1)
        for count, at in enumerate((0, 2, 4, 1)):  # four chunks, but only three in one piece
            batches[at].release()
            await passes(5)
            stats = check_books(exporter)
            assert stats.free_bytes == (count + 1) * KIB
            assert (stats.waiting, done) == (4, [])
            check_no_sleeper(exporter)
        # One that comes now would fit at once.
        small.append(asyncio.create_task(send(1, "small 3")))
        await passes(5)
        with pytest.raises(WouldBlock, match="5 calls wait already"):
            await exporter.send_nowait(chunk(1))
        assert (check_books(exporter).waiting, done) == (5, [])
        batches[3].release()  # 0 to 4 are in one piece now: five chunks
        await asyncio.gather(large, small[0])
        assert done == ["large", "small 0"]
        for batch in batches:
            batch.release()
        await asyncio.gather(*small)
        assert done == ["large", "small 0", "small 1", "small 2", "small 3"]
        for batch in await take(pair, 5):
            batch.release()


async def test_an_owner_that_is_never_let_go_of_does_not_stop_the_others() -> None:
    """Field report 27: A stays, B and C come and go a thousand times in all sizes.

    Kills: a pool that is a ring with one low-water mark.
    """
    async with open_pair(pool_bytes=16 * KIB, slots=4) as pair:
        await pair.exporter.send(chunk(1), key="A")
        (kept,) = await take(pair)
        for number in range(500):
            await pair.exporter.send(chunk(1 + number % 7), key="B")
            await pair.exporter.send(chunk(7 - number % 7), key="C")
            first, second = await take(pair, 2)
            (first if number % 2 else second).release()
            (second if number % 2 else first).release()
        kept.release()
        await pair.exporter.drain()
        assert check_all_back(pair.exporter).gaps == 1


async def test_the_last_acknowledgement_wakes_the_waiter_without_another_call() -> None:
    """Three consumers, one late (field report 26): push, not pull.

    Kills: a free chunk that is found only by the next allocation, and one that counts as free
    before the late one has let go.
    """
    async with open_pair(consumers=3, pool_bytes=4 * KIB, slots=4) as pair:
        await pair.exporter.send(chunk(4))
        waiter = asyncio.create_task(pair.exporter.send(chunk(4), to=0))
        await passes(1)
        for consumer in pair.consumers:
            assert not waiter.done()
            (await consumer.receive()).release()
            await passes(5)
        assert waiter.done()
        (await pair.consumers[0].receive()).release()


async def test_a_consumer_that_does_not_read_its_socket_holds_no_more_than_the_slots() -> None:
    """Field report 63: ten thousand sends to a deaf peer stop at the slots.

    Kills: an unbounded queue in front of the bounded one, and sources kept by it.
    """
    async with open_pair(slots=8) as pair:
        loop, link = asyncio.get_running_loop(), pair.consumer._link
        loop.remove_reader(link._fd)
        sent = 0
        sources: list[weakref.ref[torch.Tensor]] = []

        async def produce() -> None:
            nonlocal sent
            while True:
                data = chunk(1)
                sources.append(weakref.ref(data["x"]))
                await pair.exporter.send(data, metadata="m" * 30_000)
                sent += 1

        producer = asyncio.create_task(produce())
        await until(lambda: pair.exporter.statistics().waiting == 1)
        await passes(20)
        assert sent == 8
        stats = check_books(pair.exporter)
        assert stats.slots.held == 8
        assert 0 < stats.consumers[0].queued <= 8
        assert [source() is None for source in sources] == [True] * 8 + [False]
        loop.add_reader(link._fd, link._on_readable)
        for _ in range(20):
            (await pair.consumer.receive()).release()
        producer.cancel()
        await asyncio.wait([producer])


# -- without waiting -----------------------------------------------------------------------------


async def test_the_twins_that_do_not_wait_say_what_is_missing() -> None:
    """Kills: a twin that waits, takes something and fails, or overtakes those who wait."""
    spec = {"x": TensorSpec((4 * KIB,), torch.uint8)}
    async with open_pair(pool_bytes=8 * KIB, slots=2) as pair:
        exporter, consumer = pair.exporter, pair.consumer
        with pytest.raises(WouldBlock):
            consumer.receive_nowait()
        await exporter.send_nowait(chunk(4), key=1)
        async with exporter.reserve_nowait(spec, key=2) as owner:
            owner["x"].fill_(2)
            owner.publish()
        for attempt in (exporter.send_nowait(chunk(4)), enter(exporter.reserve_nowait(spec))):
            with pytest.raises(WouldBlock, match=r"4,096 bytes.*0 bytes, 0 slots.*0 calls wait"):
                await attempt
        check_books(exporter)
        await until(lambda: consumer.statistics().unread == 2)
        first = consumer.receive_nowait()
        assert consumer.receive_nowait()[0]["x"][0] == 2
        # Half the pool is free, but somebody waits for all of it.
        waiter = asyncio.create_task(exporter.send(chunk(8), key=3))
        first.release()
        await until(lambda: exporter.statistics().free_bytes >= 4 * KIB)
        await passes(2)
        if not waiter.done():
            with pytest.raises(WouldBlock, match="1 calls wait already"):
                await exporter.send_nowait(chunk(1))
        await waiter
        (await consumer.receive()).release()


async def enter(reservation: asyncvmm.Reservation) -> Any:
    return await reservation.__aenter__()


@pytest.mark.parametrize("full", [False, True])
async def test_what_can_never_fit_is_refused_at_once(full: bool) -> None:
    """Field report 30: 0.5, 1, 1.01 and 100 times the pool; the last two never wait.

    Kills: an owner that waits for ever, a limit without the alignment of features, and a refusal
    that takes something.
    """
    async with open_pair(pool_bytes=64 * KIB, slots=4) as pair:
        exporter = pair.exporter
        if full:
            await exporter.send(chunk(64))
            waiting = asyncio.create_task(exporter.send(chunk(64)))
            await passes(1)
        before = exporter.statistics()
        for kib in (64.64, 6400):
            size = int(kib * KIB)
            attempts: list[Any] = [
                lambda kib=kib: exporter.send(chunk(kib)),
                lambda kib=kib: exporter.send_nowait(chunk(kib)),
                lambda size=size: exporter.reserve({"x": TensorSpec((size,), "uint8")}),
                lambda size=size: exporter.reserve_nowait({"x": TensorSpec((size,), "uint8")}),
            ]
            for attempt in attempts:
                with pytest.raises(asyncvmm.OwnerTooLargeError, match="max_pool_bytes") as caught:
                    await attempt()
                assert caught.value.limit == 64 * KIB
                assert caught.value.needed == (size + 255) // 256 * 256
        # 129 features of one byte each take 256 bytes each, half the pool and a bit.
        with pytest.raises(asyncvmm.OwnerTooLargeError):
            await exporter.send({str(n): torch.ones(1) for n in range(257)})
        after = check_books(exporter)
        assert after.slots == before.slots
        assert after.waiting == before.waiting == int(full)
        if full:
            (await pair.consumer.receive()).release()
            await waiting
            (await pair.consumer.receive()).release()
        for kib in (32, 64):
            await exporter.send(chunk(kib))
            (await pair.consumer.receive()).release()
        await exporter.send({str(n): torch.ones(1) for n in range(256)})
        (await pair.consumer.receive()).release()
        await exporter.drain()
        check_all_back(exporter)


# -- elastic pools -------------------------------------------------------------------------------


async def test_the_pool_grows_when_somebody_would_wait_and_shrinks_when_it_is_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Up to max_pool_bytes, never beyond, and back to the first segment.

    Kills: growth without need, growth beyond the limit, an owner lost or damaged on the way, and
    a segment that is given back under an owner.
    """
    async with open_pair(
        pool_bytes=64 * KIB, max_pool_bytes=256 * KIB, slots=64, shrink_after=0.0
    ) as pair:
        exporter = pair.exporter
        for number in range(4):
            await exporter.send(chunk(16, number))
        stats = check_books(exporter)
        assert (stats.grown, stats.waits, stats.pool_bytes) == (0, 0, 64 * KIB)
        for number in range(4, 16):
            await exporter.send(chunk(16, number))
        stats = check_books(exporter)
        assert (stats.grown, stats.segments) == (3, 4)
        assert stats.pool_bytes == stats.physical_bytes == stats.max_pool_bytes == 256 * KIB
        waiter = asyncio.create_task(exporter.send(chunk(16, 16)))
        await passes(50)
        assert check_books(exporter).pool_bytes == 256 * KIB
        assert not waiter.done()
        batches = await take(pair, 16)
        batches[0].release()
        await waiter
        batches[0] = (await take(pair))[0]
        for number, batch in enumerate(batches):
            assert (batch[0]["x"] == (number or 16)).all()
        # One owner in the last segment keeps that one, and only that one.
        for batch in batches[:-1]:
            batch.release()
        await until(lambda: exporter.statistics().shrunk == 2)
        await until(lambda: len(pair.consumer._core._segments) == 2)
        stats = check_books(exporter)
        assert (stats.pool_bytes, stats.segments) == (128 * KIB, 2)
        assert (batches[-1][0]["x"] == 15).all()
        # It grows again, into the addresses that were left.
        await exporter.send(chunk(128, 20))
        (again,) = await take(pair)
        assert (again[0]["x"] == 20).all()
        again.release()
        batches[-1].release()
        await until(lambda: exporter.statistics().segments == 1)
        stats = check_all_back(exporter)
        assert (stats.pool_bytes, stats.physical_bytes) == (64 * KIB, 64 * KIB)
    assert "cannot grow" not in caplog.text


async def test_an_idle_segment_that_is_taken_at_the_last_moment_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A send comes between the look that finds a segment idle and its being given back.

    Kills: a segment that is given back under the owner that was just put into it.
    """
    look = Elastic._look
    acks: list[asyncvmm.Acknowledgement] = []

    def look_and_send(elastic: Elastic) -> None:
        look(elastic)
        if elastic._busy is not None and not acks:
            try:  # without giving the loop a turn
                pair.exporter.send_nowait(chunk(128, 5)).send(None)
            except StopIteration as sent:
                acks.append(sent.value)

    monkeypatch.setattr(Elastic, "_look", look_and_send)
    async with open_pair(
        pool_bytes=64 * KIB, max_pool_bytes=128 * KIB, shrink_after=0.0, slots=4
    ) as pair:
        await pair.exporter.send(chunk(128))
        (await pair.consumer.receive()).release()
        await until(lambda: bool(acks))
        async with await pair.consumer.receive() as batch:
            await passes(20)
            assert check_books(pair.exporter).segments == 2
            assert torch.equal(batch[0]["x"], chunk(128, 5)["x"])
        await acks[0]
        await until(lambda: pair.exporter.statistics().shrunk == 1)
        assert check_all_back(pair.exporter).pool_bytes == 64 * KIB


async def test_an_owner_may_lie_across_segments() -> None:
    """Field report 22: written and read as one piece.

    Kills: a segment that is mapped elsewhere than behind the one before it.
    """
    data = torch.arange(200 * KIB, dtype=torch.int32).to(torch.uint8)
    async with open_pair(pool_bytes=64 * KIB, max_pool_bytes=256 * KIB, consumers=2) as pair:
        for _ in range(3):
            ack = await pair.exporter.send({"x": data})
            for consumer in pair.consumers:
                async with await consumer.receive() as batch:
                    assert torch.equal(batch[0]["x"], data)
            await ack
        assert pair.exporter.statistics().segments > 1


SIZES = [(1, 2_000), (256, 512), (1000, 2000), (4096, 4097), (4097, 12_289), (5000, 100_000)]


@pytest.mark.parametrize(("pool", "most"), SIZES)
async def test_odd_sizes_are_usable_to_the_last_chunk(pool: int, most: int) -> None:
    """Field report 49: sizes that are no multiple of the granule.

    Kills: a limit that is promised and never reached, and one that is passed.
    """
    async with open_pair(pool_bytes=pool, max_pool_bytes=most, slots=1024) as pair:
        exporter = pair.exporter
        limit = (most + 255) // 256 * 256
        with pytest.raises(asyncvmm.OwnerTooLargeError):
            await exporter.send({"x": torch.zeros(limit + 1, dtype=torch.uint8)})
        async with asyncio.timeout(PROMPTLY):
            await exporter.send({"x": torch.zeros(limit, dtype=torch.uint8)})
        (await pair.consumer.receive()).release()
        await exporter.drain()
        # And in the smallest pieces, until it is full.
        count = limit // 256
        async with asyncio.timeout(PROMPTLY):
            for _ in range(count):
                await exporter.send({"x": torch.zeros(1, dtype=torch.uint8)})
        stats = check_books(exporter)
        assert stats.pool_bytes <= stats.max_pool_bytes
        assert stats.high_water <= (most + 255) // 256 * 256
        for _ in range(count):
            (await pair.consumer.receive()).release()
        await exporter.drain()
        check_all_back(exporter)


class Stubborn(HostExporterRegion):
    """Host memory that does not grow while it is told to fail."""

    fail = False
    tries = 0

    def grow(self, nbytes: int) -> SegmentInfo:
        type(self).tries += 1
        if self.fail:
            raise asyncvmm.PoolMemoryError(nbytes, 17, "a test")
        return super().grow(nbytes)


class StubbornPort(HostPort):
    def create(
        self, pool_bytes: int, max_pool_bytes: int, slots: int, **options: Any
    ) -> ExporterRegion:
        options.pop("handle_type")
        return Stubborn.create(pool_bytes, max_pool_bytes, slots, **options)


async def test_a_pool_that_cannot_grow_lets_wait_what_fits_and_refuses_what_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What fits the pool as it is waits on; what does not gets the memory's own error, at once.

    Kills: an owner that waits for ever for memory that is not there, and all others behind it.
    """
    monkeypatch.setattr(Stubborn, "fail", True)
    async with open_pair(
        port=StubbornPort(), pool_bytes=64 * KIB, max_pool_bytes=256 * KIB, slots=8
    ) as pair:
        exporter = pair.exporter
        await exporter.send(chunk(64, 1))
        fitting = asyncio.create_task(exporter.send(chunk(64, 2)))
        await until(lambda: "cannot grow" in caplog.text)
        large = [asyncio.create_task(exporter.send(chunk(65))) for _ in range(2)]
        behind = asyncio.create_task(exporter.send(chunk(1, 3)))
        await passes(5)
        assert not fitting.done()
        (await pair.consumer.receive()).release()
        await fitting
        for task in large:
            with pytest.raises(asyncvmm.PoolMemoryError) as caught:
                await task
            assert (caught.value.available, caught.value.where) == (17, "a test")
        (await pair.consumer.receive()).release()
        await behind
        (await pair.consumer.receive()).release()
        # Once there is memory again it grows again.
        monkeypatch.setattr(Stubborn, "fail", False)
        await exporter.send(chunk(200, 4))
        async with await pair.consumer.receive() as batch:
            assert torch.equal(batch[0]["x"], chunk(200, 4)["x"])
        await exporter.drain()
        assert check_all_back(exporter).grown == 1


async def test_addresses_in_pieces_are_used_piece_by_piece() -> None:
    """After growing and shrinking, free addresses lie on both sides of a segment in use.

    Kills: a pool that asks for one segment larger than any gap between its segments, and gives up.
    """
    async with open_pair(
        pool_bytes=64 * KIB, max_pool_bytes=256 * KIB, slots=16, shrink_after=0.0
    ) as pair:
        exporter = pair.exporter
        for number in range(4):
            await exporter.send(chunk(64, number))
        batches = await take(pair, 4)
        for number in (0, 1, 3):
            batches[number].release()
        await until(lambda: exporter.statistics().shrunk == 2)
        assert check_books(exporter).segments == 2  # the first, and the third
        ack = await exporter.send(chunk(128, 7))  # the first and the second in one piece
        async with await pair.consumer.receive() as batch:
            assert torch.equal(batch[0]["x"], chunk(128, 7)["x"])
        await ack
        # All four are needed again, and the third is in the way.
        whole = asyncio.create_task(exporter.send(chunk(256, 8)))
        await passes(5)
        assert torch.equal(batches[2][0]["x"], chunk(64, 2)["x"])
        batches[2].release()
        await whole
        async with await pair.consumer.receive() as batch:
            assert torch.equal(batch[0]["x"], chunk(256, 8)["x"])


async def test_what_did_not_suffice_is_not_given_back_under_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An owner that fits only once another is back: the pool grows for it once, and keeps that.

    A wait for a slot keeps nothing.  Kills: a segment that is given back as idle, grown again for
    the same waiter, given back, and so on; one that is kept for whoever lacks no bytes.
    """
    looks = 0
    look = Elastic._look

    def counted(elastic: Elastic) -> None:
        nonlocal looks
        looks += 1
        look(elastic)

    monkeypatch.setattr(Elastic, "_look", counted)
    async with open_pair(
        pool_bytes=64 * KIB, max_pool_bytes=192 * KIB, slots=2, shrink_after=0.02
    ) as pair:
        exporter = pair.exporter
        await exporter.send(chunk(32, 1))
        waiting = asyncio.create_task(exporter.send(chunk(192, 2)))
        await until(lambda: looks >= 5)
        stats = check_books(exporter)
        assert (stats.grown, stats.shrunk, stats.waiting) == (1, 0, 1)
        (first,) = await take(pair, 1)
        first.release()
        await waiting
        (second,) = await take(pair, 1)
        assert torch.equal(second[0]["x"], chunk(192, 2)["x"])
        second.release()
        await until(lambda: exporter.statistics().segments == 1)

        acks = [await exporter.send(chunk(size, size)) for size in (48, 64)]
        batches = await take(pair, 2)
        batches.pop().release()
        await acks[1]
        await exporter.send(chunk(8, 8))  # beside the first: the other segment is idle now
        late = asyncio.create_task(exporter.send(chunk(8, 9)))
        await until(lambda: len(exporter._room) == 1)
        await until(lambda: exporter.statistics().segments == 1)
        batches.pop().release()
        await late
        for batch in await take(pair, 2):
            batch.release()
        await exporter.drain()


# -- segments that come and go while a consumer comes --------------------------------------------


class Gated(HostExporterRegion):
    """Host memory whose segments are exported only while the gate is open."""

    gate = threading.Event()
    begun = threading.Semaphore(0)

    def export(self, index: int) -> OwnedFd:
        self.begun.release()
        assert self.gate.wait(30)
        return super().export(index)


class GatedPort(HostPort):
    def create(
        self, pool_bytes: int, max_pool_bytes: int, slots: int, **options: Any
    ) -> ExporterRegion:
        options.pop("handle_type")
        Gated.gate.set()
        Gated.begun = threading.Semaphore(0)
        return Gated.create(pool_bytes, max_pool_bytes, slots, **options)


async def test_a_segment_that_is_given_back_while_a_consumer_comes_is_not_waited_for() -> None:
    """The welcome promises two segments; the second is idle and due to be given back meanwhile.

    Kills: a consumer that waits for ever for a segment that is no more.
    """
    async with open_pair(
        port=GatedPort(),
        pool_bytes=64 * KIB,
        max_pool_bytes=256 * KIB,
        route=asyncvmm.Broadcast(2),
        shrink_after=0.05,
    ) as pair:
        exporter = pair.exporter
        await exporter.send(chunk(64, 1), to=0)
        await exporter.send(chunk(64, 2), to=0)
        batches = await take(pair, 2)
        Gated.gate.clear()
        while Gated.begun.acquire(blocking=False):
            pass
        second = asyncvmm.connect(exporter.name, device="cpu", rank=1)
        coming = asyncio.create_task(second.__aenter__())
        await asyncio.to_thread(Gated.begun.acquire)
        for batch in batches:
            batch.release()
        # Time enough for the pool to find the second segment idle, if it looks now.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await until(lambda: exporter.statistics().shrunk == 1)
        Gated.gate.set()
        async with asyncio.timeout(PROMPTLY):
            consumer = await coming
        await exporter.send(chunk(30, 3), to=1)
        async with await consumer.receive() as batch:
            assert torch.equal(batch[0]["x"], chunk(30, 3)["x"])
        del batch
        await until(lambda: exporter.statistics().shrunk == 1)
        await exporter.send(chunk(128, 4), to=1)
        async with await consumer.receive() as batch:
            assert torch.equal(batch[0]["x"], chunk(128, 4)["x"])
        await consumer.aclose()


async def test_a_new_segment_is_not_used_before_every_consumer_was_sent_it() -> None:
    """The one who made the pool grow gives up; the next does not find the new room too early.

    Kills: an owner delivered ahead of the segment that it lies in.
    """
    async with open_pair(port=GatedPort(), pool_bytes=64 * KIB, max_pool_bytes=128 * KIB) as pair:
        exporter = pair.exporter
        while Gated.begun.acquire(blocking=False):
            pass
        await exporter.send(chunk(64, 1))
        Gated.gate.clear()
        growing = asyncio.create_task(exporter.send(chunk(64, 2)))
        await asyncio.to_thread(Gated.begun.acquire)
        growing.cancel()
        await passes(5)
        assert check_books(exporter).waiting == 0
        with pytest.raises(WouldBlock):
            await exporter.send_nowait(chunk(64, 3))
        Gated.gate.set()
        await exporter.send(chunk(64, 4))
        for number in (1, 4):
            async with await pair.consumer.receive() as batch:
                assert torch.equal(batch[0]["x"], chunk(64, number)["x"])


def grown(exporter: asyncvmm.Exporter) -> bool:
    return exporter.statistics().physical_bytes > 64 * KIB


async def test_a_segment_that_comes_while_a_consumer_comes_is_sent_to_it_once() -> None:
    """The pool grows while one consumer is there and another is on its way, at every stage.

    Kills: a segment sent twice, or not at all, to a consumer that opens while it is handed out.
    """
    for stage in range(4):
        async with open_pair(
            port=GatedPort(),
            pool_bytes=64 * KIB,
            max_pool_bytes=256 * KIB,
            route=asyncvmm.Broadcast(2),
        ) as pair:
            exporter = pair.exporter
            while Gated.begun.acquire(blocking=False):
                pass
            await exporter.send(chunk(64, 1))
            if stage == 0:  # first the consumer, then the growth
                Gated.gate.clear()
            second = asyncvmm.connect(exporter.name, device="cpu", rank=1)
            coming = asyncio.create_task(second.__aenter__())
            if stage == 0:
                await asyncio.to_thread(Gated.begun.acquire)
            else:
                await passes(stage * 3)
                Gated.gate.clear()
            growing = asyncio.create_task(exporter.send(chunk(64, 2)))
            await until(partial(grown, exporter))
            await passes(10)
            Gated.gate.set()
            consumer = await coming
            await growing
            for each in (pair.consumer, consumer):
                for number in (1, 2):
                    async with await each.receive() as batch:
                        assert torch.equal(batch[0]["x"], chunk(64, number)["x"])
                del batch
            await consumer.aclose()


# -- for long ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_tens_of_thousands_of_owners_through_a_small_pool(peers: Peers) -> None:
    """Between two processes, sent and reserved in turn, of all sizes, every byte checked.

    Sixty thousand on uvloop, a quarter of that on asyncio: the loops differ in speed, not in
    what may go wrong.

    Kills: an owner lost, doubled, mixed with another or shifted, and whatever grows with traffic
    on either side: descriptors, mappings, memory.
    """
    fast = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    rounds = 12 if fast else 3
    portion = 5_000
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="512KiB", slots=32
    ) as exporter:
        consumer = peers.start()
        await consumer.call(steps.connect, "pool", 0)
        ours, theirs = [], []
        for first in range(0, rounds * portion, portion):
            producing = asyncio.create_task(produce_soak(exporter, first, portion))
            await until(lambda: exporter.statistics().waiting == 1)  # the pool is full
            theirs.append(await consumer.begin_long(200, own_steps.soak, first, portion))
            await producing
            ours.append(vars(Counters.of()))
            check_books(exporter)
        await exporter.drain()
        stats = check_all_back(exporter)
        assert stats.published == stats.acknowledged == rounds * portion
        assert stats.refused == stats.lost == stats.consumers[0].stale == 0
        assert stats.waits >= rounds
        assert stats.high_water <= 512 * KIB
        for counted in (ours, theirs):
            after_a_while, at_the_end = counted[1], counted[-1]
            for what in ("descriptors", "mappings", "threads"):
                assert at_the_end[what] == after_a_while[what]
            assert at_the_end["rss"] - after_a_while["rss"] < 4 * KIB * KIB


async def produce_soak(exporter: asyncvmm.Exporter, first: int, count: int) -> None:
    for number in range(first, first + count):
        size = own_steps.size_of(number)
        if number % 2:
            await exporter.send({"x": own_steps.expected(number, 0, size)}, key=number)
        else:
            spec = {"x": TensorSpec((size,), torch.uint8)}
            async with exporter.reserve(spec, key=number, metadata=True) as owner:
                owner["x"].copy_(own_steps.expected(number, owner.generation, size))
                owner.publish()
