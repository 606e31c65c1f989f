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
    assert loans.fits(1024)
    assert not loans.fits(1280)
    assert loans.reserve(1280) is None


def test_the_last_slot_and_the_last_bytes_can_be_had(loans: Loans) -> None:
    """Kills a pool that always keeps one back."""
    lend(loans, 768)
    assert loans.fits(256)
    assert not loans.fits(257)
    lend(loans, 256)
    assert not loans.fits(0)


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
    assert not loans.fits(nbytes)
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
