"""Who still owes an acknowledgement for which owner.

A :class:`Record` is one use of a slot, from reservation to free.  It names its *holders* (peers
it was delivered to) and the members it is still *waiting* for (ranks that have not attached, or
the next free competitor).  It is settled when both sets are empty (inv. 6).

A release is a named thing (inv. 5): it settles only what its sender holds, in that generation.
Anything else is counted as stale and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from asyncvmm._types import Key, Outcome

ANYONE = "*"
"""The member an owner waits for while no competitor has it.  No competitor can be called so."""


class PeerState(Enum):
    """Connection states, the same words on both sides."""

    CONNECTING = "connecting"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Record:
    """One use of a slot."""

    __slots__ = (
        "acknowledgement",
        "batch",
        "generation",
        "holders",
        "key",
        "lost",
        "nbytes",
        "published",
        "refused",
        "released",
        "released_by",
        "slot",
        "stamp",
        "start",
        "waiting",
    )

    def __init__(self, slot: int, generation: int, start: int, nbytes: int) -> None:
        self.slot = slot
        self.generation = generation
        self.start = start
        self.nbytes = nbytes
        self.key: Key = 0
        self.batch: BatchRecord | None = None
        self.holders: set[int] = set()
        self.waiting: set[Key] = set()
        self.released: list[Key] = []
        self.released_by: list[int] = []  # peer ids, for their release events
        self.refused: list[tuple[Key, str]] = []
        self.lost: list[Key] = []
        self.published = False
        self.acknowledgement: object = None  # belongs to the shell
        self.stamp = 0.0  # the shell's clock at publication

    @property
    def outcome(self) -> Outcome:
        """Return who let go of it so far, and how."""
        return Outcome(tuple(self.released), tuple(self.refused), tuple(self.lost))

    def __repr__(self) -> str:
        return f"Record(slot={self.slot}, generation={self.generation}, key={self.key!r})"


class BatchRecord:
    """Owners that were published together, and the message that says so."""

    __slots__ = ("data", "handles", "records")

    def __init__(self, records: Sequence[Record], data: bytes, handles: Sequence[bytes]) -> None:
        self.records = records
        self.data = data
        self.handles = handles


class Peer:
    """One attached consumer, or one that left owing something."""

    __slots__ = (
        "absent",
        "holds",
        "id",
        "knows",
        "member",
        "releases",
        "stale",
        "state",
        "untaken",
        "window",
    )

    def __init__(self, peer_id: int, member: Key, window: int) -> None:
        self.id = peer_id
        self.member = member
        self.window = window
        self.state = PeerState.CONNECTING
        self.absent = False  # its link is gone, its process lives, and it holds something
        self.holds: dict[int, Record] = {}  # slot -> record, in order of delivery
        self.untaken: dict[int, BatchRecord] = {}  # first slot -> batch (Compete)
        self.knows: set[int] = set()  # slots whose ready event it has
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
