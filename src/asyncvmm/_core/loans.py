"""Loans: the slots and bytes of one pool, and what they are lent for.

Nothing here knows of peers.  A loan ends exactly once, published or given back (inv. 3); after
either its slot drains, and is free when nothing touches its bytes any more (inv. 4).
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncvmm._core.allocator import Allocator
from asyncvmm._core.ledger import Record
from asyncvmm._core.slots import DRAINING, FILLING, FREE, SlotTable
from asyncvmm._errors import LocalProtocolError
from asyncvmm._types import SegmentInfo


class Loans:
    """Slots, bytes and the records that use them."""

    def __init__(self, slots: int) -> None:
        self.slots = SlotTable(slots)
        self.bytes = Allocator()
        self.records: dict[int, Record] = {}  # slot -> what uses it
        self.draining: list[Record] = []  # to be drained by the caller after each input

    def add_segment(self, segment: SegmentInfo, usable: int) -> None:
        """Make a new segment's first ``usable`` bytes available."""
        self.bytes.add_range(segment.start, usable)

    def fit(self, sizes: Sequence[int]) -> bool:
        """Say whether slots and gaps for so many chunks at once are there now."""
        return self.slots.free >= len(sizes) and (
            self.bytes.largest_gap >= sum(sizes) or self.bytes.fits(sizes)
        )

    def reserve(self, nbytes: int) -> Record | None:
        """Take a slot and a chunk, or return None and change nothing."""
        slots = self.slots
        if not slots.unused:
            return None
        start = self.bytes.allocate(nbytes)
        if start is None:
            return None
        slot = slots.take()
        record = self.records[slot] = Record(slot, slots.generations[slot], start, nbytes)
        return record

    def reserve_all(self, sizes: Sequence[int]) -> list[Record] | None:
        """Take a slot and a chunk for each, or return None and change nothing.

        Side by side where a gap holds them all, so that they can be given back in one piece.
        """
        slots = self.slots
        if slots.free < len(sizes):
            return None
        start = self.bytes.allocate(sum(sizes))
        if start is None and not self.bytes.fits(sizes):
            return None
        found = []
        for nbytes in sizes:
            at = self.bytes.allocate(nbytes) if start is None else start
            assert at is not None, "fits() promised it"
            slot = slots.take()
            record = self.records[slot] = Record(slot, slots.generations[slot], at, nbytes)
            found.append(record)
            start = None if start is None else start + nbytes
        return found

    def abandon(self, record: Record) -> None:
        """End a loan unpublished (inv. 3); the device may still be writing, so it drains."""
        self._check_loan(record)
        self._drain(record)

    def drained(self, *records: Record) -> None:
        """Free slots and their bytes: every fence of what touched them is done (inv. 4).

        Neighbours in the pool that come one after the other are given back in one piece.
        """
        start = end = 0
        try:
            for record in records:
                slot = record.slot
                if self.records.get(slot) is not record:
                    self._check_use(record)
                self.slots.move(slot, FREE)
                del self.records[slot]
                if record.start != end:
                    if start < end:
                        self.bytes.free(start, end - start)
                    start = end = record.start
                end += record.nbytes
        finally:
            if start < end:
                self.bytes.free(start, end - start)

    def _drain(self, record: Record) -> None:
        self.slots.move(record.slot, DRAINING)
        self.draining.append(record)

    def _check_use(self, record: Record) -> None:
        """Refuse a record whose slot has been freed, and perhaps lent again, since."""
        if self.records.get(record.slot) is not record:
            raise LocalProtocolError(f"{record!r} is over: its slot was freed before")

    def _check_loan(self, record: Record) -> None:
        """Refuse a loan that has ended, one way or the other."""
        slot = record.slot
        if self.records.get(slot) is not record or self.slots.states[slot] is not FILLING:
            raise LocalProtocolError(f"{record!r} was published or given back before")
