"""Compare both cores with the model, invariant by invariant."""

from __future__ import annotations

from asyncvmm._core.ledger import PeerState
from asyncvmm._core.slots import SlotState
from tests.core.model import Fate, Model, Owner, Side, Stage
from tests.core.pair import Pair

STATES = {
    Stage.FILLING: SlotState.FILLING,
    Stage.DRAINING: SlotState.DRAINING,
    Stage.STUCK: SlotState.QUARANTINED,
}


def check(pair: Pair, model: Model) -> None:
    """Raise AssertionError wherever a core and the model differ."""
    check_slots(pair, model)
    check_bytes(pair, model)
    check_records(pair, model)
    for side in model.sides.values():
        check_peer(pair, model, side)
        check_consumer(pair, side)
    check_readers(pair, model)
    tally = pair.exporter.tally
    assert tally.stale == model.stale
    assert tally.batches == model.batches
    assert {id(record) for record in pair.fences} == {
        id(pair.exporter.records[owner.slot]) for owner in model.at(Stage.DRAINING)
    }
    assert len(pair.fences) == len(model.at(Stage.DRAINING)), "a record drains twice"


def check_slots(pair: Pair, model: Model) -> None:
    """A slot is in exactly one state, and in the right one (inv. 1, 4, 7)."""
    slots = pair.exporter.slots
    assert sum(slots.counts) == model.slots
    assert slots.free == slots.counts[SlotState.FREE] == model.slots - len(model.owners)
    expected = [SlotState.FREE] * model.slots
    for owner in model.owners:
        expected[owner.slot] = expected_state(model, owner)
        assert slots.generations[owner.slot] == owner.generation
    assert slots.states == expected


def expected_state(model: Model, owner: Owner) -> SlotState:
    """Return the state that those who have not settled ask for."""
    if owner.stage is not Stage.OUT:
        return STATES[owner.stage]
    waiting = Fate.WAITING in owner.fates.values()
    absent = all(model.sides[holder].absent for holder in owner.holders.values())
    return SlotState.QUARANTINED if absent and not waiting else SlotState.HELD


def check_bytes(pair: Pair, model: Model) -> None:
    """Chunks never overlap, lie in the pool, and sum with what is free to its size (inv. 1)."""
    pool = pair.exporter.bytes
    units = [unit for owner in model.owners for unit in owner.units]
    assert len(units) == len(set(units)), "two chunks overlap"
    assert all(unit // 8 in model.segments for unit in units), "a chunk lies outside the pool"
    used = sum(owner.nbytes for owner in model.owners)
    assert pool.capacity == len(model.segments) * 8 * 256
    assert pool.free_bytes + used == pool.capacity
    runs = model.free_runs(pair.region.max_nbytes // pair.region.granule)
    assert pool.gaps == len(runs), "neighbouring gaps are not merged, or one is lost"
    assert pool.largest_gap == max(runs, default=0)


def check_records(pair: Pair, model: Model) -> None:
    """Each outcome names each member addressed exactly once (inv. 6)."""
    records = pair.exporter.records
    assert sorted(records) == sorted(owner.slot for owner in model.owners)
    for owner in model.owners:
        record = records[owner.slot]
        assert (record.start, record.nbytes) == (owner.start, owner.nbytes)
        assert record.holders == set(owner.holders.values())
        assert {reader for reader, _ in record.released_by} == owner.readers
        outcome = record.outcome
        for fate, found in (
            (Fate.WAITING, record.waiting),
            (Fate.RELEASED, outcome.released),
            (Fate.REFUSED, [member for member, _ in outcome.refused]),
            (Fate.LOST, outcome.lost),
        ):
            members = [member for member, had in owner.fates.items() if had is fate]
            assert sorted(found, key=str) == sorted(members, key=str), f"{owner}: {fate}"


def check_peer(pair: Pair, model: Model, side: Side) -> None:
    """What the exporter keeps of each consumer is what the model knows of it."""
    peer = side.end.peer
    assert (side.id in pair.exporter.peers) == (not side.gone)
    if side.gone:
        state = PeerState.CLOSED
    elif side.closing:
        state = PeerState.CLOSING
    else:
        state = PeerState.OPEN if side.open else PeerState.CONNECTING
    assert peer.state is state
    assert peer.absent == side.absent
    assert sorted(peer.holds) == sorted(owner.slot for owner in model.holds(side))
    assert [batch.number for batch in peer.untaken.values()] == [b.number for b in side.untaken]
    assert peer.credit == side.window - len(side.untaken) >= 0
    assert (peer.stale, peer.releases) == (side.stale, side.releases)


def check_consumer(pair: Pair, side: Side) -> None:
    """What a consumer holds is what it was sent and has not let go of, in order."""
    core = side.end.core
    assert [[(f.slot, f.generation) for f in owners] for owners in core.inbox] == [
        [owner.name for owner in batch.owners] for batch in side.inbox
    ]
    held = [owner.name for batch in side.inbox for owner in batch.owners]
    held += [owner.name for owner in side.taken]
    assert sorted((f.slot, f.generation) for f in core.held.values()) == sorted(held)
    assert core.ended == side.ended


def check_readers(pair: Pair, model: Model) -> None:
    """Nothing is free, or lent again, that a living process may still read (inv. 4, 7).

    Taken from what consumers do, not from what the exporter was told.
    """
    slots = pair.exporter.slots
    for side in model.sides.values():
        if not side.alive:
            continue
        reads = list(side.taken)
        if side.linked and not side.leaving:
            reads += [o for batch in (*side.inbox, *side.flight) for o in batch.owners]
        for owner in reads:
            assert owner.stage is Stage.OUT, f"{side.end} may read {owner}"
            assert slots.generations[owner.slot] == owner.generation
            assert slots.states[owner.slot] in (SlotState.HELD, SlotState.QUARANTINED)
