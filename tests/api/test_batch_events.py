"""Batches that share events: one for the copies, one for the reads of those released together.

The fences are driven by hand (inv. 4, 8); what they stand for must hold for every owner of a batch,
in whatever order owners, consumers and copies end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import BackendError, Batch, Outcome, RemoteProtocolError
from asyncvmm._core import wire
from asyncvmm._tensors.cuda import CudaPort
from asyncvmm._tensors.host import OFFLOAD_BYTES
from asyncvmm._tensors.plan import Plan
from asyncvmm.testing import FakeDevice, FakePort, Pair, open_pair
from tests.api.books import check_all_back, passes, until


def owners(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((3,), float(number))} for number in range(count)]


async def send(pair: Pair, count: int = 3) -> list[asyncvmm.Acknowledgement]:
    return await pair.exporter.send_all(owners(count), require="none")


def read(batch: Iterable[asyncvmm.Owner]) -> None:
    for owner in batch:
        owner["x"]


def draining(pair: Pair) -> int:
    return pair.exporter.statistics().slots.draining


async def stay(pair: Pair, count: int) -> None:
    """Check that so many slots drain, and go on doing so."""
    await until(lambda: draining(pair) == count)
    await passes(10)
    assert draining(pair) == count


async def all_back(pair: Pair, device: FakeDevice, count: int) -> None:
    """Check that so many slots drain for as long as the device is held, and no longer."""
    await stay(pair, count)
    device.finish()
    await pair.exporter.drain()
    await until(lambda: draining(pair) == 0)
    check_all_back(pair.exporter)


# -- how many ------------------------------------------------------------------------------------


async def test_a_batch_has_one_ready_event_and_one_wait_for_each_stream() -> None:
    """Kills: an event recorded, or waited for, for each owner, and a second stream that reads
    without having waited."""
    device = FakeDevice()
    async with open_pair(port=FakePort(device)) as pair:
        await send(pair, 4)
        assert [fence.kind for fence in device.fences] == ["ready"]
        batch = await pair.consumer.receive()
        first = batch[0].slot
        assert device.fences[0].slot == first
        read(batch)
        read(batch)
        assert device.waits == [(first, 7)]
        device.stream = 8
        batch[2]["x"]
        assert device.waits == [(first, 7), (first, 8)]
        batch.release()
        released = [fence.streams for fence in device.fences if fence.kind == "release"]
        assert sorted(released) == [(7,), (7, 8)]
        del batch
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_those_read_on_the_same_streams_share_an_event_and_no_others() -> None:
    """Two read on one stream, two on another, one not at all.

    Kills: one event for all of a batch although another stream read some of it.
    """
    device = FakeDevice()
    async with open_pair(port=FakePort(device)) as pair:
        await send(pair, 5)
        batch = await pair.consumer.receive()
        read(batch.owners[:2])
        device.stream, device.hold_release = 8, True
        read(batch.owners[2:4])
        batch.release()
        del batch
        first, second = device.pending()
        assert (first.streams, second.streams) == ((7,), (8,))
        await stay(pair, 4)
        first.finish()
        await stay(pair, 2)
        await all_back(pair, device, 2)


# -- streams that others made --------------------------------------------------------------------


@pytest.mark.parametrize("number", [7, 8])
async def test_streams_of_one_number_need_not_finish_in_order(number: int) -> None:
    """A stream is made for each owner and destroyed once that is released: the driver gives its
    number to the next one, although its work is pending.  7 is current, 8 is said.

    Kills: an owner that is free because the event of a later one, on the same number, is done.
    """
    device = FakeDevice(hold_release=True)
    device.passing = {7, 8}
    async with open_pair(port=FakePort(device), slots=3) as pair:
        await send(pair)
        batch = await pair.consumer.receive()
        for owner in batch:
            device.stream = number
            owner["x"]
            owner.release(stream=number)
        del owner, batch
        first, second, third = device.pending()
        third.finish()
        await stay(pair, 2)
        second.finish()
        await stay(pair, 1)
        first.finish()
        await until(lambda: draining(pair) == 0)
        check_all_back(pair.exporter)


async def test_a_stream_of_a_number_that_has_waited_waits_itself() -> None:
    """Kills: a read of what is not written yet, because an earlier stream of that number waited."""
    device = FakeDevice()
    device.passing.add(7)
    async with open_pair(port=FakePort(device)) as pair:
        await send(pair, 2)
        batch = await pair.consumer.receive()
        first = batch[0].slot
        read(batch)
        assert device.waits == [(first, 7), (first, 7)]
        device.stream = 8  # which lasts
        read(batch)
        assert device.waits[2:] == [(first, 8)]
        batch.release()


def test_torch_tells_its_own_streams_from_those_that_others_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is torch's is known for ever, what is not is asked again each time.

    Kills: a stream of somebody else's that is taken for one that cannot be destroyed.
    """
    ids = {0x7F00: 0x7F00, 0x5500: 3}  # by number: for those of others the id is the number
    current = 0x7F00
    port = object.__new__(CudaPort)  # a whole one needs a GPU
    port._index, port._lasting, port._raw_stream = 0, {0, 1}, lambda device: current
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentStream", lambda device: (ids[current], 0, 1), raising=False
    )
    assert [port.lasting(number) for number in (0, 1, 0x7F00, 0x5500)] == [True, True, False, False]
    current = 0x5500
    assert [port.lasting(number) for number in (0x7F00, 0x5500)] == [False, True]
    current = 0x7F00
    assert [port.lasting(number) for number in (0x7F00, 0x5500)] == [False, True]


