"""ExporterCore: publishing, peers, goodbyes, and those who lie."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncvmm._core import wire
from asyncvmm._core.ledger import PeerState, Record, Tally
from asyncvmm._core.slots import SlotState
from asyncvmm._errors import ArgumentError, ClosedError, LocalProtocolError, RankError
from asyncvmm._types import Broadcast, Compete, Key, Outcome
from tests.core.pair import UNIT, End, Pair, features


def broadcast(ranks: int = 2) -> Pair:
    return Pair(Broadcast(ranks))


def compete(**how: int) -> Pair:
    return Pair(Compete(), **how)


def keys(pair: Pair, end: End) -> list[Key]:
    """Read and release all that a consumer can get; return the owners' keys."""
    found: list[Key] = []
    pair.settle()
    while end.core.inbox:
        found += [owner.key for owner in pair.read(end)]
        pair.settle()
    return found


def held_keys(end: End) -> list[Key]:
    """Return the keys of what the exporter has given to a consumer."""
    return [record.key for record in end.peer.holds.values()]


# -- publishing -------------------------------------------------------------------------------


def test_an_owner_is_acknowledged_by_all_its_ranks() -> None:
    """Kills an acknowledgement that does not wait for the last rank."""
    pair = broadcast(3)
    ends = [pair.attach(rank) for rank in range(3)]
    record = pair.send()
    for end in ends:
        assert not pair.fences
        assert keys(pair, end) == ["key"]
    assert record.outcome == Outcome(released=(0, 1, 2))
    assert record.outcome.complete
    pair.finish_fences()
    assert pair.exporter.slots.free == 4


def test_one_owner_is_published_as_a_batch_of_its_own() -> None:
    """Kills a way of publishing one that differs from that of many."""
    pair = broadcast()
    pair.attach(0)
    end = pair.attach(1)
    record = pair.reserve()
    pair.exporter.publish(
        record, key=7, features=features(UNIT), metadata=b"m", to=1, ready=b"event"
    )
    pair.collect()
    frame = wire.OwnerFrame(record.slot, 1, record.start, UNIT, 7, features(UNIT), b"m")
    assert pair.sent == [
        (end.id, wire.Ready(record.slot, b"event")),
        (end.id, wire.Deliver([frame])),
    ]
    assert record.published
    with pytest.raises(LocalProtocolError, match="published or given back before"):
        pair.exporter.publish(record, key=7, features=features(UNIT))


def test_a_batch_that_no_competitor_has_waits_for_anyone() -> None:
    """Kills an owner that drains because nobody holds it yet."""
    pair = compete()
    record = pair.send()
    assert record.waiting == {"*"}
    assert not pair.fences
    assert keys(pair, pair.attach()) == ["key"]
    assert not record.waiting


def test_all_may_settle_in_different_ways() -> None:
    """Kills "2 done, 1 failed" that fails all, or is forgotten (field report 13)."""
    pair = broadcast(4)
    ends = [pair.attach(rank) for rank in range(4)]
    record = pair.send()
    pair.settle()
    frames = [(pair.take(end) or [])[0] for end in ends]
    ends[0].core.release(frames[0])
    ends[1].core.refuse(frames[1], "no such device")
    pair.leave(ends[2])
    pair.die(ends[3])
    pair.settle()
    assert not pair.fences, "rank 2 took it and has not let go"
    pair.release(ends[2], frames[2])
    pair.settle()
    assert record.outcome == Outcome((0, 2), ((1, "no such device"),), (3,))
    assert pair.fences == [record]
    assert pair.exporter.tally == Tally(batches=1, released=2, refused=1, lost=1)
    assert [end.peer.releases for end in ends] == [1, 0, 1, 0]


def refused(pair: Pair, *records: Record, key: Key = "key", to: object = None) -> None:
    """Publish what must be refused, and see that nothing has changed."""
    core = pair.exporter
    before = core.slots.counts, core.tally.batches, dict(core.records)
    owners = [(record, key, features(record.nbytes), b"", b"") for record in records]
    with pytest.raises((ArgumentError, LocalProtocolError, RankError)):
        core.publish_batch(owners, to=to)  # type: ignore[arg-type]  # wrong on purpose
    assert (core.slots.counts, core.tally.batches, core.records) == before
    assert not core.outgoing
    assert not core.draining


