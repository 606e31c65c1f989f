"""Hypothesis drives both cores, joined in memory, through every order of events it can think of.

Each machine has one rule, ``act``, and chooses what to do by weight.  With a rule for each kind of
event hypothesis would leave out a random half of them in each run, and chooses the rest with equal
odds: then hardly any owner lives long enough to be taken, and planted bugs live on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from asyncvmm._core import wire
from asyncvmm._errors import ClosedError, RankError
from asyncvmm._types import Broadcast, Compete
from tests.core.judge import check
from tests.core.model import Batch, Fate, Model, Side, Stage
from tests.core.pair import UNIT, Pair

T = TypeVar("T")
Spoken: TypeAlias = tuple[type[wire.FromConsumer], tuple[int, int]]
MAX_SEGMENTS = 4
SLOTS = st.integers(2, 8)
SIZES = (1, 1, 2, 2, 3, 6)
COUNTS = (1, 1, 1, 2, 1, 3)
WINDOWS = (3, 1, 2, 1, 2, 4)
MOST_SIDES = 8
"""Consumers of one run; more would only slow it down."""

WEIGHTS = {
    "reserve": 12,
    "reserve_all": 4,
    "send": 14,
    "deliver_down": 16,
    "take": 14,
    "let_go": 14,
    "let_go_together": 6,
    "deliver_up": 16,
    "fence_done": 10,
    "fences_done": 4,
    "come": 12,
    "open": 2,
    "lie": 8,
    "abandon": 1,
    "leave": 2,
    "say_goodbye_again": 1,
    "vanish": 4,
    "die": 3,
    "fence_failed": 2,
    "add_segment": 2,
    "remove_segment": 2,
    "say_goodbye": 1,
    "give_up_waiting": 1,
}
KINDS = st.sampled_from([kind for kind, weight in WEIGHTS.items() for _ in range(weight)])
FLOW = ("fence_done", "deliver_up", "let_go", "take", "deliver_down", "reserve", "send")
"""The life of an owner, from its end.  Where one of these is chosen and cannot happen, the one
after it here is tried, so that every step moves something on."""
SLOW = st.sets(st.sampled_from(FLOW[:-2]), max_size=2)
"""What happens seldom in one run, so that something piles up before it."""

PICK = st.integers(0, 59)
"""Picks one of up to five with equal odds: 60 is a multiple of 2, 3, 4 and 5."""


def name_of(message: wire.FromConsumer) -> tuple[int, int]:
    """Return which owner a message is about."""
    if isinstance(message, wire.Goodbye):
        return message.lingering, 0
    return message.slot, message.generation


class Machine(RuleBasedStateMachine):
    """What both routes share; see the two machines below.

    Every kind of event is a method of two numbers, from which it picks what it happens to; where
    there is nothing that it could happen to, nothing happens.
    """

    pair: Pair
    model: Model
    broken = True
    """Whether a step has failed, so that the end is not judged as well."""
    slow: set[str]
    happened = False
    """Whether the last step found something that it could happen to."""

    def begin(self, pair: Pair, model: Model, *, attached: int, slow: set[str]) -> None:
        """Start with a pool of two segments and, often, with some consumers ready for work."""
        self.pair, self.model, self.slow = pair, model, slow
        model.segments = set(pair.segments)
        for member in range(attached):
            self.admit(None if model.competes else member, WINDOWS[member], opened=True)
            self.deliver_down(member, 0)
        self.judged()

    @rule(kind=KINDS, number=PICK, which=PICK)
    def act(self, kind: str, number: int, which: int) -> None:
        """Let one thing happen, and judge what it led to."""
        self.broken = True
        self.happened = False
        at = FLOW.index(kind) if kind in FLOW else 0
        for instead in (kind, *FLOW[at + 1 :], *FLOW[:at]):
            if instead in self.slow and which % 6:
                continue
            act: Callable[[int, int], None] = getattr(self, instead)
            act(number, which)
            if self.happened:
                break
        self.broken = False

    def judged(self, *spoken: Spoken, exact: bool = True) -> None:
        """Judge what the last input led to; ``spoken`` is what consumers must have said."""
        self.happened = True
        pair = self.pair
        assert tuple((type(said), name_of(said)) for _, said in pair.spoken) == spoken
        self.model.said(pair, exact=exact)
        check(pair, self.model)
        pair.sent.clear()
        pair.spoken.clear()

    def sides(self, test: Callable[[Side], object]) -> list[Side]:
        """Return the consumers that pass a test, in order of their coming."""
        return [side for side in self.model.sides.values() if test(side)]

    @staticmethod
    def pick(things: Sequence[T], number: int) -> T | None:
        """Return one of several things, or None if there are none."""
        return things[number % len(things)] if things else None

    # -- the exporter ------------------------------------------------------------------------

    def reserve(self, number: int, which: int) -> None:
        """A loan is refused only if no slot or no gap is there (field report 27)."""
        nbytes = SIZES[number % 6] * UNIT
        gap = max(self.model.free_runs(MAX_SEGMENTS), default=0)
        fits = len(self.model.owners) < self.model.slots and gap >= nbytes
        assert self.pair.exporter.fit([nbytes]) == fits
        record = self.pair.exporter.reserve(nbytes)
        assert (record is not None) == fits
        if record is None:
            return
        self.model.reserved(record.slot, record.generation, record.start, record.nbytes)
        self.judged()

    def reserve_all(self, number: int, which: int) -> None:
        """Several loans are refused only if no slots or no gaps for all of them are there."""
        sizes = [size * UNIT for size in (SIZES[number % 6], SIZES[which % 6], 1)]
        gaps = sorted(self.model.free_runs(MAX_SEGMENTS))
        fits = len(self.model.owners) + len(sizes) <= self.model.slots
        for size in sizes:
            gap = next((gap for gap in gaps if gap >= size), None)
            if gap is None:
                fits = False
                break
            gaps.remove(gap)
            gaps = sorted([*gaps, gap - size])
        assert self.pair.exporter.fit(sizes) == fits
        records = self.pair.exporter.reserve_all(sizes)
        assert (records is not None) == fits
        for record in records or ():
            self.model.reserved(record.slot, record.generation, record.start, record.nbytes)
        self.judged()

    def send(self, number: int, which: int) -> None:
        """Some loans are published as one batch, to all ranks or to some.

        Each has its event, or the first one's stands for all.
        """
        owners = self.model.at(Stage.FILLING)[: COUNTS[which % 6]]
        if not owners:
            return
        to = self.narrow(number)
        together = number // 8 % 2 == 0
        described = [
            (
                self.pair.exporter.records[owner.slot],
                owner.key,
                [wire.Feature("x", "uint8", (owner.nbytes,))],
                b"",
                b"" if together and owner is not owners[0] else b"event %d" % owner.slot,
            )
            for owner in owners
        ]
        try:
            self.pair.exporter.publish_batch(described, to=to)
        except ClosedError:
            assert self.model.closing
        else:
            assert not self.model.closing
            self.pair.collect()
            self.model.published(owners, to or range(self.model.ranks or 0), together)
        self.judged()

    def narrow(self, number: int) -> tuple[int, ...] | None:
        """Return whom the next batch is for."""
        raise NotImplementedError

    def abandon(self, number: int, which: int) -> None:
        """A loan may end unpublished."""
        if owner := self.pick(self.model.at(Stage.FILLING), number):
            self.pair.abandon(self.pair.exporter.records[owner.slot])
            owner.stage = Stage.DRAINING
            self.judged()

    def fence_done(self, number: int, which: int) -> None:
        """Fences are done in any order."""
        if owner := self.pick(self.model.at(Stage.DRAINING), number):
            self.pair.fence_done(self.pair.exporter.records[owner.slot])
            self.model.over(owner)
            self.judged()

    def fences_done(self, number: int, which: int) -> None:
        """Several fences are found to be done at once."""
        if owners := self.model.at(Stage.DRAINING)[:: -1 if number % 2 else 1]:
            self.pair.fence_done(*[self.pair.exporter.records[owner.slot] for owner in owners])
            for owner in owners:
                self.model.over(owner)
            self.judged()

    def fence_failed(self, number: int, which: int) -> None:
        """A fence may become a thing that cannot be asked."""
        owner = self.pick(self.model.at(Stage.DRAINING), number)
        if owner and not self.model.at(Stage.STUCK):
            self.pair.fence_failed(self.pair.exporter.records[owner.slot])
            self.model.fence_failed(owner)
            self.judged()

    def say_goodbye(self, number: int, which: int) -> None:
        """The exporter closes; what is out comes back as before."""
        self.model.closing = True
        self.pair.say_goodbye()
        self.judged()

    def give_up_waiting(self, number: int, which: int) -> None:
        """The exporter waits no longer for those who are not there."""
        self.model.gave_up()
        self.pair.give_up_waiting()
        self.judged()

    def add_segment(self, number: int, which: int) -> None:
        """The pool grows."""
        if len(self.model.segments) < MAX_SEGMENTS:
            self.model.segments.add(self.pair.add_segment().index)
            self.judged()

    def remove_segment(self, number: int, which: int) -> None:
        """The pool shrinks only by what is wholly free."""
        index = self.pick(sorted(self.model.segments), number)
        if index is not None:
            used = {unit // 8 for owner in self.model.owners for unit in owner.units}
            assert self.pair.remove_segment(index) == (index not in used)
            if index not in used:
                self.model.segments.remove(index)
            self.judged()

    # -- consumers ---------------------------------------------------------------------------

    def come(self, number: int, which: int) -> None:
        """A consumer comes, for a seat that may be taken."""
        raise NotImplementedError

    def admit(self, rank: int | None, window: int, *, opened: bool) -> None:
        """Let a consumer in, if there is room for it."""
        if len(self.model.sides) == MOST_SIDES:
            return
        seated = [side.member for side in self.sides(lambda side: side.here)]
        try:
            end = self.pair.admit(rank, window=window)
        except RankError:
            assert rank in seated
            return
        assert rank not in seated
        side = self.model.admitted(end)
        if opened:
            self.model.opened(side)
            self.pair.open(end)
        self.judged()

    def open(self, number: int, which: int) -> None:
        """An admitted consumer has mapped the pool, unless it has gone meanwhile."""
        if side := self.pick(self.sides(lambda side: side.alive and not side.open), number):
            self.model.opened(side)
            self.pair.open(side.end)
            self.judged()

    def deliver_down(self, number: int, which: int) -> None:
        """One packet arrives at a consumer."""
        if side := self.pick(self.sides(lambda side: side.end.down), number):
            batches = self.model.arrived(side, self.pair.deliver_down(side.end))
            declined = batches if side.leaving else []
            self.judged(*self.declined(declined))

    def declined(self, batches: list[Batch]) -> list[Spoken]:
        """Return what a leaving consumer must say of batches that it has not taken.

        Nothing under Compete: they are to go to another.
        """
        if self.model.competes:
            return []
        return [(wire.Refuse, owner.name) for batch in batches for owner in batch.owners]

    def deliver_up(self, number: int, which: int) -> None:
        """One packet arrives at the exporter, also one whose sender lost its link meanwhile."""
        if side := self.pick(self.sides(lambda side: side.end.up), number):
            messages = self.pair.deliver_up(side.end)
            self.model.heard(side, messages)
            several = any(isinstance(each, wire.Release) and each.others for each in messages)
            self.judged(exact=len(messages) == 1 and not several)

    def take(self, number: int, which: int) -> None:
        """A consumer takes its oldest batch."""
        if side := self.pick(self.sides(lambda side: side.alive and side.inbox), number):
            taken = self.pair.take(side.end)
            assert taken is not None
            assert [frame.key for frame in taken] == [owner.key for owner in side.inbox[0].owners]
            first = self.model.took(side).owners[0]
            self.judged(*([(wire.Take, first.name)] if self.model.competes else []))

    def let_go(self, number: int, which: int) -> None:
        """A consumer lets go of one owner; if its link is cut, late, or nobody hears of it."""
        side = self.pick(self.sides(lambda side: side.alive and side.taken), number)
        if side is None:
            return
        owner = side.taken.pop(which % len(side.taken))
        frame = side.end.core.held[owner.slot]
        if number % 4:
            self.pair.release(side.end, frame)
        else:
            self.pair.refuse(side.end, frame)
        if not side.linked and number % 2:
            message = wire.Release(*owner.name)
            self.pair.inject(side.end, message)
            self.model.heard(side, [message])
        kind = wire.Release if number % 4 else wire.Refuse
        self.judged(*([(kind, owner.name)] if side.linked else []))

    def let_go_together(self, number: int, which: int) -> None:
        """A consumer lets go of all that it has, in one message."""
        side = self.pick(self.sides(lambda side: side.alive and len(side.taken) > 1), number)
        if side is None:
            return
        owners, side.taken = side.taken, []
        first, *others = [side.end.core.held[owner.slot] for owner in owners]
        self.pair.release(side.end, first, others)
        self.judged(*([(wire.Release, owners[0].name)] if side.linked else []))

    def leave(self, number: int, which: int) -> None:
        """A consumer says goodbye."""
        if side := self.pick(self.sides(lambda side: side.linked and not side.leaving), number):
            self.pair.leave(side.end)
            side.leaving = True
            declined = self.declined(side.inbox)
            side.inbox.clear()
            self.judged(*declined, (wire.Goodbye, (len(side.taken), 0)))

    def vanish(self, number: int, which: int) -> None:
        """A socket is lost and its process lives: nothing becomes free (inv. 7)."""
        if side := self.pick(self.sides(lambda side: side.linked), number):
            self.model.vanished(side)
            self.pair.vanish(side.end)
            self.judged()

    def die(self, number: int, which: int) -> None:
        """A process ends, with or without its link (field report 11)."""
        if side := self.pick(self.sides(lambda side: side.alive), number):
            self.model.died(side)
            self.pair.die(side.end)
            self.judged()

    # -- those who lie -----------------------------------------------------------------------

    def lie(self, number: int, which: int) -> None:
        """A message that names what its sender does not hold changes nothing (inv. 5).

        Released twice, of an old generation, never there, or somebody else's (field report 19).
        """
        side = self.pick(self.sides(lambda side: side.alive), number)
        if side is None:
            return
        held = [owner.name for owner in self.model.holds(side)]
        names = [owner.name for owner in self.model.owners if owner.name not in held]
        names += [(slot, generation - 1) for slot, generation in held]
        names += [*self.model.past[-4:], (self.model.slots, 1)]
        name = names[which % len(names)]
        lies = (
            wire.Take(*name),
            wire.Release(*name),
            wire.Refuse(*name, "a lie"),
            wire.Release(*name, others=names[-3:] * 2),
        )
        lie = lies[number % 4]
        self.pair.inject(side.end, lie)
        self.model.heard(side, [lie])
        self.judged()

    def say_goodbye_again(self, number: int, which: int) -> None:
        """A second goodbye changes nothing; a first one may come after the link is cut.

        Who lost a "taken" with its link says that again before its goodbye (``Resume``): without
        it, it would give to others what it has begun.
        """

        def may(side: Side) -> bool:
            begun = any(batch.taker is side for batch in side.untaken)
            return side.closing and side.alive and not begun

        if side := self.pick(self.sides(may), number):
            self.pair.inject(side.end, wire.Goodbye())
            self.model.heard(side, [wire.Goodbye()])
            self.judged()

    # -- the end -----------------------------------------------------------------------------

    def teardown(self) -> None:
        """Let everything go: then all is free but what nobody can ever answer for."""
        if self.broken:
            return
        for _ in range(self.model.slots):
            self.abandon(0, 0)
        for _ in range(len(self.model.sides)):
            self.die(0, 0)
        self.give_up_waiting(0, 0)
        for _ in range(self.model.slots):
            self.fence_done(0, 0)
        stuck = self.model.at(Stage.STUCK)
        assert self.model.owners == stuck
        assert self.pair.exporter.slots.free == self.model.slots - len(stuck)
        assert not any(fate is Fate.WAITING for owner in stuck for fate in owner.fates.values())
        pool = self.pair.exporter.bytes
        if not stuck:
            assert pool.free_bytes == pool.capacity
            assert pool.largest_gap == max(self.model.free_runs(MAX_SEGMENTS), default=0)


class BroadcastMachine(Machine):
    """One to three ranks."""

    @initialize(ranks=st.integers(1, 3), slots=SLOTS, attached=st.integers(0, 3), slow=SLOW)
    def start(self, ranks: int, slots: int, attached: int, slow: set[str]) -> None:
        """Open an exporter."""
        pair = Pair(Broadcast(ranks), slots=slots)
        self.begin(pair, Model(ranks, slots), attached=min(attached, ranks), slow=slow)

    def come(self, number: int, which: int) -> None:
        """A consumer asks for a rank, free or not."""
        seated = [side.member for side in self.sides(lambda side: side.here)]
        ranks = range(self.model.ranks or 1)
        free = [rank for rank in ranks if rank not in seated]
        self.admit((free or ranks)[number % len(free or ranks)], 2, opened=which % 4 > 0)

    def narrow(self, number: int) -> tuple[int, ...] | None:
        """Return all ranks or any choice of them, by the bits of the number."""
        ranks = range(self.model.ranks or 1)
        return tuple(rank for rank in ranks if number >> rank & 1) or None


class CompeteMachine(Machine):
    """One to three consumers at a time."""

    most = 3

    @initialize(most=st.integers(1, 3), slots=SLOTS, attached=st.integers(0, 3), slow=SLOW)
    def start(self, most: int, slots: int, attached: int, slow: set[str]) -> None:
        """Open an exporter."""
        self.most = most
        pair = Pair(Compete(), slots=slots)
        self.begin(pair, Model(None, slots), attached=min(attached, most), slow=slow)

    def come(self, number: int, which: int) -> None:
        """A consumer comes."""
        if len(self.sides(lambda side: side.here)) < self.most:
            self.admit(None, WINDOWS[number % 6], opened=which % 4 > 0)

    def narrow(self, number: int) -> tuple[int, ...] | None:
        """Return nobody: a Compete route cannot be narrowed."""
        return None
