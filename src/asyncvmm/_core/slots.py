"""The slot table: which state each slot is in, and which moves are legal.

All transitions of a slot are in ``MOVES`` below, and nothing in this module knows why a slot
moves::

    FREE -> FILLING -> HELD -> DRAINING -> FREE      HELD <-> QUARANTINED -> DRAINING
                  \\----------------^  given up unpublished: the device may still be writing
                                     DRAINING -> QUARANTINED: its fence can no longer be asked

A quarantined slot passes through DRAINING on its way back, because a late release still has a
fence to wait for.  A generation names one use of a slot; it rises when the slot is taken.
"""

from __future__ import annotations

from enum import IntEnum

from asyncvmm._errors import LocalProtocolError


class SlotState(IntEnum):
    """The five states; a slot is in exactly one (inv. 1)."""

    FREE = 0
    FILLING = 1
    HELD = 2
    DRAINING = 3
    QUARANTINED = 4


# Looking a member up in its class costs more than the rest of a move.
FREE, FILLING, HELD, DRAINING, QUARANTINED = SlotState

MOVES: dict[SlotState, frozenset[SlotState]] = {
    FREE: frozenset(),  # only by take(), which also begins a generation
    FILLING: frozenset({HELD, DRAINING}),
    HELD: frozenset({DRAINING, QUARANTINED}),
    DRAINING: frozenset({FREE, QUARANTINED}),
    QUARANTINED: frozenset({HELD, DRAINING}),
}
"""Where a slot may go from each state; anything else is a bug here."""

_ALLOWED = tuple(tuple(MOVES[state]) for state in SlotState)
"""The same by number: hashing a member of an enumeration is a call into Python."""


class SlotTable:
    """States and generations of a fixed number of slots."""

    __slots__ = ("generations", "states", "unused")

    def __init__(self, slots: int) -> None:
        self.states = [FREE] * slots
        self.generations = [0] * slots
        self.unused = list(range(slots - 1, -1, -1))  # a stack: the last one used is warm

    @property
    def free(self) -> int:
        """Return how many slots are free."""
        return len(self.unused)

    @property
    def counts(self) -> list[int]:
        """Return how many slots are in each state, in the order of :class:`SlotState`."""
        return [self.states.count(state) for state in SlotState]

    def take(self) -> int:
        """Move a free slot to FILLING, begin its next generation, return it."""
        slot = self.unused.pop()
        self.generations[slot] += 1
        self.states[slot] = FILLING
        return slot

    def move(self, slot: int, to: SlotState) -> None:
        """Move a slot along the table."""
        at = self.states[slot]
        if to not in _ALLOWED[at]:
            raise LocalProtocolError(f"slot {slot} may not go from {at.name} to {to.name}")
        self.states[slot] = to
        if to is FREE:
            self.unused.append(slot)