@pytest.mark.parametrize("key", [True, None, 1.5, b"key", "k" * 4097, 2**70, "\ud800"])
def test_a_key_that_cannot_travel_is_refused_here(key: object) -> None:
    """Kills a bad key that every consumer then drops its link for."""
    pair = broadcast()
    pair.attach(0)
    record = pair.reserve()
    refused(pair, record, key=key)  # type: ignore[arg-type]  # wrong on purpose
    pair.publish(record, key="k" * 4096)
    assert not record.waiting - {1}


def test_a_batch_is_published_wholly_or_not_at_all() -> None:
    """Kills a batch whose first owners are out when the last is refused (inv. 13)."""
    pair = broadcast()
    pair.attach(0)
    one, two, gone, out = (pair.reserve() for _ in range(4))
    pair.abandon(gone)
    pair.publish(out)
    refused(pair)
    refused(pair, one, gone)
    refused(pair, one, out)
    refused(pair, one, two, one)
    refused(pair, one, two, to=2)
    refused(pair, one, two, to=[])
    huge = [(one, "a", features(UNIT), b"m" * 40_000, b"")] * 1
    huge += [(two, "b", features(UNIT), b"m" * 40_000, b"")]
    with pytest.raises(ArgumentError, match="fewer owners"):
        pair.exporter.publish_batch(huge)
    assert pair.exporter.slots.states[one.slot] is SlotState.FILLING
    pair.publish(one, two)
    assert one.batch is two.batch
    assert one.batch is not out.batch


def test_an_owner_that_was_given_up_cannot_be_published() -> None:
    """Kills a slot that is handed out twice (field report 9: mapping an abandoned owner)."""
    pair = broadcast()
    old = pair.reserve()
    pair.abandon(old)
    refused(pair, old)
    pair.fence_done(old)
    new = pair.reserve()
    assert new.slot == old.slot
    refused(pair, old)
    pair.publish(new)


def test_narrowing_is_checked_before_anything_is_taken() -> None:
    """Kills a send that waits for room and then cannot go anywhere."""
    broadcast().exporter.check_narrowing([0, 1])
    with pytest.raises(RankError):
        broadcast().exporter.check_narrowing(2)
    with pytest.raises(ArgumentError):
        compete().exporter.check_narrowing(0)


def test_a_slots_event_is_sent_once_to_each_peer_and_before_its_first_owner() -> None:
    """Kills an event per batch (field report 7), or one that comes after its owner."""
    pair = broadcast()
    first = pair.attach(0)
    for _ in range(3):
        record = pair.reserve()
        pair.publish(record, ready=b"event")
        kinds = [type(message) for peer, message in pair.sent if peer == first.id]
        once = [wire.Ready] if record.generation == 1 else []
        assert kinds == [*once, wire.Deliver]
        pair.sent.clear()
        keys(pair, first)
        if first.member == 0 and 1 not in pair.exporter.route.seats:  # type: ignore[union-attr]  # Broadcast
            pair.exporter.give_up_waiting()
            pair.collect()
        pair.finish_fences()
    second = pair.attach(1)
    record = pair.reserve()
    pair.publish(record, ready=b"event")
    assert [(peer, type(message)) for peer, message in pair.sent] == [
        (first.id, wire.Deliver),
        (second.id, wire.Ready),
        (second.id, wire.Deliver),
    ]


# -- coming and going -------------------------------------------------------------------------


def test_owners_published_before_a_rank_attaches_wait_for_it() -> None:
    """Kills a backlog that is lost, doubled or out of order."""
    pair = broadcast()
    for key in ("a", "b"):
        pair.publish(pair.reserve(), key=key)
    end = pair.admit(1)
    pair.publish(pair.reserve(), key="c")
    assert keys(pair, end) == []
    pair.open(end)
    pair.publish(pair.reserve(), key="d", to=1)
    assert keys(pair, end) == ["a", "b", "c", "d"]
    assert keys(pair, pair.attach(0)) == ["a", "b", "c"]
    assert len(pair.fences) == 4


