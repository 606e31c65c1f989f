"""Why somebody waits for room: who holds what, since when, and what would free it.

Everything here is worked out when it is asked for; sending costs nothing more for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncvmm._core.ledger import ANYONE, Peer, PeerState, Record
from asyncvmm._core.slots import SlotState
from asyncvmm._exporter.fencing import READY
from asyncvmm._logs import Once
from asyncvmm._types import Key

if TYPE_CHECKING:
    from asyncvmm._exporter.lending import Lending as Exporter

logger = logging.getLogger("asyncvmm.exporter")

Kind: TypeAlias = Literal[
    "held", "untaken", "lingering", "quarantined", "unattached", "unclaimed", "unredeemed",
    "draining", "copying", "filling", "broken",
]  # fmt: skip

Keeper: TypeAlias = tuple[Kind, Key | None, int]
"""How, by whom, and the id of the peer, or one of the two below."""

OURS, GONE = -1, -2

_SAYS: dict[Kind, tuple[str, str]] = {
    "held": (
        "holds {owners}",
        "it has to release them and to drop its views (its own statistics() count those as "
        "viewed), or to end; look whether its process stands still",
    ),
    "untaken": (
        "was sent {owners} that it has not begun",
        "it has to receive them, or to end; look whether its process stands still",
    ),
    "lingering": (
        "said goodbye, and its views still keep {owners}",
        "those views have to die there, or the process has to end",
    ),
    "quarantined": (
        "lost its connection, its process lives, and it holds {owners}",
        "it has to let go of them over a new connection, which it makes by itself, or to end",
    ),
    "unattached": (
        "is not attached, and {owners} wait for it",
        "it has to connect; give consumer_count or to= the ranks that really come",
    ),
    "unclaimed": (
        "has credit, and {owners} wait for one that has",
        "a consumer has to connect or to take what it was sent",
    ),
    "unredeemed": (
        "has yet to redeem the ticket of {owners}",
        "it has to redeem them or to acknowledge them unread; cancel() here withdraws them",
    ),
    "draining": (
        "let go of {owners} on which its device still works",
        "the kernels queued ahead of its release have to end",
    ),
    "copying": (
        "gave up {owners} into which it still copies or writes",
        "that work has to end; it does by itself",
    ),
    "filling": (
        "fills {owners}",
        "publish what was reserved, or leave its block",
    ),
    "broken": (
        "can no longer ask about {owners}: the driver refuses the fence",
        "the consumers that read them have to end, or this exporter has to be opened anew",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Some owners that are not back, and the one party that keeps them."""

    kind: Kind
    """How they are kept: held, untaken, lingering, quarantined, unattached, unclaimed, unredeemed,
    draining, copying, filling or broken."""
    member: Key | None
    """A rank or a name; None for the exporter's own process, or for "no consumer"."""
    pid: int
    """0 where there is no process to look at, or it lives in another pid namespace."""
    owners: int
    nbytes: int
    since: float
    """Seconds since the oldest of them was published, or reserved if it was not."""
    oldest: Key | None
    """The key of the oldest; None while it was not published."""
    remedy: str
    """What would free them."""

    @property
    def who(self) -> str:
        """Name the party, as ``rank 0 (pid 4711)``."""
        if self.kind == "unclaimed":
            return "no consumer"
        if self.kind == "unredeemed" and self.member is None:
            return "a consumer"
        if self.member is None:
            return "this process"
        name = f"rank {self.member}" if isinstance(self.member, int) else f"{self.member!r:.80}"
        return f"{name} (pid {self.pid})" if self.pid else name

    def __str__(self) -> str:
        owners = f"{self.owners} owner{'s' * (self.owners != 1)} ({self.nbytes:,} bytes)"
        says = _SAYS[self.kind][0].format(owners=owners)
        oldest = "" if self.oldest is None else f" ({self.oldest!r:.80})"
        return f"{self.who} {says}, the oldest{oldest} for {self.since:.1f} s"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the next owner has to wait, if it has to; ``str()`` of it is one line."""

    waiting: int
    """Sends and reservations that wait for room now."""
    waited: float
    """Seconds that the first of them has waited."""
    needed: int
    """Bytes that the first of them waits for; 0 if nobody waits."""
    needed_slots: int
    """Slots that it waits for, one for each of its owners; 0 if nobody waits."""
    lacks: Literal["nothing", "slot", "gap"]
    """What is not there: free slots, or free bytes in large enough pieces."""
    slots: int
    free_slots: int
    pool_bytes: int
    free_bytes: int
    largest_gap: int
    obstacles: tuple[Obstacle, ...]
    """Who keeps what, the oldest first."""

    def __str__(self) -> str:
        if self.waiting:
            several = f" in {self.needed_slots} owners" if self.needed_slots > 1 else ""
            begin = (
                f"{self.waiting} call{'s wait' if self.waiting > 1 else ' waits'} for room, the "
                f"first for {self.waited:.1f} s and {self.needed:,} bytes{several}: {self._lack()}"
            )
        else:
            begin = f"nobody waits: {self._lack()}"
        parts = [f"{each}; {each.remedy}" for each in self.obstacles]
        return ". ".join([begin, *parts])

    def _lack(self) -> str:
        if self.lacks == "slot":
            free = f"only {self.free_slots}" if self.free_slots else "none"
            return f"{free} of {self.slots} slots {'are' if self.free_slots > 1 else 'is'} free"
        pool = f"{self.free_bytes:,} of {self.pool_bytes:,} bytes are free"
        if self.lacks == "gap":
            return f"{pool}, the largest gap is {self.largest_gap:,}"
        return f"{self.free_slots} of {self.slots} slots and {pool}"


def explain(exporter: Exporter) -> Explanation:
    """Look at the pool, and at everybody who keeps something of it."""
    core, room = exporter._core, exporter._room
    needed = room.needed
    lacks: Literal["nothing", "slot", "gap"] = "nothing"
    if core.slots.free < max(len(needed), 1):
        lacks = "slot"
    elif not core.fit(needed or (1,)):
        lacks = "gap"
    return Explanation(
        waiting=len(room),
        waited=room.oldest_wait,
        needed=sum(needed),
        needed_slots=len(needed),
        lacks=lacks,
        slots=len(core.slots.states),
        free_slots=core.slots.free,
        pool_bytes=core.bytes.capacity,
        free_bytes=core.bytes.free_bytes,
        largest_gap=core.bytes.largest_gap,
        obstacles=_obstacles(exporter),
    )


def _obstacles(exporter: Exporter) -> tuple[Obstacle, ...]:
    groups: dict[Keeper, list[Record]] = {}
    for record in exporter._core.records.values():
        for found in _keepers(exporter, record):
            groups.setdefault(found, []).append(record)
    now = monotonic()
    obstacles = []
    for (kind, member, peer), records in groups.items():
        oldest = min(records, key=lambda record: record.stamp or now)
        obstacles.append(
            Obstacle(
                kind,
                member,
                _pid(exporter, peer),
                owners=len(records),
                nbytes=sum(record.nbytes for record in records),
                since=now - (oldest.stamp or now),
                oldest=oldest.key if oldest.published else None,
                remedy=_SAYS[kind][1],
            )
        )
    return tuple(sorted(obstacles, key=lambda each: -each.since))


def _keepers(exporter: Exporter, record: Record) -> Iterator[Keeper]:
    """Yield how and by whom one owner is kept, and the peer whose process it is."""
    core = exporter._core
    state = core.slots.states[record.slot]
    if state is SlotState.FILLING:
        yield "filling", None, OURS
    elif state is SlotState.DRAINING:
        yield from _drainers(exporter, record)
    elif not record.holders and not record.waiting:
        yield "broken", None, OURS
    for holder in sorted(record.holders):
        peer = core.peers[holder]
        yield _how(peer, record), peer.member, peer.id
    for member in sorted(record.waiting, key=str):
        yield _awaited(exporter, record, member)


def _awaited(exporter: Exporter, record: Record, member: Key) -> Keeper:
    """Return as what an owner waits for a member that does not hold it."""
    if not record.exported:
        return ("unclaimed", None, GONE) if member == ANYONE else ("unattached", member, GONE)
    for peer in exporter._core.peers.values():
        if peer.member == member and peer.expected.get(record.slot) is record:
            return "quarantined" if peer.absent else "unredeemed", member, peer.id
    return "unredeemed", None if member == ANYONE else member, GONE


def _pid(exporter: Exporter, peer_id: int) -> int:
    if peer_id == OURS:
        return exporter._made_in
    connection = exporter._connections.open.get(peer_id)
    return connection.identity.pid if connection else 0


def _how(peer: Peer, record: Record) -> Kind:
    if peer.absent:
        return "quarantined"
    if peer.state is PeerState.CLOSING:
        return "lingering"
    if record.batch is not None and record.batch.number in peer.untaken:
        return "untaken"
    return "held"


def _drainers(exporter: Exporter, record: Record) -> Iterator[Keeper]:
    peers = exporter._draining.pending(record)
    ours = peers <= {READY}  # also while a copy in a worker thread is all that is waited for
    if ours:
        yield "copying", None, OURS
    # Who released it is known by name even if it has left since.
    members = dict(zip((peer for peer, _ in record.released_by), record.released, strict=False))
    for peer in sorted(peers - {READY}):
        known = exporter._core.peers.get(peer)
        member = known.member if known else members.get(peer, "a consumer that left")
        yield "draining", member, peer


class Telling:
    """The one line in the log for those who wait too long, once per cause."""

    def __init__(self, name: str, explain: Callable[[], Explanation]) -> None:
        self._name = name
        self._explain = explain
        self._once = Once(logger)

    def tell(self) -> None:
        """Say why the head of the queue waits, unless the same was said already."""
        explanation = self._explain()
        first = explanation.obstacles[0] if explanation.obstacles else None
        cause = (explanation.lacks, first and (first.kind, first.member, first.pid))
        if self._once.fresh(cause):
            logger.warning(
                "exporter %r: %s", self._name, explanation, extra={"explanation": explanation}
            )
