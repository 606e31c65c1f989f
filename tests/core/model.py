"""Who holds what, kept by hand: what both cores must agree with after every step.

It shares no code with the cores and is not clever: every owner has one table of what became of
each member it was addressed to, and everything else is looked up in those tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from asyncvmm._core import wire
from asyncvmm._types import Key
from tests.core.pair import UNIT, End, Pair

ANYONE = "*"


class Fate(Enum):
    """What became of an owner at one member it was addressed to."""

    WAITING = auto()
    HELD = auto()
    RELEASED = auto()
    REFUSED = auto()
    LOST = auto()


UNSETTLED = (Fate.WAITING, Fate.HELD)


class Stage(Enum):
    """Where an owner is on its way from a reservation to free."""

    FILLING = auto()
    OUT = auto()
    DRAINING = auto()
    STUCK = auto()  # its fence failed
    OVER = auto()


@dataclass(eq=False)
class Owner:
    """One use of a slot."""

    slot: int
    generation: int
    start: int
    nbytes: int
    key: int
    stage: Stage = Stage.FILLING
    fates: dict[Key, Fate] = field(default_factory=dict)
    holders: dict[Key, int] = field(default_factory=dict)  # member -> peer id, while HELD
    readers: set[int] = field(default_factory=set)  # peers whose reads its fences stand for
    batch: Batch | None = None

    @property
    def name(self) -> tuple[int, int]:
        """Slot and generation."""
        return self.slot, self.generation

    @property
    def units(self) -> range:
        """The units of the pool that it takes."""
        return range(self.start // UNIT, (self.start + self.nbytes) // UNIT)


@dataclass(eq=False)
class Batch:
    """Owners published together; ``number`` counts up in the order of publication."""

    number: int
    owners: list[Owner]
    taker: Side | None = None
    together: bool = False
    """Whether the event of the first stands for all."""


@dataclass(eq=False)
class Side:
    """One consumer, as the exporter sees it and as it sees itself."""

    end: End
    id: int
    member: Key
    window: int
    turn: int
    # what the exporter knows
    here: bool = True  # has its rank, or competes
    open: bool = False
    closing: bool = False
    absent: bool = False
    gone: bool = False
    told: bool = False
    lingers: int | None = None  # since its goodbye, of what it had taken
    owed_goodbye: bool = False
    untaken: list[Batch] = field(default_factory=list)
    due: deque[Batch] = field(default_factory=deque)  # to be said now
    knows: set[int] = field(default_factory=set)
    stale: int = 0
    releases: int = 0
    # what it knows itself
    linked: bool = True
    alive: bool = True
    leaving: bool = False
    ended: bool = False
    flight: deque[Batch] = field(default_factory=deque)  # sent and not arrived
    inbox: list[Batch] = field(default_factory=list)
    taken: list[Owner] = field(default_factory=list)
    last: int = 0


class Model:
    """The whole truth.  Methods are named for what happened; ``said`` and ``check`` judge."""

    def __init__(self, ranks: int | None, slots: int) -> None:
        self.ranks = ranks
        self.slots = slots
        self.owners: list[Owner] = []
        self.past: list[tuple[int, int]] = []  # names that are over
        self.sides: dict[int, Side] = {}
        self.pending: deque[Batch] = deque()  # Compete
        self.backlog: dict[Key, deque[Batch]] = {r: deque() for r in range(ranks or 0)}
        self.dead: set[int] = set()
        self.segments: set[int] = set()
        self.closing = False
        self.batches = 0
        self.stale = 0
        self.turns = 0

    # -- look-ups ----------------------------------------------------------------------------

    @property
    def competes(self) -> bool:
        """Whether the route is Compete."""
        return self.ranks is None

    def at(self, stage: Stage) -> list[Owner]:
        """Return the owners in a stage, oldest first."""
        return [owner for owner in self.owners if owner.stage is stage]

    def holds(self, side: Side) -> list[Owner]:
        """Return what the exporter believes a consumer to hold."""
        return [owner for owner in self.owners if side.id in owner.holders.values()]

    def named(self, slot: int, generation: int) -> Owner:
        """Return the owner in use under a name."""
        return next(owner for owner in self.owners if owner.name == (slot, generation))

    def free_runs(self, unit_count: int) -> list[int]:
        """Return the lengths in bytes of all maximal free runs."""
        taken = {unit for owner in self.owners for unit in owner.units}
        runs, run = [], 0
        for segment in range(unit_count):
            for unit in range(segment * 8, segment * 8 + 8):
                if segment in self.segments and unit not in taken:
                    run += 1
                else:
                    runs.append(run)
                    run = 0
        return [length * UNIT for length in (*runs, run) if length]

    @property
    def busy(self) -> bool:
        """Whether a batch may still go to somebody who is here."""
        return self.competes and (
            bool(self.pending) or any(side.untaken for side in self.sides.values() if side.here)
        )

    # -- the exporter's doings ---------------------------------------------------------------

    def reserved(self, slot: int, generation: int, start: int, nbytes: int) -> Owner:
        """Note a loan."""
        owner = Owner(slot, generation, start, nbytes, key=generation * 100 + slot)
        self.owners.append(owner)
        return owner

    def published(self, owners: list[Owner], members: Iterable[int], together: bool) -> None:
        """Note a batch and whom it is due at."""
        self.batches += 1
        batch = Batch(self.batches, owners, together=together)
        for owner in owners:
            owner.stage, owner.batch = Stage.OUT, batch
        if self.competes:
            self._wait_for_anyone(batch)
            self.pending.append(batch)
            return
        for rank in members:
            side = next((s for s in self.sides.values() if s.here and s.member == rank), None)
            if side is not None and side.open:
                self._give(side, batch)
                side.due.append(batch)
            else:
                for owner in owners:
                    owner.fates[rank] = Fate.WAITING
                self.backlog[rank].append(batch)

    def fence_failed(self, owner: Owner) -> None:
        """Note that it is not known whether an owner's reads are over."""
        owner.stage = Stage.STUCK
        self._retry(owner)

    def _retry(self, owner: Owner) -> None:
        """Forget the dead; what was stuck only for want of their fences drains again."""
        if owner.readers & self.dead:
            owner.readers -= self.dead
            if owner.stage is Stage.STUCK and not owner.readers:
                owner.stage = Stage.DRAINING

    def over(self, owner: Owner) -> None:
        """Note that an owner is free."""
        owner.stage = Stage.OVER
        self.owners.remove(owner)
        self.past.append(owner.name)

    def gave_up(self) -> None:
        """Note that nobody is waited for any longer."""
        waiting: list[tuple[Key, Batch]] = [(ANYONE, batch) for batch in self.pending]
        for rank, batches in self.backlog.items():
            waiting += [(rank, batch) for batch in batches]
            batches.clear()
        self.pending.clear()
        for member, batch in waiting:
            for owner in batch.owners:
                owner.fates[member] = Fate.REFUSED
                self._review(owner)

    def _give(self, side: Side, batch: Batch) -> None:
        for owner in batch.owners:
            owner.fates.pop(ANYONE, None)
            owner.fates[side.member] = Fate.HELD
            owner.holders[side.member] = side.id

    def _wait_for_anyone(self, batch: Batch) -> None:
        for owner in batch.owners:
            owner.fates = {ANYONE: Fate.WAITING}
            owner.holders.clear()

    def _review(self, owner: Owner) -> None:
        if not any(fate in UNSETTLED for fate in owner.fates.values()):
            owner.stage = Stage.DRAINING

    def _settle(self, side: Side, owner: Owner, fate: Fate) -> None:
        owner.fates[side.member] = fate
        del owner.holders[side.member]
        if owner.batch in side.untaken:
            side.untaken.remove(owner.batch)
        self._review(owner)
        if side.absent and not self.holds(side):
            side.absent, side.gone = False, True

    # -- comings and goings ------------------------------------------------------------------

    def admitted(self, end: End) -> Side:
        """Note a newcomer."""
        self.turns += 1
        side = Side(end, end.id, end.member, end.peer.window, self.turns)
        self.sides[side.id] = side
        return side

    def opened(self, side: Side) -> None:
        """Note that a newcomer may be sent batches."""
        if side.closing or side.gone:
            return
        side.open = True
        waiting = self.backlog.get(side.member, deque())
        while waiting:
            batch = waiting.popleft()
            self._give(side, batch)
            side.due.append(batch)

    def died(self, side: Side) -> None:
        """Note that a process is gone, and the exporter knows."""
        side.alive = side.linked = False
        side.flight.clear()
        self.dead.add(side.id)
        self._left(side)
        for owner in self.holds(side):
            self._settle(side, owner, Fate.LOST)
        side.absent, side.gone = False, True
        for owner in (*self.at(Stage.STUCK), *self.at(Stage.OUT)):
            self._retry(owner)

    def vanished(self, side: Side) -> None:
        """Note that a link is gone and the process lives."""
        side.linked = False
        side.flight.clear()
        side.inbox.clear()
        if not side.gone:
            side.here, side.closing = False, True
            if side.lingers == 0:
                for owner in self.holds(side):
                    self._settle(side, owner, Fate.REFUSED)
            side.absent = bool(self.holds(side))
            side.gone = not side.absent

    def _left(self, side: Side) -> None:
        side.here = False
        for batch in side.untaken:
            self._wait_for_anyone(batch)
        self.pending = deque(sorted((*self.pending, *side.untaken), key=lambda batch: batch.number))
        side.untaken.clear()
        side.closing = True

    # -- packets -----------------------------------------------------------------------------

    def heard(self, side: Side, messages: Sequence[wire.FromConsumer]) -> None:
        """Note what the exporter was told; what names nothing its sender holds is stale."""
        for message in messages:
            if side.gone:
                self.stale += 1
            elif isinstance(message, wire.Goodbye):
                side.owed_goodbye = not side.closing and not side.told
                if side.lingers is None:
                    side.lingers = message.lingering
                self._left(side)
                if side.absent and not self.holds(side):
                    side.absent, side.gone = False, True
            else:
                self._heard_of_owner(side, message)

    def _heard_of_owner(self, side: Side, message: wire.FromConsumer) -> None:
        # Tickets have tests of their own: nothing is exported here.
        assert isinstance(message, wire.Take | wire.Release | wire.Refuse)
        self._heard_name(side, message, (message.slot, message.generation))
        for name in message.others if isinstance(message, wire.Release) else ():
            if side.gone:
                self.stale += 1
                side.stale += 1
            else:
                self._heard_name(side, message, name)

    def _heard_name(self, side: Side, message: wire.FromConsumer, name: tuple[int, int]) -> None:
        owner = next((owner for owner in self.holds(side) if owner.name == name), None)
        if owner is None:
            self.stale += 1
            side.stale += 1
        elif isinstance(message, wire.Take):
            if owner.batch in side.untaken:
                side.untaken.remove(owner.batch)
        elif isinstance(message, wire.Release):
            side.releases += 1
            if side.lingers:
                side.lingers -= 1
            owner.readers.add(side.id)
            self._settle(side, owner, Fate.RELEASED)
        else:
            self._settle(side, owner, Fate.REFUSED)

    def arrived(self, side: Side, messages: Sequence[wire.FromExporter]) -> list[Batch]:
        """Note what a consumer was told; batches arrive in the order they were sent."""
        batches = []
        for message in messages:
            if isinstance(message, wire.Deliver):
                batch = side.flight.popleft()
                assert [frame.key for frame in message.owners] == [o.key for o in batch.owners]
                batches.append(batch)
                if not side.leaving:
                    side.inbox.append(batch)
            elif isinstance(message, wire.Goodbye):
                assert not side.flight, f"{side.end} has its goodbye before its last batch"
                side.ended = True
        return batches

    def took(self, side: Side) -> Batch:
        """Note that a consumer took its oldest batch: nobody else alive has it."""
        batch = side.inbox.pop(0)
        side.taken += batch.owners
        if self.competes:
            assert batch.taker is None or not batch.taker.alive, f"{batch} was taken twice"
        batch.taker = side
        return batch

    # -- judging what the exporter says ------------------------------------------------------

    def said(self, pair: Pair, *, exact: bool = True) -> None:
        """Judge what the exporter said after one input.

        ``exact`` is false after a packet of several messages: whom each batch was assigned to
        then depends on what was known in between.
        """
        for peer_id, message in pair.sent:
            side = self.sides[peer_id]
            if isinstance(message, wire.Deliver):
                self._said_batch(side, message, exact=exact)
            elif isinstance(message, wire.Ready):
                assert message.slot not in side.knows, f"{side.end} was sent an event twice"
                assert message.handle == b"event %d" % message.slot
                side.knows.add(message.slot)
            else:
                assert isinstance(message, wire.Goodbye)
                assert not side.told, f"{side.end} has two goodbyes"
                assert side.owed_goodbye or (self.closing and side.open and not side.closing)
                assert side.owed_goodbye or not self.busy, f"{side.end} might get another batch"
                assert not side.due
                side.told, side.owed_goodbye = True, False
        for side in self.sides.values():
            assert not side.due, f"{side.end} was not sent {len(side.due)} batches"
            assert not side.owed_goodbye, f"{side.end} was not answered its goodbye"
            if self._may_get(side):
                assert not self.pending, f"{side.end} is free and batches are pending"
                assert side.told == (self.closing and not self.busy)
            elif side.open and not side.closing and self.closing and not self.busy:
                assert side.told

    def _may_get(self, side: Side) -> bool:
        return (
            self.competes
            and side.open
            and side.here
            and not side.told
            and len(side.untaken) < side.window
        )

    def _said_batch(self, side: Side, message: wire.Deliver, *, exact: bool) -> None:
        batch = self.named(message.owners[0].slot, message.owners[0].generation).batch
        assert batch is not None
        assert [(f.slot, f.generation, f.start, f.nbytes, f.key) for f in message.owners] == [
            (o.slot, o.generation, o.start, o.nbytes, o.key) for o in batch.owners
        ]
        events = batch.owners[:1] if batch.together else batch.owners
        assert all(owner.slot in side.knows for owner in events), "no event was sent before"
        assert not side.told, f"{side.end} got a batch after its goodbye"
        if self.competes:
            self._assigned(side, batch, exact=exact)
        else:
            assert side.due, f"{side.end} got a batch that it was not to get"
            assert side.due.popleft() is batch, f"{side.end} got batches in another order"
            assert batch.number > side.last
            side.last = batch.number
        if side.linked:
            side.flight.append(batch)

    def _assigned(self, side: Side, batch: Batch, *, exact: bool) -> None:
        assert self.pending, "a batch was assigned that somebody has"
        assert self.pending.popleft() is batch, "a younger batch went first"
        assert self._may_get(side), f"{side.end} may not get a batch"
        if exact:
            freest = min(
                (other for other in self.sides.values() if self._may_get(other)),
                key=lambda other: (len(other.untaken), other.turn),
            )
            assert freest is side, f"{freest.end} was freer than {side.end}"
        self.turns += 1
        side.turn = self.turns
        side.untaken.append(batch)
        self._give(side, batch)