def test_who_goes_before_it_has_come_is_not_opened() -> None:
    """Kills a peer that is open again after its goodbye, and gets what its rank waits for."""
    for go in ("leave", "vanish", "die"):
        pair = broadcast(1)
        record = pair.send()
        end = pair.admit(0)
        getattr(pair, go)(end)
        pair.settle()
        pair.open(end)
        assert end.peer.state is not PeerState.OPEN
        assert record.waiting == {0}
        assert keys(pair, pair.attach(0)) == ["key"]
        if go == "leave":
            assert end.core.ended, "its goodbye was answered"


def test_death_settles_what_was_queued_and_what_was_taken() -> None:
    """Kills a loan whose only record was in the dead process (field report 11)."""
    for read in range(4):
        pair = broadcast(1)
        for _ in range(10):
            end = pair.attach(0)
            records = [pair.send() for _ in range(4)]
            for _ in range(read):
                pair.deliver_down(end)
                pair.take(end)
            pair.die(end)
            assert [record.outcome for record in records] == [Outcome(lost=(0,))] * 4
            pair.finish_fences()
            assert pair.exporter.slots.free == 4


def test_what_a_dead_competitor_had_not_taken_goes_to_another() -> None:
    """Kills a batch that is lost, or done twice, when a worker dies."""
    pair = compete()
    first = pair.attach()
    second = pair.attach()
    for key in ("a", "b", "c", "d"):
        pair.publish(pair.reserve(), key=key)
    assert held_keys(first) == ["a", "c"]
    pair.deliver_down(first)
    pair.deliver_down(first)
    pair.take(first)
    pair.deliver_up(first)
    pair.die(first)
    assert keys(pair, second) == ["b", "d", "c"]
    lost = pair.fences[0]
    assert (lost.key, lost.outcome) == ("a", Outcome(lost=("consumer-1",)))
    assert pair.exporter.tally.reassigned == 1
    assert pair.exporter.tally.lost == 1


def test_what_a_leaving_competitor_had_not_taken_goes_to_another() -> None:
    """Kills a batch that a goodbye refuses although another consumer is free."""
    pair = compete()
    first = pair.attach()
    record = pair.send()
    late = pair.reserve()
    pair.leave(first)
    pair.publish(late, key="late")  # crosses the goodbye
    second = pair.attach()
    assert keys(pair, second) == ["key", "late"]
    assert record.outcome == late.outcome == Outcome(released=("consumer-2",))
    assert not first.core.held
    assert first.core.ended
    assert not first.peer.untaken
    assert first.id in pair.exporter.peers, "its link is still there"
    pair.vanish(first)
    assert first.id not in pair.exporter.peers


def test_credit_comes_back_with_the_taking_not_with_the_release() -> None:
    """Kills a credit that means "delivered" or "released" (design section 2)."""
    pair = compete()
    end = pair.attach(window=1)
    for key in ("a", "b"):
        pair.publish(pair.reserve(), key=key)
    assert held_keys(end) == ["a"]
    pair.settle()
    pair.take(end)
    assert held_keys(end) == ["a"]
    pair.settle()
    assert held_keys(end) == ["a", "b"]


def test_an_untaken_batch_is_not_taken_by_a_release_of_an_older_one() -> None:
    """Kills a batch known by its first slot, which a younger batch may have by now."""
    pair = compete()
    end = pair.attach(window=1)
    one, two = pair.reserve(), pair.reserve()
    pair.publish(one, two, key="old")
    pair.settle()
    frames = pair.take(end) or []
    pair.release(end, frames[0])
    pair.settle()
    pair.finish_fences()
    young = pair.reserve()
    assert young.slot == one.slot
    pair.publish(young, key="young")
    pair.release(end, frames[1])
    pair.settle()
    assert end.peer.credit == 0
    pair.die(end)
    assert young.waiting == {"*"}, "nobody had taken it, so another may have it"