# -- what they stand for -------------------------------------------------------------------------


async def test_every_owner_waits_for_the_event_that_its_release_shares() -> None:
    """Kills: owners that are free because their own slot's event was never recorded, or is of an
    earlier use and done."""
    device = FakeDevice()
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        for _ in range(3):  # each slot's own event is known
            await send(pair, 1)
        for _ in range(3):
            with await pair.consumer.receive() as batch:
                read(batch)
        await pair.exporter.drain()
        device.hold_release = True
        await send(pair, 3)
        with await pair.consumer.receive() as batch:
            read(batch)
        del batch
        assert len(device.pending()) == 1
        await all_back(pair, device, 3)


@pytest.mark.parametrize("how", ["dropped", "released"])
async def test_who_read_nothing_waits_for_the_copy_of_its_batch(how: str) -> None:
    """Kills: an owner that is free before its copy is over, for its own slot has no event."""
    device = FakeDevice(hold_ready=True)
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        batch = await pair.consumer.receive()
        for owner in batch.owners if how == "released" else ():
            owner.release()
            await passes(3)
        del batch
        if how == "released":
            del owner
        await all_back(pair, device, 3)


async def test_a_stream_that_read_nothing_does_not_answer_for_the_copy() -> None:
    """A batch is released on a stream on which no view was taken: it never waited for the copy.

    Kills: an event on such a stream that stands for the end of the copy.
    """
    device = FakeDevice(hold_ready=True)
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        (await pair.consumer.receive()).release(stream=9)
        await all_back(pair, device, 3)


async def test_an_owner_that_nobody_read_does_not_keep_the_event_from_those_that_were() -> None:
    """The first is unread; the others are read on the stream on which all are released.

    Kills: a group that goes by its first owner, and so is free while its reads go on.
    """
    device = FakeDevice()
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        batch = await pair.consumer.receive()
        read(batch.owners[1:])
        device.hold_release = True
        batch.release(stream=device.stream)
        del batch
        await stay(pair, 2)
        await all_back(pair, device, 2)


