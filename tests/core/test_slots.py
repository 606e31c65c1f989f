"""The slot table."""

from __future__ import annotations

from itertools import product

import pytest

from asyncvmm._core.slots import MOVES, SlotState, SlotTable
from asyncvmm._errors import LocalProtocolError

FREE, FILLING, HELD, DRAINING, QUARANTINED = SlotState
WAYS = {
    FREE: (),
    FILLING: (),
    HELD: (HELD,),
    DRAINING: (DRAINING,),
    QUARANTINED: (HELD, QUARANTINED),
}
LEGAL = {
    (FILLING, HELD),
    (FILLING, DRAINING),
    (HELD, DRAINING),
    (DRAINING, FREE),
    (HELD, QUARANTINED),
    (DRAINING, QUARANTINED),
    (QUARANTINED, HELD),
    (QUARANTINED, DRAINING),
}
"""As in section 4 of the design, written again on purpose."""


@pytest.mark.parametrize(("at", "to"), list(product(SlotState, SlotState)))
def test_only_the_moves_of_the_design_are_legal(at: SlotState, to: SlotState) -> None:
    """Kills any added or dropped arrow, HELD to FREE above all (inv. 1, 4)."""
    slots = SlotTable(1)
    if at is not FREE:
        slots.take()
        for step in WAYS[at]:
            slots.move(0, step)
    before = slots.states[0], slots.free, slots.counts
    assert before[0] is at
    if (at, to) in LEGAL:
        slots.move(0, to)
        assert slots.states[0] is to
        assert slots.free == (to is FREE)
    else:
        with pytest.raises(LocalProtocolError, match=f"slot 0 may not go from {at.name}"):
            slots.move(0, to)
        assert (slots.states[0], slots.free, slots.counts) == before
    assert sum(slots.counts) == 1
    assert (to in MOVES[at]) == ((at, to) in LEGAL)


def test_each_use_of_a_slot_is_a_generation_of_its_own() -> None:
    """Kills a generation that is shared by slots or stays the same (field report 19)."""
    slots = SlotTable(2)
    names = set()
    for _ in range(5):
        taken = [slots.take(), slots.take()]
        assert sorted(taken) == [0, 1]
        names |= {(slot, slots.generations[slot]) for slot in taken}
        for slot in taken:
            slots.move(slot, DRAINING)
            slots.move(slot, FREE)
    assert len(names) == 10
    assert min(generation for _, generation in names) == 1


def test_counts_name_every_slot_once() -> None:
    """Kills a count that is not the number of slots in that state (inv. 1)."""
    slots = SlotTable(4)
    for _ in range(3):
        slots.take()
    slots.move(0, HELD)
    slots.move(1, DRAINING)
    assert slots.counts == [1, 1, 1, 1, 0]
    assert slots.free == 1


def test_no_slot_is_taken_twice() -> None:
    """Kills a table that hands out what is in use."""
    slots = SlotTable(3)
    assert sorted(slots.take() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(IndexError):
        slots.take()
