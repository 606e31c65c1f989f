"""Whom the next batch goes to."""

from __future__ import annotations

import pytest

from asyncvmm._core.ledger import ANYONE, BatchRecord, Peer, PeerState, Record
from asyncvmm._core.routing import Competitors, Ranks
from asyncvmm._errors import ArgumentError, RankError
from asyncvmm._types import Group


def batch(number: int) -> BatchRecord:
    return BatchRecord(number, [Record(0, number, 0, 256)], b"")


def seated(ranks: Ranks, rank: int) -> Peer:
    peer = Peer(rank, ranks.member(rank, None), window=2)
    ranks.reserve(peer)
    peer.state = PeerState.OPEN
    return peer


def competing(route: Competitors, peer_id: int, window: int = 2, name: str | None = None) -> Peer:
    peer = Peer(peer_id, route.member(None, name), window)
    route.reserve(peer)
    peer.state = PeerState.OPEN
    return peer


# -- Broadcast --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "ranks"),
    [
        (None, (0, 1, 2, 3)),
        (2, (2,)),
        ([3, 1, 3], (1, 3)),
        (range(1, 3), (1, 2)),
        (Group(0, 3), (0, 3)),
    ],
)
def test_a_batch_goes_to_the_ranks_that_were_named(to: object, ranks: tuple[int, ...]) -> None:
    """Kills a narrowing that is ignored, doubled or off by one."""
    assert Ranks(4).targets(to) == ranks  # type: ignore[arg-type]  # all kinds that it may be


@pytest.mark.parametrize("to", [4, [0, 4], Group(4), range(2, 9)])
def test_a_rank_that_does_not_exist_is_refused_with_the_numbers(to: object) -> None:
    """Kills a batch that waits for ever for a rank that cannot come."""
    with pytest.raises(RankError, match="ranks are 0 to 3") as caught:
        Ranks(4).targets(to)  # type: ignore[arg-type]  # all kinds that it may be
    assert (caught.value.rank, caught.value.consumer_count) in {(4, 4), (8, 4)}


@pytest.mark.parametrize("to", [[], (), -1, [True], "01", [1.0]])
def test_what_is_no_rank_is_refused(to: object) -> None:
    """Kills a batch that is sent to nobody and never acknowledged."""
    with pytest.raises(ArgumentError):
        Ranks(4).targets(to)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(("rank", "says"), [(None, "rank="), (-1, "out of range"), (2, "range")])
def test_an_impossible_seat_is_refused(rank: int | None, says: str) -> None:
    """Kills a seat outside of range(consumer_count)."""
    with pytest.raises(RankError, match=says) as caught:
        Ranks(2).member(rank, None)
    assert (caught.value.rank, caught.value.consumer_count) == (rank, 2)


def test_a_seat_is_taken_until_its_own_peer_leaves() -> None:
    """Kills a late goodbye that frees the seat of the next peer."""
    ranks = Ranks(2)
    first = seated(ranks, 1)
    with pytest.raises(RankError, match="taken"):
        ranks.member(1, None)
    ranks.leave(first)
    second = seated(ranks, 1)
    ranks.leave(first)
    assert ranks.seats == {1: second}


def test_what_waits_for_a_rank_comes_once_and_in_order() -> None:
    """Kills a backlog that is delivered twice, in the wrong order, or to another rank."""
    ranks = Ranks(2)
    batches = [batch(number) for number in range(3)]
    for each in batches:
        ranks.keep(1, each)
    assert list(ranks.sit(seated(ranks, 0))) == []
    peer = seated(ranks, 1)
    assert list(ranks.sit(peer)) == batches
    assert list(ranks.sit(peer)) == []


def test_giving_up_names_every_rank_and_batch_once() -> None:
    """Kills a backlog that is forgotten, or delivered after it was settled."""
    ranks = Ranks(3)
    one, two = batch(1), batch(2)
    ranks.keep(0, one)
    ranks.keep(2, one)
    ranks.keep(2, two)
    assert ranks.give_up() == [(0, one), (2, one), (2, two)]
    assert ranks.give_up() == []
    assert list(ranks.sit(seated(ranks, 2))) == []