async def test_owners_let_go_one_by_one_leave_the_rest_their_event() -> None:
    """The first is released alone, the second by force, the last has a view that lives on.

    Kills: the event of an owner that went before taken for those that go later.
    """
    device = FakeDevice()
    async with open_pair(slots=5, port=FakePort(device)) as pair:
        await send(pair, 5)
        batch = await pair.consumer.receive()
        read(batch)
        view = batch[4]["x"]
        batch[0].release()
        batch[1].release(force=True)
        await until(lambda: pair.exporter.statistics().slots.free == 2)
        device.hold_release = True
        batch.release()
        await stay(pair, 2)
        assert [fence.slot for fence in device.pending()] == [batch[2].slot]
        device.finish()
        await until(lambda: pair.exporter.statistics().slots.free == 4)
        assert view.tolist() == [4.0] * 3
        del view, batch
        await all_back(pair, device, 1)


async def test_a_stream_that_was_recorded_for_one_owner_is_waited_for() -> None:
    """Kills: ``record_stream`` forgotten in the event that several share."""
    device = FakeDevice(hold_release=True)
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        batch = await pair.consumer.receive()
        read(batch)
        batch[1].record_stream(9)
        batch.release()
        del batch
        assert sorted(fence.streams for fence in device.pending()) == [(7,), (7, 9)]
        await all_back(pair, device, 3)


async def test_a_batch_released_in_another_thread_comes_back() -> None:
    """Kills: the core used, or an event shared, outside the loop's thread."""
    device = FakeDevice(hold_release=True)
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        batch = await pair.consumer.receive()
        read(batch)
        await asyncio.to_thread(batch.release)
        batch.release()  # again is a no-op
        del batch
        await all_back(pair, device, 3)


async def test_views_that_outlive_their_consumer_give_back_each_owner_of_a_batch() -> None:
    """Kills: owners of a batch that are forgotten once there is no loop to settle them."""
    device = FakeDevice()
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        batch = await pair.consumer.receive()
        views = [owner["x"] for owner in batch]
        batch.release()
        del batch
        await pair.consumer.aclose()
        await passes(10)
        assert pair.exporter.statistics().slots.free == 0
        assert [view[0].item() for view in views] == [0, 1, 2]
        views.clear()
        await until(lambda: pair.exporter.statistics().slots.free == 3)
        check_all_back(pair.exporter)


# -- what its end has to wait for ----------------------------------------------------------------


def noting(pair: Pair) -> list[int]:
    """Return a list of the slots whose reads the consumer's memory is told of."""
    noted: list[int] = []
    region: Any = pair.consumer._region
    region.note_read = noted.append
    return noted


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("how", ["view", "clone", "recorded", "local"])
async def test_who_reads_notes_it_once_and_nobody_else_does(how: str, number: int) -> None:
    """Kills: reads that are noted by the wait, for the first owner whether it is read or not, and
    one on a stream that ``record_stream`` had named before, which was not noted."""
    device = FakeDevice()
    async with open_pair(port=FakePort(device)) as pair:
        noted = noting(pair)
        await send(pair)
        with await pair.consumer.receive() as batch:
            owner = batch[number]
            if how == "recorded":
                owner.record_stream(device.stream)
                assert noted == []
            for device.stream in (7,) if how == "recorded" else (7, 8):
                if how == "clone":
                    owner.clone()
                elif how == "local":
                    pair.consumer._leases.local(owner._lease)()
                else:
                    owner["x"]
            assert noted == [owner.slot]
        del batch, owner


@pytest.mark.parametrize("how", ["borrow", "reconstruct"])
async def test_a_redeemed_owner_is_noted_when_it_is_read(how: str) -> None:
    """Kills: a ticket's owner that is read unnoted, or noted although nothing was read."""
    async with open_pair(port=FakePort(FakeDevice())) as pair:
        noted = noting(pair)
        ticket = (await pair.exporter.export({"x": torch.ones(3)}))["x"]
        if how == "reconstruct":
            await pair.consumer.reconstruct(ticket)
        else:
            with await pair.consumer.borrow(ticket) as owner:
                assert noted == []
                owner["x"]
            del owner
        assert noted == [ticket.owner.slot]


# -- the first owner's slot, used again ----------------------------------------------------------


