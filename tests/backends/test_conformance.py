"""What every backend keeps: one suite, run over each of them.

To add a backend, write a case for it and name it in ``CASES``.  Exporter and consumer share this
process here; what needs two processes is in the test file of the backend.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from asyncvmm._backends.base import ConsumerRegion, ExporterRegion
from asyncvmm._backends.mapping import PAGE
from asyncvmm._backends.memfd import POISON, HostConsumerRegion, HostExporterRegion
from asyncvmm._errors import ArgumentError, AsyncVMMError, ClosedError, RemoteProtocolError
from asyncvmm._fds import OwnedFd
from asyncvmm._types import RegionInfo, SegmentInfo

SLOTS = 4


class Case(Protocol):
    """How the suite makes the regions of one backend, and looks into their memory."""

    granule: int

    def create(self, pool_bytes: int, max_pool_bytes: int, slots: int) -> ExporterRegion:
        """Make a pool."""

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        """Make a consumer's side of it, with nothing mapped."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Return what is there, seen with the rights of a reader."""

    def write(self, address: int, content: bytes) -> None:
        """Put ``content`` there."""


class HostCase:
    """Sealed memfds."""

    granule = PAGE

    def create(self, pool_bytes: int, max_pool_bytes: int, slots: int) -> ExporterRegion:
        return HostExporterRegion.create(pool_bytes, max_pool_bytes, slots)

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        return HostConsumerRegion(info)

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))


CASES: dict[str, Callable[[], Case]] = {"memfd": HostCase}


