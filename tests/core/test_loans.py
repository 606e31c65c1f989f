"""Slots and bytes, and what they are lent for."""

from __future__ import annotations

import pytest

from asyncvmm._core.ledger import Record
from asyncvmm._core.loans import Loans
from asyncvmm._core.slots import SlotState
from asyncvmm._errors import LocalProtocolError
from asyncvmm._types import SegmentInfo


@pytest.fixture
def loans() -> Loans:
    found = Loans(2)
    found.add_segment(SegmentInfo(0, 0, 4096), 1024)
    return found


def snapshot(loans: Loans) -> object:
    """Everything that a refused call must leave alone."""
    return (
        loans.slots.counts,
        list(loans.slots.generations),
        loans.bytes.free_bytes,
        loans.bytes.gaps,
        dict(loans.records),
        list(loans.draining),
    )


def lend(loans: Loans, nbytes: int) -> Record:
    record = loans.reserve(nbytes)
    assert record is not None
    return record


def test_only_the_usable_bytes_of_a_segment_are_lent(loans: Loans) -> None:
    """Kills padding that becomes visible to users (field report 49)."""
    assert loans.bytes.capacity == 1024
    assert loans.fit([1024])
    assert not loans.fit([1280])
    assert loans.reserve(1280) is None


def test_the_last_slot_and_the_last_bytes_can_be_had(loans: Loans) -> None:
    """Kills a pool that always keeps one back."""
    lend(loans, 768)
    assert loans.fit([256])
    assert not loans.fit([257])
    lend(loans, 256)
    assert not loans.fit([0])


@pytest.mark.parametrize("lacking", ["a slot", "bytes"])
def test_a_loan_that_cannot_be_had_changes_nothing(loans: Loans, lacking: str) -> None:
    """Kills a chunk that is taken before it is known that there is a slot."""
    for _ in range(2):
        lend(loans, 256)
    if lacking == "bytes":
        loans.abandon(loans.records[0])
        loans.drained(loans.records[0])
        loans.draining.clear()
    nbytes = 256 if lacking == "a slot" else 1024
    before = snapshot(loans)
    assert not loans.fit([nbytes])
    assert loans.reserve(nbytes) is None
    assert snapshot(loans) == before


def test_an_abandoned_loan_is_free_only_when_it_has_drained(loans: Loans) -> None:
    """Kills a slot that is used again while the device still writes (field report 20, inv. 4)."""
    record = lend(loans, 512)
    loans.abandon(record)
    assert loans.draining == [record]
    assert loans.slots.states[record.slot] is SlotState.DRAINING
    assert loans.bytes.free_bytes == 512
    loans.drained(record)
    assert loans.slots.free == 2
    assert loans.bytes.free_bytes == loans.bytes.largest_gap == 1024
    assert not loans.records


@pytest.mark.parametrize("call", ["abandon", "drained"])
def test_a_loan_ends_once(loans: Loans, call: str) -> None:
    """Kills a second end that ends the slot's next loan instead (inv. 3, field report 9)."""
    old = lend(loans, 256)
    loans.abandon(old)
    before = snapshot(loans)
    with pytest.raises(LocalProtocolError, match="before"):
        loans.abandon(old)
    assert snapshot(loans) == before
    loans.drained(old)
    new = lend(loans, 256)
    assert new.slot == old.slot
    if call == "drained":
        loans.abandon(new)
    before = snapshot(loans)
    with pytest.raises(LocalProtocolError, match=r"Record\(slot=0, generation=1"):
        getattr(loans, call)(old)
    assert snapshot(loans) == before


def test_a_loan_that_has_not_ended_cannot_be_freed(loans: Loans) -> None:
    """Kills FILLING to FREE: the device may be writing."""
    record = lend(loans, 256)
    before = snapshot(loans)
    with pytest.raises(LocalProtocolError, match="may not go from FILLING to FREE"):
        loans.drained(record)
    assert snapshot(loans) == before


# -- several at once -----------------------------------------------------------------------------


def fragmented() -> tuple[Loans, list[Record]]:
    """Return four slots over a pool of which every second piece of 256 bytes is free."""
    loans = Loans(8)
    loans.add_segment(SegmentInfo(0, 0, 2048), 2048)
    kept = [lend(loans, 256) for _ in range(8)]
    for record in kept[1::2]:
        loans.abandon(record)
        loans.drained(record)
    loans.draining.clear()
    return loans, kept[::2]