async def test_the_first_owners_slot_is_used_again_on_another_stream() -> None:
    """The others are read by a stream that has not waited yet, and let go unread, after that.

    The event that speaks for them is recorded again meanwhile: they wait longer, never too short.
    Kills: a batch that is bound to its first owner's life, and an owner without any fence.
    """
    device = FakeDevice()
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        batch = await pair.consumer.receive()
        first = batch[0].slot
        batch[0].release()
        await until(lambda: pair.exporter.statistics().slots.free == 1)
        device.hold_ready, device.stream = True, 8
        await pair.exporter.send(owners(1)[0], require="none")
        again = await pair.consumer.receive()
        assert again[0].slot == first
        device.stream = 9
        assert batch[1]["x"].tolist() == [1.0] * 3
        assert device.waits == [(first, 9)]
        again[0]["x"]  # its own batch is another: waited for itself
        assert device.waits == [(first, 9)] * 2
        batch.release()
        again.release()
        del batch, again
        await all_back(pair, device, 3)


# -- several consumers ---------------------------------------------------------------------------


async def test_the_reads_of_each_consumer_are_waited_for_themselves() -> None:
    """One lets go of the batch as a whole, the other one by one, backwards.

    Kills: the slot of one consumer's shared event asked of another.
    """
    device = FakeDevice()
    async with open_pair(consumers=2, slots=3, port=FakePort(device)) as pair:
        acks = await send(pair)
        batches = [await consumer.receive() for consumer in pair.consumers]
        for batch in batches:
            read(batch)
        device.hold_release = True
        batches[0].release()
        await passes(5)
        device.hold_release = False
        for owner in reversed(batches[1].owners):
            owner.release()
        await stay(pair, 3)
        batches.clear()
        del batch, owner
        await all_back(pair, device, 3)
        assert [await ack for ack in acks] == [Outcome(released=(0, 1))] * 3


async def test_consumers_that_let_go_in_different_orders_are_each_waited_for() -> None:
    """One read the second owner last, and still does; the other gives that one back first.

    Kills: the event of what drained last taken for the newest of a consumer's stream.
    """
    device = FakeDevice()
    async with open_pair(consumers=2, slots=2, port=FakePort(device)) as pair:
        await send(pair, 2)
        one, two = [await consumer.receive() for consumer in pair.consumers]
        read(one)
        one[0].release()
        device.hold_release = True
        one[1].release()
        await passes(5)
        device.hold_release = False
        read(two)
        two[1].release()
        two[0].release()
        del one, two
        await all_back(pair, device, 1)


async def test_a_batch_goes_to_another_competitor_with_its_event() -> None:
    """Its first holder dies before it has taken it; the next has never seen the slot's event.

    Kills: a ready event given to the first consumer only, or sent for another owner's slot.
    """
    device = FakeDevice()
    route = asyncvmm.Compete()
    async with open_pair(consumers=2, slots=3, route=route, port=FakePort(device)) as pair:
        acks = await send(pair)
        (peer,) = [peer for peer in pair.exporter._core.peers.values() if peer.untaken]
        connections = pair.exporter._connections
        connections._on_death(connections.open[peer.id])
        (other,) = pair.exporter._core.peers.values()
        assert other.untaken
        found = [consumer for consumer in pair.consumers if consumer._core.inbox] or pair.consumers
        for consumer in found:
            try:
                batch = await consumer.receive()
            except asyncvmm.PeerLostError:
                continue
            assert [owner["x"][0].item() for owner in batch] == [0, 1, 2]
            batch.release()
            del batch
            break
        for ack in acks:
            assert (await ack).complete
        await pair.exporter.drain()
        check_all_back(pair.exporter)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("said", ["nothing", "heard", "with-its-death"])
