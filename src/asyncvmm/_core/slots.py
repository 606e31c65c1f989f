"""The slot table: which state each slot is in, and which moves are legal.

All transitions of a slot are in ``MOVES`` below, and nothing in this module knows why a slot
moves::

    FREE -> FILLING -> HELD -> DRAINING -> FREE      HELD -> QUARANTINED -> DRAINING
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


_S = SlotState
MOVES: frozenset[tuple[SlotState, SlotState]] = frozenset(
    {
        (_S.FREE, _S.FILLING),
        (_S.FILLING, _S.HELD),
        (_S.FILLING, _S.DRAINING),
        (_S.HELD, _S.DRAINING),
        (_S.DRAINING, _S.FREE),
        (_S.HELD, _S.QUARANTINED),
        (_S.QUARANTINED, _S.HELD),
        (_S.QUARANTINED, _S.DRAINING),
        (_S.DRAINING, _S.QUARANTINED),
    }
)


class SlotTable:
    """States and generations of a fixed number of slots."""

    __slots__ = ("_free", "counts", "generations", "states")

    def __init__(self, slots: int) -> None:
        self.states = [SlotState.FREE] * slots
        self.generations = [0] * slots
        self.counts = [slots, 0, 0, 0, 0]
        self._free = list(range(slots - 1, -1, -1))  # a stack: the last one used is warm

    @property
    def free(self) -> int:
        """Return how many slots are free."""
        return len(self._free)

    def take(self) -> int:
        """Move a free slot to FILLING, begin its next generation, return it."""
        slot = self._free.pop()
        self.generations[slot] += 1
        self._set(slot, SlotState.FREE, SlotState.FILLING)
        return slot

    def move(self, slot: int, to: SlotState) -> None:
        """Move a slot along the table; anything else is a bug here."""
        at = self.states[slot]
        if (at, to) not in MOVES or at is SlotState.FREE:
            raise LocalProtocolError(f"slot {slot} may not go from {at.name} to {to.name}")
        self._set(slot, at, to)
        if to is SlotState.FREE:
            self._free.append(slot)

    def _set(self, slot: int, at: SlotState, to: SlotState) -> None:
        self.states[slot] = to
        self.counts[at] -= 1
        self.counts[to] += 1
