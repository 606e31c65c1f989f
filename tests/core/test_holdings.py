"""Who holds what, and quarantine."""

from __future__ import annotations

import pytest

from asyncvmm._core import wire
from asyncvmm._core.ledger import PeerState, Record
from asyncvmm._core.slots import SlotState
from asyncvmm._errors import LocalProtocolError
from asyncvmm._types import Broadcast, Compete, Outcome
from tests.core.pair import End, Pair

HELD, DRAINING, QUARANTINED = SlotState.HELD, SlotState.DRAINING, SlotState.QUARANTINED


@pytest.fixture
def pair() -> Pair:
    return Pair(Broadcast(2))


def both(pair: Pair) -> tuple[End, End]:
    return pair.attach(0), pair.attach(1)


def presence(pair: Pair, end: End) -> tuple[PeerState, bool, int]:
    """Return a peer's state, whether it is absent, and how many are."""
    return end.peer.state, end.peer.absent, pair.exporter._absent


def readers(record: Record) -> list[int]:
    """Return whose release events are to be waited for."""
    return [peer for peer, _ in record.released_by]


def read_all(pair: Pair, end: End) -> None:
    pair.settle()
    for _ in pair.read(end):
        pass
    pair.settle()


def test_a_stuck_consumer_harms_nobody_else(pair: Pair) -> None:
    """Kills a pool that stops, or reuses a slot, for one lost link (inv. 7, field report 12)."""
    stuck, healthy = both(pair)
    record = pair.send()
    pair.settle()
    assert pair.take(stuck) is not None
    states = pair.exporter.slots.states
    pair.vanish(stuck)
    assert states[record.slot] is HELD, "the healthy one still holds it"
    read_all(pair, healthy)
    assert states[record.slot] is QUARANTINED
    for _ in range(20):
        other = pair.send(to=1)
        read_all(pair, healthy)
        assert other.outcome == Outcome(released=(1,))
        pair.finish_fences()
    assert states[record.slot] is QUARANTINED
    assert pair.exporter.slots.counts == [3, 0, 0, 0, 1]


@pytest.mark.parametrize("way", ["release", "death"])
def test_quarantine_ends_by_a_late_release_or_by_death(pair: Pair, way: str) -> None:
    """Kills a quarantine that nothing ends, or that ends without a fence (field report 12)."""
    end, _ = both(pair)
    record = pair.send(to=0)
    pair.settle()
    pair.take(end)
    pair.vanish(end)
    pair.vanish(end)
    assert pair.exporter.slots.states[record.slot] is QUARANTINED
    assert presence(pair, end) == (PeerState.CLOSING, True, 1)
    if way == "release":
        pair.inject(end, wire.Release(record.slot, record.generation))
        assert record.outcome == Outcome(released=(0,))
        assert [peer for peer, _ in record.released_by] == [end.id]
    else:
        pair.die(end)
        assert record.outcome == Outcome(lost=(0,))
        assert record.released_by == (), "a dead process needs no fence"
    assert pair.fences == [record]
    assert end.id not in pair.exporter.peers
    assert presence(pair, end) == (PeerState.CLOSED, False, 0)
    pair.fence_done(record)
    assert pair.exporter.slots.free == 4


def test_who_vanishes_with_nothing_is_simply_gone(pair: Pair) -> None:
    """Kills a peer that is kept for ever because it once was there."""
    end, _ = both(pair)
    pair.vanish(end)
    assert end.id not in pair.exporter.peers
    assert presence(pair, end) == (PeerState.CLOSED, False, 0)
    pair.vanish(end)
    pair.die(end)
    assert pair.attach(0).member == 0


@pytest.mark.parametrize("released", [False, True])
def test_what_crossed_a_goodbye_is_refused_once_its_link_is_gone(
    pair: Pair, released: bool
) -> None:
    """Kills what is kept for as long as a process lives for it came while its consumer hung up;
    and a refusal of what may still be viewed there: the goodbye says how much that is."""
    end, _ = both(pair)
    viewed = pair.send(to=0)
    pair.settle()
    pair.take(end)
    crossed = pair.send(to=0)
    pair.inject(end, wire.Goodbye(lingering=1))
    if released:
        pair.inject(end, wire.Release(viewed.slot, viewed.generation))
    assert set(end.peer.holds) == {crossed.slot} | (set() if released else {viewed.slot})
    pair.vanish(end)
    if released:
        assert crossed.outcome.refused == ((0, "it left before this came"),)
        assert pair.fences == [viewed, crossed]
        assert end.id not in pair.exporter.peers
    else:
        assert pair.exporter.slots.counts == [2, 0, 0, 0, 2]


def test_a_vanished_rank_may_come_back_as_a_newcomer(pair: Pair) -> None:
    """Kills a seat that is kept for a link that is gone; what it held stays quarantined."""
    old, _ = both(pair)
    record = pair.send(to=0)
    pair.vanish(old)
    new = pair.attach(0)
    later = pair.send(to=0)
    read_all(pair, new)
    assert later.outcome == Outcome(released=(0,))
    assert pair.exporter.slots.states[record.slot] is QUARANTINED
    assert record.holders == {old.id}