async def test_a_batch_whose_reader_was_killed_waits_for_its_copy(said: str, known: bool) -> None:
    """The copy runs when the process ends, whatever it said of the batch before that.

    What kills it is in test_draining; here it is that the owners share one event, which the
    exporter has ``known`` since an earlier batch or not.  Kills: the event of a dead process that
    is trusted for the owners that share it.
    """
    device = FakeDevice()
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        for _ in range(2 if known else 0):  # the slots come in turn: so often for the first again
            await send(pair)
            with await pair.consumer.receive() as batch:
                read(batch)
            del batch
            await pair.exporter.drain()
        device.hold_ready = device.hold_release = True
        await send(pair)
        batch = await pair.consumer.receive()
        (conn,) = pair.exporter._connections.open.values()
        if known:
            assert conn.peer is not None
            assert (conn.peer.id, batch[0].slot) in pair.exporter._fencing._given
        read(batch)
        if said != "nothing":
            batch.release()
            if said == "heard":
                await until(lambda: draining(pair) == 3)
            for fence in device.pending("release"):
                fence.finish()
            pair.consumer._link.flush()
        pair.exporter._connections._on_death(conn)
        await stay(pair, 3)
        device.finish()
        await pair.exporter.drain()
        await until(lambda: draining(pair) == 0)
        check_all_back(pair.exporter)
        del batch


async def test_a_batch_release_that_was_lost_is_said_again_for_every_owner() -> None:
    """The link breaks with it unread.  Kills: an event's handle that only the lost packet had."""
    device = FakeDevice(hold_release=True)
    async with open_pair(slots=3, port=FakePort(device), close_timeout=1.0) as pair:
        acks = await send(pair)
        with await pair.consumer.receive() as batch:
            read(batch)
        del batch
        pair.consumer._link.flush()
        connections = pair.exporter._connections
        (conn,) = connections.open.values()
        conn.link.abort()
        connections._on_end(conn, RemoteProtocolError("as a test wants it"))
        await all_back(pair, device, 3)
        assert [await ack for ack in acks] == [Outcome(released=(0,))] * 3


# -- a driver that refuses -----------------------------------------------------------------------


class Refusing:
    """A call that the driver refuses for a while."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.count = 0
        self.refuses = True

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        if self.refuses:
            raise BackendError("no events left", call="cuEventCreate", code="CUDA_ERROR_UNKNOWN")
        return self._call(*args)


async def test_a_shared_release_event_that_is_refused_is_put_off_for_all() -> None:
    """Kills: owners that are forgotten, or released without an event, with the first of them."""
    device = FakeDevice(hold_release=True)
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        region: Any = pair.consumer._region
        refusing = region.record_release = Refusing(region.record_release)
        with await pair.consumer.receive() as batch:
            read(batch)
        del batch
        await passes(10)
        assert pair.exporter.statistics().slots.held == 3
        refusing.refuses = False
        await all_back(pair, device, 3)


async def test_a_shared_release_event_that_cannot_be_opened_keeps_all() -> None:
    """Kills: a late event that only the owner in whose slot it is waits for."""
    device = FakeDevice()
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        await send(pair)
        region: Any = pair.exporter._region
        refusing = region.open_release = Refusing(region.open_release)
        with await pair.consumer.receive() as batch:
            read(batch)
        del batch
        await stay(pair, 3)
        refusing.refuses = False
        await pair.exporter.drain()
        check_all_back(pair.exporter)


@pytest.mark.parametrize("call", ["ready_handle", "record_ready"])
async def test_a_ready_event_that_is_refused_publishes_nothing(call: str) -> None:
    """Made before the copies, it was never needed; recorded after them, they must be over first.

    Kills: chunks that are free while their copies, for which no event was recorded, may run.
    """
    device = FakeDevice()
    async with open_pair(slots=3, port=FakePort(device)) as pair:
        region: Any = pair.exporter._region
        real = getattr(region, call)
        refusing = Refusing(real)
        setattr(region, call, refusing)
        with pytest.raises(BackendError, match="no events left"):
            await send(pair)
        await passes(5)
        assert draining(pair) == (3 if call == "record_ready" else 0)
        refusing.refuses = False
        await until(lambda: pair.exporter.statistics().slots.free == 3)
        check_all_back(pair.exporter)
        assert pair.exporter.statistics().published == 0


@pytest.mark.parametrize("call", ["open_ready", "wait_ready"])
async def test_a_view_whose_wait_was_refused_waits_when_it_is_asked_for_again(call: str) -> None:
    """Kills: a stream noted as having waited, or an event as opened, before it is; the next try
    then reads what may not be written yet (inv. 8), or is told that no event ever came."""
    device = FakeDevice()
    async with open_pair(port=FakePort(device)) as pair:
        region: Any = pair.consumer._region
        refusing = Refusing(getattr(region, call))
        setattr(region, call, refusing)
        await send(pair, 1)
        with await pair.consumer.receive() as batch:
            for _ in range(2):
                with pytest.raises(BackendError, match="no events left"):
                    batch[0]["x"]
            assert device.waits == []
            refusing.refuses = False
            batch[0]["x"]
            assert device.waits == [(batch[0].slot, 7)]
        del batch
        await pair.exporter.drain()
        check_all_back(pair.exporter)


# -- cancelled copies ----------------------------------------------------------------------------


class Queueing(FakePort):
    """Queues copies in a worker thread, as a GPU's port does with sources in pageable memory."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)

    def copy_all(self, plans: Sequence[tuple[int, Plan]], stream: int) -> None:
        self.begun.release()
        assert self.gate.wait(30)
        super().copy_all(plans, stream)


