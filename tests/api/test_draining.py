"""What has to be done before an owner's memory is back, and who is asked for it (inv. 4)."""

from __future__ import annotations

import logging

import pytest
import torch

from asyncvmm._core import wire
from asyncvmm.testing import FakeDevice, FakePort, Pair, open_pair
from tests.api.books import check_all_back, passes, until

ONE = {"x": torch.ones(3)}


async def hand_over(pair: Pair, *, read: bool = True) -> None:
    """Send an owner; have it read, or not, and released."""
    await pair.exporter.send(ONE, require="none")
    with await pair.consumer.receive() as batch:
        if read:
            batch[0]["x"]


def draining(pair: Pair) -> int:
    return pair.exporter.statistics().slots.draining


async def drains_until_the_device_is_done(pair: Pair, device: FakeDevice) -> None:
    """Check that one slot drains for as long as the device is held, and no longer."""
    await until(lambda: draining(pair) == 1)
    await passes(10)
    assert draining(pair) == 1
    device.finish()
    await pair.exporter.drain()
    check_all_back(pair.exporter)


async def test_who_read_nothing_does_not_answer_for_the_copy() -> None:
    """The slot's event is known from an earlier use, and done.

    Kills: the event of an earlier use asked for a release that has none, while the exporter's own
    copy is under way.
    """
    device = FakeDevice()
    async with open_pair(slots=1, port=FakePort(device)) as pair:
        await hand_over(pair)
        await pair.exporter.drain()
        device.hold_ready = True
        await hand_over(pair, read=False)
        await drains_until_the_device_is_done(pair, device)


async def test_copies_on_two_streams_are_waited_for_themselves() -> None:
    """Kills: a release that stands for the copy where nothing keeps the next copy behind it."""
    device = FakeDevice(hold_ready=True)
    async with open_pair(slots=1, port=FakePort(device)) as pair:
        await hand_over(pair)
        await pair.exporter.drain()  # on one stream, the release stands for the copy
        device.stream += 1
        await hand_over(pair)
        await drains_until_the_device_is_done(pair, device)


async def read_on_two_streams(pair: Pair, device: FakeDevice) -> None:
    """Hand two owners over, and read each on a stream of its own: the first is not done yet."""
    for _ in range(2):
        await pair.exporter.send(ONE, require="none")
    for held in (True, False):
        device.hold_release = held
        device.stream += 1
        with await pair.consumer.receive() as batch:
            batch[0]["x"]


async def test_one_owner_of_a_packet_that_is_not_done_keeps_no_other() -> None:
    """Two streams of one consumer, released in one turn.  Kills: a packet that is freed, or waited
    for, as a whole."""
    device = FakeDevice()
    async with open_pair(slots=2, port=FakePort(device)) as pair:
        await read_on_two_streams(pair, device)
        await until(lambda: pair.exporter.statistics().slots.free == 1)
        await passes(10)
        assert draining(pair) == 1
        device.finish()
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_events_of_streams_beyond_the_last_lane_stand_for_themselves() -> None:
    """A long life of a consumer has used up the lanes; then two streams read, the first slowly.

    Kills: a last lane that such streams share, where the quick one's event, asked first as the
    newest, is taken for the slow one's too.
    """
    device = FakeDevice()
    async with open_pair(slots=2, port=FakePort(device)) as pair:
        leases = pair.consumer._leases
        for stream in range(1000, 1000 + wire.NO_LANE):
            leases.lane((stream,))
        await read_on_two_streams(pair, device)
        await until(lambda: pair.exporter.statistics().slots.free > 0)
        slow = draining(pair)
        device.finish()
        await pair.exporter.drain()
        assert slow == 1
        check_all_back(pair.exporter)


async def test_releases_behind_several_streams_are_in_the_lane_of_the_first() -> None:
    """Kills: a lane for each combination of streams, which are more than there are lanes."""
    async with open_pair(slots=1) as pair:
        leases = pair.consumer._leases
        assert leases.lane((7, 8)) == leases.lane((7, 9, 8)) == leases.lane((7,))
        assert leases.lane((8, 7)) != leases.lane((7, 8))


async def test_an_event_that_never_came_stands_for_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A consumer says that it read two owners on one stream, and gave the event of one only.

    Kills: the newest event of a lane taken for the end of a copy that nothing was recorded behind;
    a slot that drains for ever, or an error on the loop, for a consumer that breaks the rules.
    """
    device = FakeDevice(hold_ready=True)
    async with open_pair(slots=2, port=FakePort(device)) as pair:
        exporter = pair.exporter
        await hand_over(pair)
        await exporter.drain()
        for _ in range(2):
            await exporter.send(ONE, require="none")
        known, other = sorted(exporter._core.records.values(), key=lambda r: -r.generation)
        (peer,) = exporter._core.peers
        with caplog.at_level(logging.WARNING, "asyncvmm.exporter"):
            exporter._core.receive(
                peer, [wire.Release(r.slot, r.generation, b"", 1) for r in (other, known)]
            )
            exporter._told()
            await until(lambda: exporter.statistics().slots.free == 1)
            await passes(10)
        assert draining(pair) == 1
        assert f"no event came for slot {other.slot}" in caplog.text
        device.finish()
        await exporter.drain()
        check_all_back(exporter)
        for _ in range(2):
            (await pair.consumer.receive()).release()


async def test_copies_come_back_in_another_order_than_they_were_written() -> None:
    """Two owners of one stream, dropped unread in one turn, the later one first.

    Kills: the copy of the one that was let go last taken for the end of both.
    """
    device = FakeDevice(hold_ready=True)
    async with open_pair(slots=2, port=FakePort(device)) as pair:
        for _ in range(2):
            await pair.exporter.send(ONE, require="none")
        first, second = await pair.consumer.receive(), await pair.consumer.receive()
        second.release()
        first.release()
        await until(lambda: draining(pair) == 2)
        device.fences[0].finish()
        await until(lambda: pair.exporter.statistics().slots.free == 1)
        await passes(10)
        assert draining(pair) == 1
        device.finish()
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def die(pair: Pair) -> None:
    """Have the exporter see its consumer's process end, with what was said last still unread."""
    pair.consumer._link.flush()
    (conn,) = pair.exporter._connections.open.values()
    pair.exporter._connections._on_death(conn)


@pytest.mark.parametrize("heard", [True, False], ids=["before", "with-its-death"])
async def test_who_was_killed_does_not_answer_for_the_copy(heard: bool) -> None:
    """It released what it read; its stream still waited for the copy when its process ended.

    Kills: a release of the dead that stands for the copy, heard before its death (its event is
    pending, and never asked again) or with it (its event answers "done" from now on).
    """
    device = FakeDevice(hold_ready=True, hold_release=True)
    async with open_pair(slots=1, port=FakePort(device)) as pair:
        await hand_over(pair)
        if heard:
            await until(lambda: draining(pair) == 1)
        await until(lambda: bool(device.pending("release")))
        for fence in device.pending("release"):
            fence.finish()
        await die(pair)
        await drains_until_the_device_is_done(pair, device)