def test_another_link_ends_the_quarantine_and_a_release_the_rest(pair: Pair) -> None:
    """Kills a count of the absent that is wrong, and a peer that stays for ever or goes early."""
    end, other = both(pair)
    records = [pair.send(to=0), pair.send(to=0)]
    pair.settle()
    (read,) = pair.take(end) or []
    states = pair.exporter.slots.states
    pair.vanish(end)
    assert [states[record.slot] for record in records] == [QUARANTINED, QUARANTINED]
    assert presence(pair, end) == (PeerState.CLOSING, True, 1)
    pair.resume(end)
    assert [states[record.slot] for record in records] == [HELD, HELD]
    assert presence(pair, end) == (PeerState.CLOSING, False, 0)
    pair.settle()
    assert records[1].outcome == Outcome(refused=((0, "it was lost with the link"),))
    later = pair.send()
    pair.settle()
    assert later.holders == {other.id}, "nothing new comes on such a link"
    pair.vanish(end)
    assert states[records[0].slot] is QUARANTINED
    pair.resume(end)
    pair.release(end, read)
    pair.settle()
    assert records[0].outcome == Outcome(released=(0,))
    assert end.id in pair.exporter.peers
    pair.vanish(end)
    assert end.id not in pair.exporter.peers
    assert presence(pair, end) == (PeerState.CLOSED, False, 0)


def test_another_link_of_a_competitor_gives_up_what_it_had_not_taken() -> None:
    """Kills a batch that two begin, and one that nobody does."""
    pair = Pair(Compete())
    end = pair.attach(window=3)
    records = [pair.send() for _ in range(3)]
    pair.settle()
    (first,) = pair.take(end) or []
    end.up.clear()  # nobody hears that it was taken
    other = pair.attach()
    pair.vanish(end)
    pair.resume(end)
    pair.settle()
    assert [record.holders for record in records] == [{end.id}, {other.id}, {other.id}]
    pair.release(end, first)
    read_all(pair, other)
    assert [record.outcome.released for record in records] == [
        (end.member,),
        (other.member,),
        (other.member,),
    ]


# -- fences that fail -------------------------------------------------------------------------


def released(pair: Pair, *ends: End) -> int:
    record = pair.send()
    for end in ends:
        read_all(pair, end)
    assert pair.fences == [record]
    return record.slot


def test_a_failed_fence_never_frees(pair: Pair) -> None:
    """Kills a failure that is taken for an answer (field report 43, inv. 4)."""
    ends = both(pair)
    slot = released(pair, *ends)
    record = pair.fences[0]
    pair.fence_failed(record)
    assert pair.exporter.slots.states[slot] is QUARANTINED
    with pytest.raises(LocalProtocolError, match="QUARANTINED to FREE"):
        pair.exporter.drained(record)
    pair.die(ends[0])
    assert pair.exporter.slots.states[slot] is QUARANTINED, "the other may still read"
    pair.vanish(ends[1])
    assert pair.exporter.slots.states[slot] is QUARANTINED
    pair.die(ends[1])
    assert pair.exporter.slots.states[slot] is DRAINING
    assert record.released_by == ()
    assert record.outcome == Outcome(released=(0, 1)), "how it ended is not forgotten"
    pair.fence_done(record)
    assert pair.exporter.slots.free == 4


def test_a_dead_readers_fence_is_not_asked_when_others_let_go_later(pair: Pair) -> None:
    """Kills a question about an event that went with its process."""
    first, second = both(pair)
    record = pair.send()
    read_all(pair, first)
    asked = [readers(record)]
    pair.die(first)
    asked.append(readers(record))
    assert pair.exporter.slots.states[record.slot] is HELD
    read_all(pair, second)
    asked.append(readers(record))
    assert asked == [[first.id], [], [second.id]]
    assert record.outcome == Outcome(released=(0, 1))


def test_a_fence_that_fails_after_its_reader_died_is_asked_once_more(pair: Pair) -> None:
    """Kills a slot that is lost because the death came first, and an endless second try."""
    end, other = both(pair)
    record = pair.send(to=0)
    read_all(pair, end)
    pair.die(end)
    pair.fence_failed(record)
    assert pair.exporter.slots.states[record.slot] is DRAINING
    assert pair.fences == [record]
    pair.fence_failed(record)
    assert pair.exporter.slots.states[record.slot] is QUARANTINED
    pair.die(other)
    assert pair.exporter.slots.states[record.slot] is QUARANTINED


def test_a_failed_fence_of_the_exporter_itself_keeps_the_slot(pair: Pair) -> None:
    """Kills a death that frees what the exporter's own device may still write."""
    end, _ = both(pair)
    record = pair.reserve()
    pair.abandon(record)
    pair.fence_failed(record)
    pair.die(end)
    assert pair.exporter.slots.states[record.slot] is QUARANTINED


def test_the_dead_are_remembered_only_while_a_fence_names_them(pair: Pair) -> None:
    """Kills a set of the dead that grows with every restart of a consumer."""
    for _ in range(50):
        end = pair.attach(0)
        record = pair.send(to=0)
        read_all(pair, end)
        pair.die(end)
        assert pair.exporter._dead == {end.id}
        pair.fence_done(record)
    pair.die(pair.attach(0))
    assert pair.exporter._dead == set()
    assert pair.exporter.peers == {}


def test_a_fence_cannot_fail_for_a_slot_that_is_in_use_again(pair: Pair) -> None:
    """Kills a late failure that quarantines the slot's next owner."""
    both(pair)
    old = pair.reserve()
    pair.abandon(old)
    pair.fence_done(old)
    new = pair.reserve()
    assert new.slot == old.slot
    pair.abandon(new)
    with pytest.raises(LocalProtocolError, match="is over"):
        pair.exporter.fence_failed(old)
    assert pair.exporter.slots.states[new.slot] is DRAINING
