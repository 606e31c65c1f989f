"""ConsumerCore: what it refuses, what it holds, and how it goes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncvmm._core import wire
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.layout import feature_bytes
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import LocalProtocolError, RemoteProtocolError
from asyncvmm._types import MAX_SLOTS, RegionInfo, SegmentInfo
from tests.core.pair import hear

GRANULE = 4096
BIG = 2**62
REGION = RegionInfo("host", 4 * GRANULE, GRANULE, slots=4)
FEATURES = [wire.Feature("a", "float32", (3, 5)), wire.Feature("b", "int16", (200,))]
OWNER = wire.OwnerFrame(1, 1, 256, 768, "key", FEATURES)


def consumer(*segments: int, competes: bool = False) -> ConsumerCore:
    core = ConsumerCore(REGION, competes=competes)
    for index in segments or (0,):
        info = SegmentInfo(index, index * GRANULE, GRANULE)
        core.check_segment(info)
        core.add_segment(info)
    return core


def owner(slot: int = 1, generation: int = 1, **changes: object) -> wire.OwnerFrame:
    return msgspec.structs.replace(OWNER, slot=slot, generation=generation, **changes)


def said(core: ConsumerCore) -> list[wire.FromConsumer]:
    messages = wire.decode_from_consumer(wire.frame(core.outgoing))
    core.outgoing.clear()
    return messages


# -- what is refused --------------------------------------------------------------------------

ALTERED: dict[str, dict[str, object]] = {
    "a slot the pool does not have": {"slot": 4},
    "a slot far out": {"slot": 2**62},
    "generation 0": {"generation": 0},
    "a start outside every segment": {"start": 3 * GRANULE},
    "a start far out": {"start": 2**62},
    "an end past the last segment": {"start": GRANULE - 512},
    "a start between two alignments": {"start": 255},
    "no bytes": {"nbytes": 0},
    "one alignment more than the features take": {"nbytes": 1024},
    "one alignment less": {"nbytes": 512},
    "a length between two alignments": {"nbytes": 767},
    "a huge length": {"nbytes": 2**62},
    "one feature less": {"features": FEATURES[:1]},
    "one feature more": {"features": [*FEATURES, wire.Feature("c", "bool", ())]},
    "no feature": {"features": []},
    "a name twice": {"features": [FEATURES[0], wire.Feature("a", "int16", (200,))]},
    "a longer shape": {"features": [FEATURES[0], wire.Feature("b", "int16", (257,))]},
    "a shorter shape": {"features": [FEATURES[0], wire.Feature("b", "int16", (128,))]},
    "a huge shape": {"features": [wire.Feature("a", "int16", (2**62,) * 64)]},
    "too many dimensions": {"features": [wire.Feature("a", "int16", (1,) * 65)]},
    "a wider dtype": {"features": [FEATURES[0], wire.Feature("b", "int64", (200,))]},
    "a dtype that nobody knows": {"features": [FEATURES[0], wire.Feature("b", "i2", (200,))]},
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_owner_is_refused_and_nothing_is_kept(what: str) -> None:
    """Kills a field that is used unchecked (field reports 51 and 53)."""
    core = consumer()
    bad = msgspec.structs.replace(OWNER, **ALTERED[what])
    for owners in ([bad], [owner(slot=0), bad], [bad, owner(slot=0)]):
        with pytest.raises(RemoteProtocolError):
            core.deliver(wire.Deliver(owners))
        assert not core.held
        assert not core.inbox
        assert not core.outgoing
    core.deliver(wire.Deliver([OWNER]))
    assert core.take() == [OWNER]


def test_features_that_are_swapped_but_take_the_same_bytes_are_another_owner() -> None:
    """Kills a layout that is remembered instead of computed: an offset never travels."""
    core = consumer()
    swapped = owner(features=FEATURES[::-1])
    core.deliver(wire.Deliver([swapped]))
    assert core.take() == [swapped]


@pytest.mark.parametrize("when", ["held", "released"])
@pytest.mark.parametrize("generation", [4, 5])
def test_an_old_generation_is_refused(when: str, generation: int) -> None:
    """Kills a slot that is read under two names at once (field report 19)."""
    core = consumer()
    first = owner(generation=5)
    core.deliver(wire.Deliver([first]))
    if when == "released":
        core.take()
        core.release(first)
    with pytest.raises(RemoteProtocolError, match="generation 5 was already here"):
        core.deliver(wire.Deliver([owner(generation=generation)]))
    assert list(core.held) == ([1] if when == "held" else [])


def test_a_slot_that_is_held_is_refused_also_in_a_younger_generation() -> None:
    """Kills a slot whose owner is overwritten while it is read."""
    core = consumer()
    core.deliver(wire.Deliver([owner(generation=5)]))
    with pytest.raises(RemoteProtocolError, match="slot 1"):
        core.deliver(wire.Deliver([owner(generation=6)]))


def test_one_slot_twice_in_a_batch_is_refused() -> None:
    """Kills a batch whose first owner nobody can release."""
    core = consumer()
    with pytest.raises(RemoteProtocolError, match="two owners"):
        core.deliver(wire.Deliver([OWNER, owner(generation=2)]))
    assert not core.held


def test_a_batch_after_the_goodbye_is_refused() -> None:
    """Kills a consumer that ends its iteration and then gets one more batch."""
    core = consumer()
    core.deliver(wire.Deliver([OWNER]))
    core.goodbye(wire.Goodbye(reason="closed"))
    assert core.take() == [OWNER], "what came before it may be read"
    with pytest.raises(RemoteProtocolError, match="after its goodbye"):
        core.deliver(wire.Deliver([owner(slot=2)]))


@pytest.mark.parametrize(
    "region",
    [
        RegionInfo("host", GRANULE, GRANULE, slots=0),
        RegionInfo("host", GRANULE, GRANULE, slots=1025),
        RegionInfo("host", GRANULE, GRANULE, slots=2**60),
        RegionInfo("host", GRANULE, 0, slots=1),
        RegionInfo("host", GRANULE, -1, slots=1),
        RegionInfo("host", 0, GRANULE, slots=1),
        RegionInfo("host", -GRANULE, GRANULE, slots=1),
        RegionInfo("host", GRANULE + 1, GRANULE, slots=1),
    ],
)
def test_an_impossible_pool_is_refused(region: RegionInfo) -> None:
    """Kills a division by zero and a table of 2**60 slots (field report 53)."""
    with pytest.raises(RemoteProtocolError, match="no pool can have"):
        ConsumerCore(region, competes=False)


def test_the_smallest_and_the_largest_pool_are_possible() -> None:
    """Kills a bound that is off by one."""
    ConsumerCore(RegionInfo("host", 1, 1, slots=1), competes=False)
    ConsumerCore(RegionInfo("host", BIG, BIG, slots=MAX_SLOTS), competes=False)


def test_an_owner_may_fill_a_segment_from_end_to_end() -> None:
    """Kills a range check that is off by one at either end."""
    core = consumer()
    whole = owner(start=0, nbytes=GRANULE, features=[wire.Feature("a", "uint8", (GRANULE,))])
    core.deliver(wire.Deliver([whole]))
    assert core.take() == [whole]
    assert core.delivered == 1


@pytest.mark.parametrize("slot", [-1, 4, 2**62])
def test_an_event_for_no_slot_is_refused(slot: int) -> None:
    """Kills an index that wraps around."""
    consumer().check_slot(3)
    with pytest.raises(RemoteProtocolError, match="4 slots"):
        consumer().check_slot(slot)


VALID = [
    wire.Segment(SegmentInfo(1, GRANULE, GRANULE)),
    wire.Ready(1, b"event"),
    wire.Deliver([OWNER, owner(slot=2, start=2048)]),
    wire.Deliver([owner(slot=0, start=GRANULE - 256)]),
    wire.Unmap(1),
    wire.Goodbye(),
]


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    said=st.lists(st.sampled_from(VALID), min_size=1, max_size=8),
    flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=3),
)
def test_an_altered_packet_is_refused_or_harmless(
    said: list[wire.FromExporter], flips: list[tuple[int, int]]
) -> None:
    """Kills any other exception, and an owner outside of the mapping (field report 53)."""
    core = consumer()
    packet = bytearray(wire.frame([wire.encode(message) for message in said]))
    for at, value in flips:
        packet[at % len(packet)] = value
    with suppress(RemoteProtocolError):
        for message in wire.decode_from_exporter(memoryview(packet)):
            hear(core, message)
    for slot, held in core.held.items():
        assert 0 <= slot < REGION.slots
        assert any(
            low <= held.start < held.start + held.nbytes <= high for low, high in core._mapped
        )
        assert sum(-(-feature_bytes("", f.dtype, f.shape) // 256) for f in held.features) == (
            held.nbytes // 256
        )
    assert [frame for batch in core.inbox for frame in batch] == list(core.held.values())


# -- segments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "info",
    [
        SegmentInfo(-1, 0, GRANULE),
        SegmentInfo(1, -GRANULE, GRANULE),
        SegmentInfo(1, 4 * GRANULE, GRANULE),
        SegmentInfo(1, 3 * GRANULE, 2 * GRANULE),
        SegmentInfo(1, GRANULE + 256, GRANULE),
        SegmentInfo(1, GRANULE, GRANULE + 256),
        SegmentInfo(1, GRANULE, 0),
        SegmentInfo(1, GRANULE, -GRANULE),
        SegmentInfo(1, 2**63, 2**63),
        SegmentInfo(0, GRANULE, GRANULE),
        SegmentInfo(1, 0, GRANULE),
        SegmentInfo(1, 0, 2 * GRANULE),
    ],
)
def test_an_impossible_segment_is_refused_before_it_is_mapped(info: SegmentInfo) -> None:
    """Kills a mapping outside of the range, or over another one (field report 53)."""
    core = consumer(0)
    with pytest.raises(RemoteProtocolError, match="segment"):
        core.check_segment(info)
    assert core.segment_count == 1


def test_an_owner_may_lie_across_segments_that_touch_but_not_across_a_hole() -> None:
    """Kills a check that knows only single segments, or only their sum (field report 22)."""
    across = owner(start=GRANULE - 256)
    consumer(1, 0).deliver(wire.Deliver([across]))
    with pytest.raises(RemoteProtocolError, match="outside the mapped segments"):
        consumer(0, 2).deliver(wire.Deliver([across]))
    with pytest.raises(RemoteProtocolError, match="outside the mapped segments"):
        consumer(1, 2).deliver(wire.Deliver([across]))


def test_a_segment_is_given_back_only_when_nobody_reads_in_it() -> None:
    """Kills an unmapping under a view (field report 16), and one of what is not there."""
    core = consumer(0, 1, 2)
    across = owner(start=GRANULE - 256)
    core.deliver(wire.Deliver([across]))
    core.take()
    for index in (0, 1):
        with pytest.raises(RemoteProtocolError, match="lies in it"):
            core.remove_segment(index)
    assert core.remove_segment(2) == SegmentInfo(2, 2 * GRANULE, GRANULE)
    with pytest.raises(RemoteProtocolError, match="is not mapped"):
        core.remove_segment(2)
    core.release(across)
    assert core.remove_segment(1).index == 1
    with pytest.raises(RemoteProtocolError, match="outside"):
        core.deliver(wire.Deliver([owner(generation=2, start=GRANULE - 256)]))
    core.check_segment(SegmentInfo(7, GRANULE, 3 * GRANULE))
    core.add_segment(SegmentInfo(7, GRANULE, 3 * GRANULE))
    core.deliver(wire.Deliver([owner(generation=2, start=GRANULE - 256)]))


def test_what_lies_where_this_process_could_not_map_is_refused_with_the_reason() -> None:
    """Kills a failed mapping that holds its owners for ever (field reports 1 and 13)."""
    core = consumer(0)
    core.add_segment(SegmentInfo(1, GRANULE, GRANULE), failure="out of address space")
    across = owner(slot=2, start=GRANULE - 256)
    core.deliver(wire.Deliver([OWNER, across]))
    core.deliver(wire.Deliver([owner(slot=3, start=1024)]))
    refusals = said(core)
    assert [type(message) for message in refusals] == [wire.Refuse] * 2
    assert all("out of address space" in message.reason for message in refusals)  # type: ignore[union-attr]  # all are Refuse
    assert list(core.held) == [3]
    assert len(core.inbox) == core.delivered == 1
    core.take()
    assert (core.has_mapped(0), core.has_mapped(1), core.has_mapped(2)) == (True, False, False)
    core.remove_segment(1)
    assert core.segment_count == 1
    assert not core.has_mapped(1)
    core.add_segment(SegmentInfo(1, GRANULE, GRANULE))
    assert core.has_mapped(1)
    later = owner(slot=2, generation=2, start=GRANULE - 256)
    core.deliver(wire.Deliver([later]))
    assert core.take() == [later], "the second try to map it worked"


def test_what_ends_where_the_missing_segment_begins_is_not_refused() -> None:
    """Kills an overlap that is off by one at either end."""
    core = consumer(0, 2)
    core.add_segment(SegmentInfo(1, GRANULE, GRANULE), failure="no")
    before, after = owner(slot=0, start=GRANULE - 768), owner(slot=1, start=2 * GRANULE)
    core.deliver(wire.Deliver([before, after]))
    assert core.take() == [before, after]
    assert not core.outgoing


# -- settling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settle", [ConsumerCore.release, lambda c, o: c.refuse(o, "why")])
def test_an_owner_is_settled_once(
    settle: Callable[[ConsumerCore, wire.OwnerFrame], None],
) -> None:
    """Kills a second release, also one of an owner with the same name (inv. 6)."""
    core = consumer()
    core.deliver(wire.Deliver([OWNER]))
    core.take()
    settle(core, OWNER)
    assert len(said(core)) == 1
    for again in (ConsumerCore.release, lambda c, o: c.refuse(o, "why")):
        with pytest.raises(LocalProtocolError, match="settled twice"):
            again(core, OWNER)
    assert not core.outgoing
    assert core.released + core.refused == 1


def test_a_release_carries_its_event_and_its_lane() -> None:
    """Kills an event that is sent to the wrong slot, or forgotten."""
    core = consumer()
    core.deliver(wire.Deliver([OWNER]))
    core.take()
    core.release(OWNER, b"event", lane=7)
    assert said(core) == [wire.Release(1, 1, b"event", 7)]


@pytest.mark.parametrize("reason", ["x" * 5000, "\ud800 is no text", "\u20ac" * 1024, ""])
def test_any_reason_can_be_given(reason: str) -> None:
    """Kills a refusal that is lost because its reason cannot travel (field report 1)."""
    core = consumer()
    core.deliver(wire.Deliver([OWNER]))
    core.take()
    core.refuse(OWNER, reason)
    (message,) = said(core)
    assert isinstance(message, wire.Refuse)
    assert message.reason == reason.replace("\ud800", "?")[:1024]


def test_taking_tells_only_under_compete() -> None:
    """Kills a credit that is not returned, or returned to a route that has none."""
    for competes in (False, True):
        core = consumer(competes=competes)
        assert core.take() is None
        core.deliver(wire.Deliver([OWNER, owner(slot=2)]))
        core.take()
        assert said(core) == ([wire.Take(1, 1)] if competes else [])
        assert core.take() is None
        assert not core.outgoing


@pytest.mark.parametrize("competes", [False, True])
def test_leaving_lets_go_of_what_is_unread_and_keeps_what_is_viewed(competes: bool) -> None:
    """Kills a goodbye that leaves owners behind (field report 1), in either order of crossing."""
    core = consumer(competes=competes)
    read, unread, late = owner(slot=0), owner(slot=1), owner(slot=2)
    core.deliver(wire.Deliver([read]))
    core.deliver(wire.Deliver([unread]))
    core.take()
    core.outgoing.clear()
    core.leave()
    core.leave()
    declined = [] if competes else [wire.Refuse(1, 1, "dropped unread")]
    assert said(core) == [*declined, wire.Goodbye(lingering=1)]
    assert core.state is PeerState.CLOSING
    core.deliver(wire.Deliver([late]))
    assert said(core) == ([] if competes else [wire.Refuse(2, 1, "the consumer is leaving")])
    assert list(core.held) == [0]
    core.release(read)
    assert said(core) == [wire.Release(0, 1)]


def test_a_lost_link_leaves_what_was_taken_and_nothing_else() -> None:
    """Kills a mapping that is kept for ever for owners that nobody can read (inv. 15)."""
    core = consumer()
    core.deliver(wire.Deliver([owner(slot=0)]))
    core.deliver(wire.Deliver([owner(slot=1), owner(slot=2)]))
    (taken,) = core.take() or []
    assert core.lose() == 1
    assert list(core.held) == [0]
    assert core.take() is None
    core.release(taken)
    core.leave()
    assert not core.held
    assert not core.outgoing, "there is nobody to tell"
    assert core.state is PeerState.CLOSED
    assert core.lose() == 0


# -- another link -----------------------------------------------------------------------------


@pytest.mark.parametrize("competes", [False, True])
def test_another_link_hears_what_became_of_everything(competes: bool) -> None:
    """Kills a word that is said for the wrong owner, said of what is held, or not at all.

    Held and read, released, refused, unread when the link broke, and one that never came.
    """
    core = consumer(competes=competes)
    for slot in range(4):
        core.deliver(wire.Deliver([owner(slot=slot)]))
    taken = [core.take() for _ in range(3)]
    (read,), (released,), (refused,) = (batch for batch in taken if batch)
    core.release(released, b"event", 7)
    core.refuse(refused, "why not")
    said(core)
    assert core.lose() == 1
    core.resume([(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)])
    assert core.state is PeerState.CLOSING
    repeated = [wire.Release(1, 1, b"event", 7), wire.Refuse(2, 1, "why not")]
    lost = [wire.Refuse(3, n, "it was lost with the link") for n in (1, 2)]
    goodbye = wire.Goodbye(lingering=1)
    if competes:  # unread ones go to another, because of the goodbye
        assert said(core) == [wire.Take(0, 1), *repeated, goodbye]
    else:
        assert said(core) == [*repeated, *lost, goodbye]
    core.release(read)
    assert said(core) == [wire.Release(0, 1)]
    assert core.lose() == 0


@pytest.mark.parametrize("competes", [False, True])
def test_an_answer_to_a_ticket_that_was_lost_with_the_link_is_refused(competes: bool) -> None:
    """Kills: an owner that a competitor redeemed and never got, out until its process ends.

    No goodbye gives it up: that is for what the exporter chose a competitor for.
    """
    core = consumer(competes=competes)
    for slot in range(2):
        core.redeem(slot, 1, b"p" * 16)
    core.redeemed(wire.Redeemed(owner(slot=0)))
    core.lose()
    said(core)
    core.resume([(0, 1), (1, 1)])
    held = [wire.Take(0, 1)] if competes else []
    refusal = wire.Refuse(1, 1, "it was lost with the link")
    assert said(core) == [*held, refusal, wire.Goodbye(lingering=1)]


def test_what_is_said_without_a_link_is_said_on_the_next_one() -> None:
    """Kills a release that nobody heard."""
    core = consumer()
    core.deliver(wire.Deliver([owner(slot=0)]))
    (read,) = core.take() or []
    core.lose()
    core.release(read, b"event", 2)
    assert not core.outgoing
    core.resume([(0, 1)])
    assert said(core) == [wire.Release(0, 1, b"event", 2), wire.Goodbye()]


def test_another_link_is_not_believed_to_name_what_cannot_be() -> None:
    """Kills a slot that is used before it was checked."""
    core = consumer()
    core.lose()
    with pytest.raises(RemoteProtocolError, match="slot 99"):
        core.resume([(0, 1), (99, 1)])
    assert core.state is PeerState.CLOSED
    assert not core.outgoing
    core.resume([(0, 7)])
    assert said(core) == [wire.Refuse(0, 7, "it was lost with the link"), wire.Goodbye()]