def test_a_batch_that_goes_to_another_is_held_not_quarantined() -> None:
    """Kills a slot that shows as stuck although a healthy consumer has it."""
    pair = compete()
    first = pair.attach()
    record = pair.send()
    pair.vanish(first)
    assert pair.exporter.slots.states[record.slot] is SlotState.QUARANTINED
    second = pair.attach()
    assert not second.peer.holds, "the process lives: it may be reading"
    pair.die(first)
    assert second.peer.holds == {record.slot: record}
    assert pair.exporter.slots.states[record.slot] is SlotState.HELD


def test_a_late_goodbye_of_a_vanished_competitor_ends_it() -> None:
    """Kills a peer that is absent for ever although it holds nothing."""
    pair = compete()
    first, second = pair.attach(), pair.attach()
    record = pair.send()
    pair.vanish(first)
    pair.inject(first, wire.Goodbye())
    assert first.id not in pair.exporter.peers
    assert first.peer.state is PeerState.CLOSED
    assert second.peer.holds == {record.slot: record}


def test_a_goodbye_after_the_last_debt_of_a_vanished_peer_is_too_late() -> None:
    """Kills a peer that is closed and then closing again, and a goodbye to nobody."""
    pair = broadcast(1)
    end = pair.attach(0)
    pair.send()
    pair.settle()
    pair.leave(end)
    assert len(end.up) == 1, "the refusal and the goodbye travel in one packet"
    pair.vanish(end)
    pair.sent.clear()
    pair.deliver_up(end)
    assert end.peer.state is PeerState.CLOSED
    assert pair.sent == []
    assert (pair.exporter.tally.stale, end.peer.stale) == (1, 0)
    assert pair.exporter.peers == {}


# -- goodbyes ---------------------------------------------------------------------------------


def test_a_closing_exporter_takes_nothing_and_gets_everything_back() -> None:
    """Kills a close that forgets what is out (field report 16)."""
    pair = broadcast()
    end = pair.attach(0)
    out, loan = pair.send(), pair.reserve()
    pair.say_goodbye()
    pair.exporter.say_goodbye("closed twice")
    with pytest.raises(ClosedError):
        pair.exporter.publish(loan, key="late", features=features(UNIT))
    pair.abandon(loan)
    assert keys(pair, end) == ["key"]
    assert end.core.ended
    assert end.core.reason == "closed"
    late = pair.attach(1)
    assert keys(pair, late) == ["key"]
    assert late.core.ended
    assert late.core.reason == "closed"
    pair.leave(late)
    pair.settle()
    assert out.outcome.complete
    pair.finish_fences()
    assert pair.exporter.slots.free == 4


def test_competitors_hear_goodbye_only_when_nothing_can_come_any_more() -> None:
    """Kills a batch that is handed out after the goodbye, which drops the consumer's link."""
    pair = compete()
    first, second = pair.attach(window=1), pair.attach(window=1)
    for key in ("a", "b", "c"):
        pair.publish(pair.reserve(), key=key)
    pair.say_goodbye()
    ended = [first.core.ended]
    assert keys(pair, first) == ["a", "c"]
    ended.append(first.core.ended)  # the second has not taken its batch and may yet die
    pair.die(second)
    assert keys(pair, first) == ["b"]
    ended.append(first.core.ended)
    assert ended == [False, False, True]


def test_a_vanished_competitor_does_not_keep_others_from_their_goodbye() -> None:
    """Kills a close that waits for a stuck peer; what it had is for whoever comes later."""
    pair = compete()
    stuck, other = pair.attach(), pair.attach()
    record = pair.send()
    assert stuck.peer.holds
    pair.say_goodbye()
    pair.settle()
    ended = [other.core.ended]
    pair.vanish(stuck)
    pair.settle()
    ended.append(other.core.ended)
    assert ended == [False, True]
    pair.die(stuck)
    pair.settle()
    assert not other.core.inbox
    late = pair.attach()
    assert keys(pair, late) == ["key"]
    assert late.core.ended
    assert record.outcome == Outcome(released=("consumer-3",))