# -- Compete ----------------------------------------------------------------------------------


def test_names_are_made_up_around_those_that_are_taken() -> None:
    """Kills a made-up name that somebody already has."""
    route = Competitors()
    competing(route, 0, name="consumer-1")
    competing(route, 1, name="consumer-2")
    assert competing(route, 2).member == "consumer-3"
    assert competing(route, 3).member == "consumer-4"


@pytest.mark.parametrize("name", ["worker", ANYONE])
def test_a_taken_name_is_refused(name: str) -> None:
    """Kills two consumers whom no outcome can tell apart."""
    route = Competitors()
    worker = competing(route, 0, name="worker")
    with pytest.raises(RankError, match="taken"):
        route.member(None, name)
    route.leave(worker)
    if name != ANYONE:
        assert route.member(None, name) == name


def test_ranks_are_refused_under_compete() -> None:
    """Kills a rank that is silently taken for a name."""
    with pytest.raises(RankError, match="rank=3"):
        Competitors().member(3, None)


def test_compete_cannot_be_narrowed() -> None:
    """Kills a ``to`` that is silently ignored."""
    assert Competitors().targets(None) == ()
    with pytest.raises(ArgumentError, match="cannot narrow"):
        Competitors().targets(0)


def give(route: Competitors) -> Peer | None:
    """Hand out the next batch, as the exporter does."""
    peer = route.freest()
    if peer is not None:
        given = route.pending.popleft()
        peer.untaken[given.number] = given
    return peer


def test_the_freest_gets_the_next_batch_and_equals_take_turns() -> None:
    """Kills a route that feeds one consumer while others wait."""
    route = Competitors()
    first, second = competing(route, 0), competing(route, 1)
    route.pending.extend(batch(number) for number in range(6))
    assert [give(route) for _ in range(5)] == [first, second, first, second, None]
    second.untaken.popitem()
    assert give(route) is second
    assert len(route.pending) == 1


def test_of_equals_the_one_that_has_waited_longest_gets_the_next() -> None:
    """Kills a consumer that gets everything because it always takes at once."""
    route = Competitors()
    peers = [competing(route, number) for number in range(3)]
    served = []
    for number in range(6):
        route.pending.append(batch(number))
        served.append(give(route))
        peers[number % 3].untaken.clear()
    assert served == [*peers, *peers]


def test_who_has_no_credit_gets_nothing_although_it_has_least() -> None:
    """Kills a window that is forgotten as soon as another consumer has a larger one."""
    route = Competitors()
    large, small = competing(route, 0, window=3), competing(route, 1, window=1)
    route.pending.extend(batch(number) for number in range(5))
    assert [give(route) for _ in range(5)] == [large, small, large, large, None]


@pytest.mark.parametrize("why", ["connecting", "closing", "no credit", "told goodbye"])
def test_who_may_not_get_a_batch_gets_none(why: str) -> None:
    """Kills a batch that is handed to somebody who will not read it."""
    route = Competitors()
    peer = competing(route, 0, window=1)
    route.pending.append(batch(1))
    if why == "connecting":
        peer.state = PeerState.CONNECTING
    elif why == "closing":
        peer.state = PeerState.CLOSING
    elif why == "no credit":
        peer.untaken[9] = batch(9)
    else:
        peer.told = True
    assert route.freest() is None
    assert len(route.pending) == 1


def test_what_comes_back_goes_first_again() -> None:
    """Kills a batch that falls behind whenever its consumer dies."""
    route = Competitors()
    one, two, three, four = (batch(number) for number in range(1, 5))
    route.pending.extend([two, four])
    route.put_back([one, three])
    assert list(route.pending) == [one, two, three, four]


def test_busy_while_anything_may_still_be_handed_out() -> None:
    """Kills a goodbye that is said before the last batch."""
    route = Competitors()
    busy = [route.busy]
    route.pending.append(batch(1))
    busy.append(route.busy)
    peer = competing(route, 0)
    give(route)
    busy.append(route.busy)
    peer.untaken.clear()
    busy.append(route.busy)
    assert busy == [False, True, True, False]
    assert Ranks(1).busy is False