class Pair:
    """An exporter's region of two granules that may grow to eight, and a consumer's."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.granule = case.granule
        self.exporter = case.create(2 * self.granule, 8 * self.granule, SLOTS)
        self.consumer = case.attach(self.exporter.info)

    def map(self, segment: SegmentInfo) -> None:
        self.consumer.map(segment, self.exporter.export(segment.index))

    def grow(self, granules: int) -> SegmentInfo:
        return self.exporter.grow(granules * self.granule)

    def seen(self, start: int, nbytes: int) -> bytes:
        return self.case.read(self.consumer.address + start, nbytes)

    def write(self, start: int, content: bytes) -> None:
        self.case.write(self.exporter.address + start, content)

    def close(self) -> None:
        self.consumer.close()
        self.exporter.close()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


@pytest.fixture
def pair(case: Case) -> Iterator[Pair]:
    pair = Pair(case)
    yield pair
    pair.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def spans(segments: list[SegmentInfo]) -> list[tuple[int, int]]:
    return sorted((each.start, each.start + each.nbytes) for each in segments)


def test_a_new_pool_is_one_segment_from_the_start(pair: Pair) -> None:
    info = pair.exporter.info
    assert list(pair.exporter.segments()) == [SegmentInfo(0, 0, 2 * pair.granule)]
    assert info.max_nbytes == 8 * pair.granule
    assert (info.granule, info.slots, info.writable) == (pair.granule, SLOTS, False)


def test_sizes_are_rounded_up_to_granules(case: Case) -> None:
    region = case.create(1, case.granule + 1, 1)
    assert [each.nbytes for each in region.segments()] == [case.granule]
    assert region.info.max_nbytes == 2 * case.granule
    assert region.grow(1) == SegmentInfo(1, case.granule, case.granule)
    region.close()


@pytest.mark.parametrize(
    ("pool", "largest", "slots"),
    [(0, 1, 1), (-1, 1, 1), (2, 1, 1), (1, 1, 0), (1, 1, -1), (1, 1, 1025)],
)
def test_sizes_that_can_never_work_are_refused(
    case: Case, pool: int, largest: int, slots: int
) -> None:
    with pytest.raises(ArgumentError):
        case.create(pool * case.granule, largest * case.granule, slots)


def test_a_consumer_reads_what_was_written_before_and_after_it_mapped(pair: Pair) -> None:
    pair.write(0, b"before")
    pair.map(pair.exporter.segments()[0])
    pair.write(pair.granule, b"after")
    assert pair.seen(0, 6) == b"before"
    assert pair.seen(pair.granule, 5) == b"after"


def test_a_new_segment_touches_the_last_and_bytes_cross_the_boundary(pair: Pair) -> None:
    """Planted bug: the consumer places every segment at the start of its range."""
    pair.map(pair.exporter.segments()[0])
    grown = pair.grow(3)
    assert grown == SegmentInfo(1, 2 * pair.granule, 3 * pair.granule)
    pair.map(grown)
    pair.write(grown.start - 3, b"across")
    assert pair.seen(grown.start - 3, 6) == b"across"


def test_a_consumer_may_map_segments_in_any_order(pair: Pair) -> None:
    segments = [*pair.exporter.segments(), pair.grow(1), pair.grow(2)]
    for segment in segments:
        pair.write(segment.start, b"%d" % segment.index)
    for segment in reversed(segments):
        pair.map(segment)
    assert [pair.seen(each.start, 1) for each in segments] == [b"0", b"1", b"2"]


def test_segments_never_overlap_and_a_gap_is_used_again(pair: Pair) -> None:
    """Planted bug: growth begins behind the last segment, so that a pool that once shrank in
    its middle can never be whole again."""
    middle, last = pair.grow(3), pair.grow(3)
    pair.write(last.start, b"last")
    pair.exporter.shrink(middle.index)
    assert middle not in pair.exporter.segments()
    with pytest.raises(ArgumentError, match=f"{3 * pair.granule:,} in one piece"):
        pair.grow(4)
    again = [pair.grow(1), pair.grow(2)]
    assert spans(list(pair.exporter.segments())) == spans(
        [SegmentInfo(0, 0, 2 * pair.granule), *again, last]
    )
    assert [each.start for each in again] == [2 * pair.granule, 3 * pair.granule]
    assert pair.case.read(pair.exporter.address + last.start, 4) == b"last"


def test_a_consumer_follows_a_shrink_and_a_new_growth(pair: Pair) -> None:
    """Planted bug: the consumer forgets a segment without unmapping it, or the other way."""
    pair.map(pair.exporter.segments()[0])
    old = pair.grow(2)
    pair.map(old)
    pair.write(old.start, b"old")
    pair.exporter.shrink(old.index)
    pair.consumer.unmap(old.index)
    new = pair.grow(4)
    pair.map(new)
    pair.write(new.start, b"new")
    pair.write(0, b"first")
    assert (pair.seen(new.start, 3), pair.seen(0, 5)) == (b"new", b"first")


def test_growth_beyond_the_largest_size_changes_nothing(pair: Pair) -> None:
    before = list(pair.exporter.segments())
    for granules in (7, 1 << 20, 0, -1):
        with pytest.raises(ArgumentError):
            pair.grow(granules)
    assert list(pair.exporter.segments()) == before
    assert pair.grow(6).nbytes == 6 * pair.granule


def test_unknown_segments_are_refused(pair: Pair) -> None:
    for call in (pair.exporter.export, pair.exporter.shrink):
        with pytest.raises(ArgumentError, match="no segment 7"):
            call(7)
    with pytest.raises(RemoteProtocolError, match="segment 7"):
        pair.consumer.unmap(7)


@pytest.mark.parametrize(
    ("index", "start", "nbytes"),
    [(-1, 0, 2), (1, -1, 2), (1, 7, 2), (1, 8, 1), (1, 0, 9), (1, 2, 0), (1, 2, -1)],
)
def test_a_segment_outside_the_pool_is_refused(
    pair: Pair, index: int, start: int, nbytes: int
) -> None:
    """Planted bug: one of the bounds is not looked at, and a peer writes over our memory map."""
    before = descriptors()
    with pytest.raises(RemoteProtocolError):
        pair.consumer.map(
            SegmentInfo(index, start * pair.granule, nbytes * pair.granule),
            pair.exporter.export(0),
        )
    assert descriptors() == before


def test_a_segment_off_the_granule_is_refused(pair: Pair) -> None:
    for start, nbytes in ((256, 2 * pair.granule), (0, 2 * pair.granule - 256)):
        with pytest.raises(RemoteProtocolError, match="granules"):
            pair.consumer.map(SegmentInfo(0, start, nbytes), pair.exporter.export(0))


def test_a_segment_that_collides_is_refused_and_the_first_stays(pair: Pair) -> None:
    """Planted bug: overlap is looked for on one side only."""
    segment = pair.exporter.segments()[0]
    middle, size = SegmentInfo(4, 3 * pair.granule, 2 * pair.granule), 2 * pair.granule
    pair.consumer.map(middle, pair.exporter.export(0))
    for start in (2, 3, 4):
        with pytest.raises(RemoteProtocolError, match="collides"):
            pair.consumer.map(SegmentInfo(0, start * pair.granule, size), pair.exporter.export(0))
    with pytest.raises(RemoteProtocolError, match="collides"):
        pair.consumer.map(SegmentInfo(4, 0, size), pair.exporter.export(0))
    pair.map(segment)
    pair.write(0, b"still")
    assert pair.seen(middle.start, 5) == pair.seen(0, 5) == b"still"


def test_a_handle_of_the_wrong_kind_is_refused(pair: Pair) -> None:
    handle = pair.exporter.export(0)
    wrong: OwnedFd | bytes = b"x" * 64
    if not isinstance(handle, OwnedFd):
        wrong = OwnedFd(os.memfd_create("wrong"))
    else:
        handle.close()
    with pytest.raises(AsyncVMMError):
        pair.consumer.map(pair.exporter.segments()[0], wrong)


def test_events_go_round_and_end_done(pair: Pair) -> None:
    pair.map(pair.exporter.segments()[0])
    with pair.exporter.watching():
        for slot in (*range(SLOTS), *range(SLOTS)):
            pair.exporter.record_ready(slot, 0)
            ready = pair.exporter.ready_fence(slot)
            assert ready is None or ready.done()
        for slot in range(SLOTS):
            pair.consumer.open_ready(slot, pair.exporter.ready_handle(slot))
            for _ in range(2):
                pair.consumer.wait_ready(slot, 0)
                if handle := pair.consumer.record_release(slot, [0, 0]):
                    pair.exporter.open_release(1, slot, handle)
                release = pair.exporter.release_fence(1, slot)
                assert release is None or release.done()
    pair.exporter.forget_peer(1)
    pair.exporter.forget_peer(1)


def test_a_release_handle_is_given_once(pair: Pair) -> None:
    handles = [pair.consumer.record_release(0, [0]) for _ in range(3)]
    assert handles[1:] == [b"", b""]


def test_events_that_are_none_are_refused(pair: Pair) -> None:
    with pytest.raises(RemoteProtocolError):
        pair.consumer.open_ready(0, b"nonsense")
    with pytest.raises(RemoteProtocolError):
        pair.exporter.open_release(1, 0, b"nonsense")


def test_poison_fills_exactly_the_range(pair: Pair) -> None:
    """Planted bug: the length or the start of the range is off by one."""
    pair.map(pair.exporter.segments()[0])
    pair.map(pair.grow(1))
    boundary = 2 * pair.granule
    pair.write(boundary - 300, b"." * 600)
    pair.exporter.poison(boundary - 256, 512)
    expected = b"." * 44 + bytes([POISON]) * 512 + b"." * 44
    assert pair.seen(boundary - 300, 600) == expected


def test_poison_stays_inside_segments(pair: Pair) -> None:
    """Planted bug: a gap between two segments is taken for a part of them."""
    middle, _last = pair.grow(1), pair.grow(1)
    pair.exporter.shrink(middle.index)
    for start, nbytes in ((-256, 256), (0, -256), (0, 3), (2, 1), (1, 3), (7, 1), (9, 1)):
        step = pair.granule if abs(start) < 256 else 1
        with pytest.raises(ArgumentError):
            pair.exporter.poison(start * step, nbytes * step)


def test_a_keepalive_keeps_the_bytes_when_both_sides_are_closed(pair: Pair) -> None:
    """Planted bug: ``close`` unmaps at once, under a live view (inv. 15)."""
    pair.map(pair.exporter.segments()[0])
    pair.write(0, b"kept")
    address, keep = pair.consumer.address, pair.consumer.keepalive()
    pair.close()
    assert pair.case.read(address, 4) == b"kept"
    del keep


def test_closed_regions_say_so_and_close_again(pair: Pair) -> None:
    segment = pair.exporter.segments()[0]
    handles = [pair.exporter.export(0), pair.exporter.export(0)]
    before = descriptors()
    pair.map(segment)
    pair.close()
    pair.close()
    assert list(pair.exporter.segments()) == []
    calls: list[Callable[[], object]] = [
        lambda: pair.exporter.address,
        lambda: pair.exporter.export(0),
        lambda: pair.exporter.grow(1),
        lambda: pair.exporter.shrink(0),
        lambda: pair.exporter.poison(0, 1),
        lambda: pair.consumer.address,
        lambda: pair.consumer.map(segment, handles[0]),
        lambda: pair.consumer.unmap(0),
        pair.consumer.keepalive,
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    if isinstance(handles[0], OwnedFd) and isinstance(handles[1], OwnedFd):
        assert handles[0].number == -1  # taken, although it was refused
        handles[1].close()
    assert descriptors() < before


def test_descriptors_stay_flat(case: Case) -> None:
    """Planted bug: a consumer keeps the descriptor it mapped (inv. 12, field report 60)."""
    Pair(case).close()
    before = descriptors()
    for turn in range(64):
        pair = Pair(case)
        pair.map(pair.exporter.segments()[0])
        pair.map(pair.grow(1))
        assert descriptors() - before <= 2  # at most one per segment, all of them the exporter's
        first, second = (pair.consumer, pair.exporter)[:: 1 if turn % 2 else -1]
        first.close()
        second.close()
        assert descriptors() == before