def test_several_are_lent_side_by_side_where_a_gap_holds_them_all() -> None:
    """In the smallest such gap.  Kills chunks that lie apart and come back one by one."""
    loans = Loans(8)
    loans.add_segment(SegmentInfo(0, 0, 8192), 8192)
    first, second, _ = lend(loans, 1024), lend(loans, 256), lend(loans, 256)
    loans.abandon(first)
    loans.drained(first)
    found = loans.reserve_all([256, 512, 256])
    assert found is not None
    assert [(record.start, record.nbytes) for record in found] == [(0, 256), (256, 512), (768, 256)]
    assert len({record.slot for record in (*found, second)}) == 4
    assert all(loans.records[record.slot] is record for record in found)


def test_several_are_lent_where_no_gap_holds_them_all() -> None:
    """Kills a batch that is refused although each of its chunks has a gap, and chunks that
    overlap."""
    loans, kept = fragmented()
    found = loans.reserve_all([256, 256, 256])
    assert found is not None
    assert sorted(record.start for record in found) == [256, 768, 1280]
    assert loans.bytes.free_bytes == 256
    for record in found:
        loans.abandon(record)
    loans.drained(*found)
    assert (loans.bytes.gaps, loans.bytes.free_bytes, loans.bytes.largest_gap) == (4, 1024, 256)
    for record in kept:
        loans.abandon(record)
    loans.drained(*reversed(kept))
    assert (loans.bytes.gaps, loans.bytes.largest_gap) == (1, 2048)


@pytest.mark.parametrize("sizes", [[256] * 5, [512, 256], [256, 256, 512]])
def test_several_that_cannot_all_be_had_change_nothing(sizes: list[int]) -> None:
    """For want of slots, or of a gap for the first or the last of them.

    Kills slots, or a chunk, taken for some before it is known that there is room for all.
    """
    loans, _ = fragmented()
    before = snapshot(loans)
    assert not loans.fit(sizes)
    assert loans.reserve_all(sizes) is None
    assert snapshot(loans) == before


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [0, 2, 1, 3]])
def test_neighbours_are_given_back_in_one_piece(
    order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come one after the other; all are free in any case, and merged.

    Kills: a neighbour that is forgotten, or given back twice.
    """
    loans = Loans(4)
    loans.add_segment(SegmentInfo(0, 0, 4096), 2048)
    records = loans.reserve_all([256, 512, 768, 512])
    assert records is not None
    pieces: list[tuple[int, int]] = []
    free = loans.bytes.free
    for record in records:
        loans.abandon(record)

    def freed(pool: object, start: int, nbytes: int) -> None:
        pieces.append((start, nbytes))
        free(start, nbytes)

    monkeypatch.setattr(type(loans.bytes), "free", freed)
    loans.drained(*[records[at] for at in order])
    assert sum(nbytes for _, nbytes in pieces) == 2048
    if order == sorted(order):
        assert pieces == [(0, 2048)]
    assert (loans.bytes.gaps, loans.bytes.free_bytes, loans.slots.free) == (1, 2048, 4)
    assert not loans.records


def test_an_error_among_several_loses_none_that_came_before_it() -> None:
    """The third is still lent.  Kills bytes that nobody has once their slots are free."""
    loans = Loans(4)
    loans.add_segment(SegmentInfo(0, 0, 4096), 1024)
    records = loans.reserve_all([256] * 4)
    assert records is not None
    for record in (*records[:2], records[3]):
        loans.abandon(record)
    with pytest.raises(LocalProtocolError, match="may not go from FILLING to FREE"):
        loans.drained(*records)
    assert (loans.bytes.free_bytes, loans.bytes.largest_gap, loans.slots.free) == (512, 512, 2)
    with pytest.raises(LocalProtocolError, match="before"):
        loans.drained(records[3], records[3])
    loans.abandon(records[2])
    loans.drained(records[2])
    assert (loans.bytes.free_bytes, loans.bytes.gaps, loans.slots.free) == (1024, 1, 4)