@pytest.mark.parametrize("count", [1, 3])
async def test_copies_queued_after_their_sender_was_cancelled_are_waited_for(count: int) -> None:
    """What the thread still queues is behind no event that was recorded at the cancellation.

    Kills: a chunk that is free while the device copies into it.
    """
    device = FakeDevice(hold_ready=True)
    port = Queueing(device)
    large = [{"x": torch.zeros(OFFLOAD_BYTES, dtype=torch.uint8)} for _ in range(count)]
    async with open_pair(slots=4, port=port, pool_bytes=4 * OFFLOAD_BYTES) as pair:
        exporter = pair.exporter
        work = exporter.send_all(large) if count > 1 else exporter.send(large[0])
        task = asyncio.get_running_loop().create_task(work)
        await asyncio.to_thread(port.begun.acquire)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        device.finish()  # all that was queued until then
        await stay(pair, count)
        port.gate.set()
        await until(lambda: not exporter._draining.copying)
        await all_back(pair, device, count)
        assert exporter.statistics().published == 0


# -- who lies ------------------------------------------------------------------------------------

LIES = [0, 2, 3, 1 << 62]


@pytest.mark.parametrize("event", LIES)
async def test_a_release_that_names_an_event_that_never_came_stands_for_nothing(
    event: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a slot in use, of its own, of none, of another's: what it names drains until its copy is
    over, and nothing else is touched.

    Kills: an index by what a consumer says, and an error on the loop for it.
    """
    device = FakeDevice(hold_ready=True)
    async with open_pair(consumers=2, slots=4, port=FakePort(device)) as pair:
        await send(pair)
        liar, honest = sorted(pair.exporter._core.peers.values(), key=lambda peer: peer.id)
        theirs: Batch = await pair.consumers[1].receive()
        read(theirs)
        with caplog.at_level(logging.WARNING, "asyncvmm.exporter"):
            names = [(record.slot, record.generation) for record in liar.holds.values()]
            if event >= len(names):  # nothing of what it holds
                lie = wire.Release(event, 1, b"", 1, [*names, (event, 1), (1 << 62, 1)])
            else:
                lie = wire.Release(*names[event], b"", 1, names * 2)
            pair.exporter._core.receive(liar.id, [lie])
            pair.exporter._told()
            await passes(5)
            assert sorted(honest.holds) == sorted(owner.slot for owner in theirs)
            assert pair.exporter.statistics().slots.held == 3
            theirs[2].release()
            theirs[1].release()
            await until(lambda: "broke the rules" in caplog.text)
        theirs.release()
        del theirs
        await all_back(pair, device, 0)
        (await pair.consumers[0].receive()).release()
