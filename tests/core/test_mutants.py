"""Planted bugs, each of which the state machine must find.

A property test is no evidence until such bugs die of it.  Some of these were real: they are what
the first review of the core found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from asyncvmm._core import wire
from asyncvmm._core.allocator import Allocator
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.holdings import Holdings
from asyncvmm._core.ledger import BatchRecord, Peer, PeerState, Record
from asyncvmm._core.loans import Loans
from asyncvmm._core.routing import Competitors, Ranks
from asyncvmm._core.slots import DRAINING, FREE, HELD, SlotState, SlotTable
from asyncvmm._errors import LocalProtocolError, RemoteProtocolError
from tests.core.machine import BroadcastMachine, CompeteMachine, Machine

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]
MUTANTS: dict[str, tuple[type[Machine], Mutant]] = {}
"""The table: what is wrong, which machine must find it, and how it is planted."""


def mutant(what: str, machine: type[Machine]) -> Callable[[Mutant], Mutant]:
    """Enter a planted bug in the table."""

    def enter(plant: Mutant) -> Mutant:
        MUTANTS[what] = machine, plant
        return plant

    return enter


def nothing(*args: Any) -> None:
    """Do nothing."""


# -- slots and bytes --------------------------------------------------------------------------


@mutant("a freed slot is not returned", BroadcastMachine)
def _(patch: Patch) -> None:
    move = SlotTable.move

    def lose(table: SlotTable, slot: int, to: SlotState) -> None:
        move(table, slot, to)
        if to is FREE and slot == 0:
            table.unused.pop()

    patch.setattr(SlotTable, "move", lose)


@mutant("the generation does not rise", BroadcastMachine)
def _(patch: Patch) -> None:
    take = SlotTable.take

    def stay(table: SlotTable) -> int:
        slot = take(table)
        table.generations[slot] = 1
        return slot

    patch.setattr(SlotTable, "take", stay)


@mutant("the bytes of a freed slot are not returned", BroadcastMachine)
def _(patch: Patch) -> None:
    def drained(loans: Loans, *records: Record) -> None:
        for record in records:
            loans.slots.move(record.slot, FREE)
            del loans.records[record.slot]

    patch.setattr(Loans, "drained", drained)


@mutant("of several that are freed at once, all but the last lose their bytes", BroadcastMachine)
def _(patch: Patch) -> None:
    def drained(loans: Loans, *records: Record) -> None:
        for record in records:
            loans.slots.move(record.slot, FREE)
            del loans.records[record.slot]
        loans.bytes.free(records[-1].start, records[-1].nbytes)

    patch.setattr(Loans, "drained", drained)


@mutant("what was taken for several is kept when the last does not fit", BroadcastMachine)
def _(patch: Patch) -> None:
    def one_by_one(loans: Loans, sizes: Sequence[int]) -> list[Record] | None:
        found = []
        for nbytes in sizes:
            record = loans.reserve(nbytes)
            if record is None:
                return None
            found.append(record)
        return found

    patch.setattr(Loans, "reserve_all", one_by_one)


@mutant("slots do not count when several are lent", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Loans, "fit", lambda loans, sizes: loans.bytes.fits(sizes))


@mutant("freed without waiting for a fence", BroadcastMachine)
def _(patch: Patch) -> None:
    def drain(loans: Loans, record: Record) -> None:
        loans.slots.move(record.slot, DRAINING)
        loans.drained(record)

    patch.setattr(Loans, "_drain", drain)


@mutant("an abandoned loan is freed at once", BroadcastMachine)
def _(patch: Patch) -> None:
    def abandon(loans: Loans, record: Record) -> None:
        loans.slots.move(record.slot, DRAINING)
        loans.drained(record)

    patch.setattr(Loans, "abandon", abandon)


@mutant("a failed fence counts as done", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Holdings, "fence_failed", Loans.drained)


@mutant("neighbouring gaps are not merged", BroadcastMachine)
def _(patch: Patch) -> None:
    free = Allocator.free

    def see_no_neighbour(pool: Allocator, start: int, nbytes: int) -> None:
        edges, pool._edges = pool._edges, {}
        free(pool, start, nbytes)
        pool._edges = edges | pool._edges

    patch.setattr(Allocator, "free", see_no_neighbour)


@mutant("a chunk overlaps the one before it", BroadcastMachine)
def _(patch: Patch) -> None:
    allocate = Allocator.allocate

    def overlap(pool: Allocator, nbytes: int) -> int | None:
        start = allocate(pool, nbytes)
        return start if start is None else max(0, start - 256)

    patch.setattr(Allocator, "allocate", overlap)


@mutant("a segment in use is given back", BroadcastMachine)
def _(patch: Patch) -> None:
    remove = Allocator.remove_range

    def take_away(pool: Allocator, start: int, nbytes: int) -> bool:
        if not remove(pool, start, nbytes):
            pool.capacity -= nbytes
        return True

    patch.setattr(Allocator, "remove_range", take_away)


@mutant("the largest gap alone decides, slots do not count", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Loans, "fit", lambda loans, sizes: loans.bytes.largest_gap >= sum(sizes))


# -- releases ---------------------------------------------------------------------------------


@mutant("those released together with another are not heard of", BroadcastMachine)
def _(patch: Patch) -> None:
    released = ExporterCore._released

    def first(core: ExporterCore, peer: Peer, *name: int) -> None:
        if len(name) < 4:
            released(core, peer, *name)

    patch.setattr(ExporterCore, "_released", first)


@mutant("a release of an old generation counts", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Peer, "find", lambda peer, slot, generation: peer.holds.get(slot))


@mutant("a release of what another peer holds counts", BroadcastMachine)
def _(patch: Patch) -> None:
    receive = ExporterCore.receive

    def believe(core: ExporterCore, peer_id: int, said: Sequence[wire.FromConsumer]) -> None:
        for message in said:
            holders = {peer_id}
            if isinstance(message, wire.Release) and (record := core.records.get(message.slot)):
                holders = record.holders or holders
            receive(core, peer_id if peer_id in holders else min(holders), [message])

    patch.setattr(ExporterCore, "receive", believe)


@mutant("a release is counted twice", BroadcastMachine)
def _(patch: Patch) -> None:
    let_go = ExporterCore._let_go

    def twice(core: ExporterCore, peer: Peer, record: Record) -> None:
        record.released += record.released[-1:]
        let_go(core, peer, record)

    patch.setattr(ExporterCore, "_let_go", twice)


@mutant("the first release frees what others hold", BroadcastMachine)
def _(patch: Patch) -> None:
    settle = Holdings._settle

    def all_at_once(core: Holdings, peer: Peer, record: Record) -> None:
        for holder in record.holders - {peer.id}:
            del core.peers[holder].holds[record.slot]
        record.holders = {peer.id}
        settle(core, peer, record)

    patch.setattr(Holdings, "_settle", all_at_once)


@mutant("ranks that have not attached are not waited for", BroadcastMachine)
def _(patch: Patch) -> None:
    def review(core: Holdings, record: Record) -> None:
        if not record.holders:
            core._drain(record)

    patch.setattr(Holdings, "_review", review)


# -- whom batches go to -----------------------------------------------------------------------


@mutant("a batch for some ranks goes to all", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Ranks, "targets", lambda ranks, to: ranks._all)


@mutant("a batch for some ranks misses the last of them", BroadcastMachine)
def _(patch: Patch) -> None:
    targets = Ranks.targets
    patch.setattr(Ranks, "targets", lambda ranks, to: targets(ranks, to)[: 1 if to else None])


@mutant("what waited for a rank is not delivered", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Ranks, "sit", lambda ranks, peer: ())


@mutant("what waited for a rank is delivered again to the next", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Ranks, "sit", lambda ranks, peer: list(ranks._backlog[peer.member]))


@mutant("what waited for a rank is delivered in the wrong order", BroadcastMachine)
def _(patch: Patch) -> None:
    sit = Ranks.sit
    patch.setattr(Ranks, "sit", lambda ranks, peer: reversed(list(sit(ranks, peer))))


@mutant("what waited is forgotten, not settled", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Ranks, "give_up", lambda ranks: [b.clear() for b in ranks._backlog] and [])


@mutant("a newcomer is open before it has mapped the pool", BroadcastMachine)
def _(patch: Patch) -> None:
    reserve = Ranks.reserve

    def at_once(ranks: Ranks, peer: Peer) -> None:
        reserve(ranks, peer)
        peer.state = PeerState.OPEN

    patch.setattr(Ranks, "reserve", at_once)


@mutant("a seat is never free again", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Ranks, "leave", nothing)


@mutant("a slot's event is sent to the first peer only", BroadcastMachine)
def _(patch: Patch) -> None:
    deliver = ExporterCore._deliver

    def once(core: ExporterCore, peer: Peer, batch: BatchRecord) -> None:
        for other in core.peers.values():
            peer.knows |= other.knows
        deliver(core, peer, batch)

    patch.setattr(ExporterCore, "_deliver", once)


@mutant("a batch is sent with its last owner's event", BroadcastMachine)
def _(patch: Patch) -> None:
    deliver = ExporterCore._deliver

    def last(core: ExporterCore, peer: Peer, batch: BatchRecord) -> None:
        first = batch.records[0]
        if len(batch.records) > 1 and not batch.records[-1].ready:
            first.ready, batch.records[-1].ready = b"", b"event %d" % batch.records[-1].slot
        deliver(core, peer, batch)

    patch.setattr(ExporterCore, "_deliver", last)


@mutant("a batch goes to another competitor without its event", CompeteMachine)
def _(patch: Patch) -> None:
    put_back = ExporterCore._put_back

    def spent(core: ExporterCore, peer: Peer) -> None:
        for batch in peer.untaken.values():
            for record in batch.records:
                record.ready = b""
        put_back(core, peer)

    patch.setattr(ExporterCore, "_put_back", spent)


@mutant("credit is not returned by taking", CompeteMachine)
def _(patch: Patch) -> None:
    patch.setattr(ExporterCore, "_taken", nothing)


@mutant("credit is not asked for", CompeteMachine)
def _(patch: Patch) -> None:
    patch.setattr(Peer, "credit", property(lambda peer: 1))


@mutant("credit is asked of the first consumer only", CompeteMachine)
def _(patch: Patch) -> None:
    def freest(route: Competitors) -> Peer | None:
        found = None
        for peer in route.peers.values():
            fewest = peer.window if found is None else len(found.untaken)
            if len(peer.untaken) < fewest and peer.state is PeerState.OPEN and not peer.told:
                found = peer
        if found is not None:
            route.peers[found.id] = route.peers.pop(found.id)
        return found

    patch.setattr(Competitors, "freest", freest)


@mutant("the busiest consumer gets the next batch", CompeteMachine)
def _(patch: Patch) -> None:
    def busiest(route: Competitors) -> Peer | None:
        free = [p for p in route.peers.values() if p.state is PeerState.OPEN and p.credit > 0]
        if not free:
            return None
        peer = max(free, key=lambda peer: len(peer.untaken))
        route.peers[peer.id] = route.peers.pop(peer.id)
        return peer

    patch.setattr(Competitors, "freest", busiest)


@mutant("of equal consumers always the same one gets the next batch", CompeteMachine)
def _(patch: Patch) -> None:
    freest = Competitors.freest

    def same(route: Competitors) -> Peer | None:
        found = freest(route)
        route.peers = dict(sorted(route.peers.items()))
        return found

    patch.setattr(Competitors, "freest", same)


@mutant("the youngest batch goes first", CompeteMachine)
def _(patch: Patch) -> None:
    assign = ExporterCore._assign

    def youngest(core: ExporterCore) -> None:
        assert isinstance(core.route, Competitors)
        core.route.pending.reverse()
        assign(core)
        core.route.pending.reverse()

    patch.setattr(ExporterCore, "_assign", youngest)


# -- those who go -----------------------------------------------------------------------------


@mutant("what a dead consumer had not taken is lost", CompeteMachine)
def _(patch: Patch) -> None:
    patch.setattr(ExporterCore, "_put_back", nothing)


@mutant("what comes back waits behind what is younger", CompeteMachine)
def _(patch: Patch) -> None:
    def behind(route: Competitors, batches: Iterable[BatchRecord]) -> None:
        route.pending.extend(batches)

    patch.setattr(Competitors, "put_back", behind)


@mutant("what comes back is offered to two", CompeteMachine)
def _(patch: Patch) -> None:
    def twice(route: Competitors, batches: Iterable[BatchRecord]) -> None:
        batches = list(batches)
        route.pending = deque((*batches, *batches, *route.pending))

    patch.setattr(Competitors, "put_back", twice)


@mutant("an untaken batch is known by its first slot", CompeteMachine)
def _(patch: Patch) -> None:
    def taken(core: ExporterCore, peer: Peer, record: Record) -> None:
        assert record.batch is not None
        slot = record.batch.records[0].slot
        for number, batch in list(peer.untaken.items()):
            if batch.records[0].slot == slot:
                del peer.untaken[number]
                core._assign()

    patch.setattr(ExporterCore, "_taken", taken)


@mutant("a slot stays quarantined when its batch goes to another", CompeteMachine)
def _(patch: Patch) -> None:
    review = Holdings._review

    def stay(core: Holdings, record: Record) -> None:
        if not record.waiting:
            review(core, record)

    patch.setattr(Holdings, "_review", stay)


@mutant("what a dead consumer held is not settled", BroadcastMachine)
def _(patch: Patch) -> None:
    died = ExporterCore.died

    def forget(core: ExporterCore, peer_id: int) -> None:
        if peer_id in core.peers:
            core.peers[peer_id].holds.clear()
        died(core, peer_id)

    patch.setattr(ExporterCore, "died", forget)


@mutant("a vanished consumer counts as dead", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(ExporterCore, "vanished", ExporterCore.died)


@mutant("a vanished consumer's slots are not quarantined", BroadcastMachine)
def _(patch: Patch) -> None:
    def miss(core: Holdings, peer: Peer) -> None:
        peer.state = PeerState.CLOSING
        peer.absent = bool(peer.holds)
        if not peer.holds:
            core._close(peer)

    patch.setattr(Holdings, "_miss", miss)


@mutant("one vanished consumer quarantines what others hold", BroadcastMachine)
def _(patch: Patch) -> None:
    def review(core: Holdings, record: Record) -> None:
        if not record.holders and not record.waiting:
            core._drain(record)
            return
        absent = any(core.peers[holder].absent for holder in record.holders)
        if absent and core.slots.states[record.slot] is HELD:
            core.slots.move(record.slot, SlotState.QUARANTINED)

    patch.setattr(Holdings, "_review", review)


@mutant("a late release of a vanished consumer is not heard", BroadcastMachine)
def _(patch: Patch) -> None:
    receive = ExporterCore.receive

    def deaf(core: ExporterCore, peer_id: int, said: Sequence[wire.FromConsumer]) -> None:
        if peer_id not in core.peers or not core.peers[peer_id].absent:
            receive(core, peer_id, said)

    patch.setattr(ExporterCore, "receive", deaf)


@mutant("a vanished consumer is kept when it holds nothing any more", BroadcastMachine)
def _(patch: Patch) -> None:
    def settle(core: Holdings, peer: Peer, record: Record) -> None:
        del peer.holds[record.slot]
        record.holders.discard(peer.id)
        core._review(record)

    patch.setattr(Holdings, "_settle", settle)


@mutant("a dead consumer's failed fence keeps its slot for ever", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(Holdings, "_bury", nothing)


@mutant("a dead consumer's fence is still asked when others let go", BroadcastMachine)
def _(patch: Patch) -> None:
    def bury(core: Holdings, peer_id: int) -> None:
        core._dead.add(peer_id)
        for record in list(core.records.values()):
            if core.slots.states[record.slot] is SlotState.QUARANTINED:
                core._forget_dead(record)

    patch.setattr(Holdings, "_bury", bury)


@mutant("a second goodbye is answered again", BroadcastMachine)
def _(patch: Patch) -> None:
    tell = ExporterCore._tell

    def again(core: ExporterCore, peer: Peer) -> None:
        peer.told = False
        tell(core, peer)

    patch.setattr(ExporterCore, "_tell", again)


@mutant("a consumer's goodbye is not answered", BroadcastMachine)
def _(patch: Patch) -> None:
    left = ExporterCore._left

    def silent(core: ExporterCore, peer: Peer) -> None:
        peer.told = True
        left(core, peer)

    patch.setattr(ExporterCore, "_left", silent)


@mutant("competitors get a goodbye while batches may still go to them", CompeteMachine)
def _(patch: Patch) -> None:
    patch.setattr(Competitors, "busy", False)


@mutant("owners are taken after the goodbye", BroadcastMachine)
def _(patch: Patch) -> None:
    publish = ExporterCore.publish_batch

    def anyway(core: ExporterCore, *args: Any, **how: Any) -> None:
        closing, core.closing = core.closing, False
        publish(core, *args, **how)
        core.closing = closing

    patch.setattr(ExporterCore, "publish_batch", anyway)


# -- consumers --------------------------------------------------------------------------------


@mutant("a consumer reads its youngest batch first", BroadcastMachine)
def _(patch: Patch) -> None:
    take = ConsumerCore.take

    def youngest(core: ConsumerCore) -> list[wire.OwnerFrame] | None:
        core.inbox.reverse()
        owners = take(core)
        core.inbox.reverse()
        return owners

    patch.setattr(ConsumerCore, "take", youngest)


@mutant("a competitor takes without a word", CompeteMachine)
def _(patch: Patch) -> None:
    patch.setattr(ConsumerCore, "take", lambda core: core.inbox.popleft() if core.inbox else None)


@mutant("a leaving rank keeps what it has not read", BroadcastMachine)
def _(patch: Patch) -> None:
    patch.setattr(ConsumerCore, "_decline", nothing)


@mutant("a leaving competitor refuses what another could have", CompeteMachine)
def _(patch: Patch) -> None:
    def decline(core: ConsumerCore, owners: Sequence[wire.OwnerFrame], reason: str) -> None:
        for owner in owners:
            core.refuse(owner, reason)

    patch.setattr(ConsumerCore, "_decline", decline)


@mutant("a consumer without a link holds what it can never read", BroadcastMachine)
def _(patch: Patch) -> None:
    def lose(core: ConsumerCore) -> int:
        core.state = PeerState.CLOSED
        unread = len(core.inbox)
        core.inbox.clear()
        return unread

    patch.setattr(ConsumerCore, "lose", lose)


FIXED = settings(
    max_examples=1500,  # of which few are needed
    stateful_step_count=60,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
FOUND = (AssertionError, LocalProtocolError, RemoteProtocolError, KeyError, IndexError)
"""How a planted bug may show.  A TypeError would be a bug of the plant."""


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTANTS)
def test_planted_bug_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills a state machine that would not see its planted bug."""
    machine, plant = MUTANTS[what]
    plant(monkeypatch)
    with pytest.raises(FOUND):
        run_state_machine_as_test(machine, settings=FIXED)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [BroadcastMachine, CompeteMachine])
def test_nothing_is_found_where_nothing_is_planted(machine: type[Machine]) -> None:
    """Kills a state machine that fails whatever it is given."""
    run_state_machine_as_test(machine, settings=settings(FIXED, max_examples=30))
