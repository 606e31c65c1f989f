"""Who still owes an acknowledgement for which owner.

A :class:`Record` is one use of a slot, from reservation to free.  It names its *holders* (peers
it was delivered to) and the members it is still *waiting* for (ranks that have not attached, or
the next free competitor).  It is settled when both sets are empty (inv. 6).

A release is a named thing (inv. 5): it settles only what its sender holds, in that generation.
Anything else is counted as stale and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from asyncvmm._types import Key, Outcome

ANYONE = "*"
"""The member an owner waits for while no competitor has it.  No competitor can be called so."""

NOBODY: frozenset[Key] = frozenset()
ANYBODY: frozenset[Key] = frozenset((ANYONE,))

_complete: dict[tuple[Key, ...], Outcome] = {}
"""Outcomes without a flaw by who released: the same few come again and again."""


class PeerState(Enum):
    """Connection states, the same words on both sides."""

    CONNECTING = "connecting"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Record(msgspec.Struct, eq=False):
    """One use of a slot.

    A struct, because one is made for every owner and Python's own ``__init__`` takes twice as long.
    """

    slot: int
    generation: int
    start: int
    nbytes: int
    key: Key = 0
    batch: BatchRecord | None = None
    exported: bool = False
    """Held for those who show a ticket, not streamed."""
    proof: bytes = b""
    """What they must show; empty from its cancellation on."""
    ready: bytes = b""
    """The slot's ready event, for peers that have not seen it; empty if another's stands for it."""
    ready_slot: int = -1
    """The slot whose ready event stands for it, of the first owner written with it; -1: its own."""
    holders: set[int] = msgspec.field(default_factory=set)
    """Peer ids."""
    waiting: frozenset[Key] = NOBODY
    released: tuple[Key, ...] = ()
    released_by: tuple[tuple[int, int], ...] = ()
    """(peer id, lane) of each release whose event is a fence; none of a dead process."""
    release_slots: dict[int, int] | None = None
    """Peer id -> slot whose release event stands for its reads, where that is not its own."""
    refused: tuple[tuple[Key, str], ...] = ()
    lost: tuple[Key, ...] = ()
    acknowledgement: object = None
    """Belongs to the shell."""
    stamp: float = 0.0
    """The shell's clock at publication; at the loan's begin before that."""

    @property
    def published(self) -> bool:
        """Return whether it was published; otherwise it is a loan, or was given back."""
        return self.batch is not None

    @property
    def outcome(self) -> Outcome:
        """Return who let go of it so far, and how."""
        if self.refused or self.lost:
            return Outcome(self.released, self.refused, self.lost)
        found = _complete.get(self.released)
        if found is None:
            if len(_complete) >= 1024:
                _complete.clear()
            found = _complete[self.released] = Outcome(self.released)
        return found

    def __repr__(self) -> str:
        return f"Record(slot={self.slot}, generation={self.generation}, key={self.key!r})"


class BatchRecord(msgspec.Struct, eq=False):
    """Owners that were published together, and the message that says so."""

    number: int
    """Counts up in the order of publication."""
    records: Sequence[Record]
    data: bytes


@dataclass(slots=True)
class Tally:
    """What happened so far, for statistics.  Owners count once per consumer addressed."""

    batches: int = 0
    exported: int = 0
    cancelled: int = 0
    released: int = 0
    refused: int = 0
    lost: int = 0
    stale: int = 0
    """Messages that named what their sender does not hold: late, doubled, or made up."""
    reassigned: int = 0
    """Batches that one competitor had not taken and that went back for another."""


class Peer:
    """One attached consumer, or one that left owing something."""

    __slots__ = (
        "absent",
        "expected",
        "holds",
        "id",
        "knows",
        "lingers",
        "member",
        "releases",
        "stale",
        "state",
        "told",
        "untaken",
        "window",
    )

    def __init__(self, peer_id: int, member: Key, window: int) -> None:
        self.id = peer_id
        self.member = member
        self.window = window
        self.state = PeerState.CONNECTING
        self.absent = (
            False  # its link is gone, its process lives, and it holds or expects something
        )
        self.holds: dict[int, Record] = {}  # slot -> record, in order of delivery
        self.expected: dict[int, Record] = {}  # slot -> exported owner it has not redeemed
        self.untaken: dict[int, BatchRecord] = {}  # number -> batch (Compete)
        self.knows: set[int] = set()  # slots whose ready event it has
        self.lingers: int | None = None  # since its goodbye: owners that it still has views of
        self.told = False  # it has our goodbye: nothing more may be delivered to it
        self.releases = 0
        self.stale = 0

    @property
    def credit(self) -> int:
        """Return how many more batches it may have without having taken them."""
        return self.window - len(self.untaken)

    def find(self, slot: int, generation: int) -> Record | None:
        """Return the record it holds under that name; otherwise count a stale message."""
        record = self.holds.get(slot)
        if record is None or record.generation != generation:
            self.stale += 1
            return None
        return record

    def __repr__(self) -> str:
        return f"Peer({self.id}, {self.member!r}, {self.state.value}, holds={len(self.holds)})"