def test_giving_up_settles_what_waits_for_nobody() -> None:
    """Kills a close that waits for ranks that never attach."""
    pair = broadcast()
    end = pair.attach(0)
    record = pair.send()
    lone = pair.send(to=1)
    pair.say_goodbye()
    pair.give_up_waiting()
    assert pair.fences == [lone]
    assert [member for member, _ in lone.outcome.refused] == [1]
    assert pair.exporter.tally.refused == 2
    assert keys(pair, end) == ["key"]
    assert record.outcome.released == (0,)
    assert len(record.outcome.refused) == 1
    assert keys(pair, pair.attach(1)) == []


def test_giving_up_under_compete_lets_everybody_hear_goodbye() -> None:
    """Kills a consumer that waits for ever for a batch that nobody will hand out."""
    pair = compete()
    end = pair.attach(window=1)
    for _ in range(3):
        pair.send()
    pair.say_goodbye()
    pair.give_up_waiting()
    assert len(pair.fences) == 2
    assert keys(pair, end) == ["key"]
    assert end.core.ended


def test_a_second_goodbye_is_not_answered() -> None:
    """Kills two goodbyes for one, in either direction."""
    pair = broadcast()
    end = pair.attach(0)
    pair.leave(end)
    pair.leave(end)
    assert len(end.up) == 1
    pair.settle()
    pair.sent.clear()
    pair.inject(end, wire.Goodbye(), wire.Goodbye())
    pair.say_goodbye()
    assert pair.sent == []


# -- those who lie ----------------------------------------------------------------------------


def test_old_and_doubled_releases_are_counted_and_change_nothing() -> None:
    """Kills a late release that frees the slot's next owner (field report 19, inv. 5)."""
    pair = broadcast(1)
    end = pair.attach(0)
    old = pair.send()
    assert keys(pair, end) == ["key"]
    pair.finish_fences()
    new = pair.send()
    assert new.slot == old.slot
    for _ in range(2):
        pair.inject(end, wire.Release(old.slot, old.generation))
    pair.inject(end, wire.Refuse(old.slot, old.generation, ""), wire.Take(old.slot, 1))
    assert end.peer.stale == pair.exporter.tally.stale == 4
    assert new.holders == {end.id}
    assert not pair.fences
    pair.die(end)
    pair.inject(end, wire.Release(new.slot, new.generation))
    assert pair.exporter.tally.stale == 5
    assert new.outcome == Outcome(lost=(0,))


names = st.tuples(st.integers(0, 5) | st.just(2**62), st.integers(0, 4) | st.just(2**62))
lies = st.one_of(
    names.map(lambda name: wire.Take(*name)),
    names.map(lambda name: wire.Release(*name)),
    names.map(lambda name: wire.Release(*name, b"event", 65535)),
    names.map(lambda name: wire.Refuse(*name, "a lie")),
    st.just(wire.Goodbye(lingering=2**62)),
)


@pytest.mark.slow
@pytest.mark.parametrize("competes", [False, True])
@settings(max_examples=150, deadline=None)
@given(packets=st.lists(st.lists(lies, max_size=4), max_size=12))
def test_a_hostile_consumer_touches_only_what_is_its_own(
    competes: bool, packets: list[list[wire.FromConsumer]]
) -> None:
    """Kills a release, refusal or goodbye that reaches another peer's holdings.

    Field reports 19 and 53; inv. 5.  Under Compete the honest one may get more: what the hostile
    one lets go of without having taken it.
    """
    pair = compete() if competes else broadcast()
    hostile = pair.attach(None if competes else 0)
    honest = pair.attach(None if competes else 1)
    records = [pair.send() for _ in range(3)]
    records.append(pair.reserve())
    before = dict(honest.peer.holds)
    for packet in packets:
        pair.inject(hostile, *packet)
        assert before.items() <= honest.peer.holds.items()
        assert competes or before == honest.peer.holds
        assert all(honest.id in record.holders for record in before.values())
        assert pair.exporter.slots.states[records[3].slot] is SlotState.FILLING
        assert sum(pair.exporter.slots.counts) == 4
        for record in records:
            named = [*record.outcome.released, *(m for m, _ in record.outcome.refused)]
            assert honest.member not in named
            assert len(named) == len(set(named))
        for record in pair.fences:
            assert not record.holders
            assert not record.waiting
    assert len(set(map(id, pair.fences))) == len(pair.fences)
