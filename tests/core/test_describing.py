"""How long a message about owners can be, before their slots are known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncvmm._core import describing, wire
from asyncvmm._errors import ArgumentError
from asyncvmm._types import MAX_SLOTS

LARGEST = 2**62

features = st.lists(
    st.builds(
        wire.Feature,
        st.text("a\u00e9\u20ac\U0001f600", max_size=40),
        st.sampled_from(["int8", "float8_e4m3fn"]),
        st.lists(st.integers(0, LARGEST), max_size=5).map(tuple),
    ),
    min_size=1,
    max_size=4,
)
numbers = st.integers(0, LARGEST) | st.sampled_from([0, LARGEST])
keys = st.integers(-(2**63), 2**64 - 1) | st.text("a\u20ac", max_size=wire.MAX_KEY)
frames = st.builds(
    wire.OwnerFrame, numbers, numbers, numbers, numbers, keys, features, st.binary(max_size=300)
)


def most(frame: wire.OwnerFrame) -> int:
    """Return what an owner is taken to need at most, as its exporter does."""
    described = describing.features_bytes(frame.features)
    return described + describing.OWNER_BYTES + wire.check_key(frame.key) + len(frame.metadata)


@settings(max_examples=30)
@given(st.lists(frames, min_size=1, max_size=3))
def test_no_message_is_longer_than_its_owners_were_taken_to_need(
    owners: list[wire.OwnerFrame],
) -> None:
    """Kills: a header, or a number of nine bytes, that is not counted."""
    needed = describing.BATCH_BYTES + sum(map(most, owners))
    if needed <= wire.MESSAGE_LIMIT:
        assert len(wire.encode(wire.Deliver(owners))) <= needed
        assert len(wire.encode(wire.Redeemed(owners[0]))) <= needed


def test_the_longest_owner_is_taken_to_need_just_what_it_does() -> None:
    """Kills: a bound that refuses what would fit."""
    feature = wire.Feature("x", "int8", (1,))
    owner = wire.OwnerFrame(
        LARGEST, LARGEST, LARGEST, LARGEST, 2**64 - 1, [feature], b"m" * (wire.MESSAGE_LIMIT // 2)
    )
    assert wire.check_key(owner.key) == describing.NUMBER_BYTES
    needed = describing.BATCH_BYTES + most(owner)
    assert len(wire.encode(wire.Deliver([owner]))) == needed - 2  # a short array header
    many = wire.OwnerFrame(LARGEST, LARGEST, LARGEST, LARGEST, 2**64 - 1, [feature], b"")
    spare = MAX_SLOTS  # the header of its metadata has two bytes instead of three
    length = len(wire.encode(wire.Deliver([many] * MAX_SLOTS)))
    assert length == describing.BATCH_BYTES + MAX_SLOTS * most(many) - spare


def test_features_that_fit_alone_fit_with_a_number_for_a_key() -> None:
    """Kills: an owner about which nothing is said, and whose message is too long all the same."""
    rest = describing.OWNER_BYTES + describing.NUMBER_BYTES + describing.BATCH_BYTES
    found = [wire.Feature("x" * 1000, "int8", (1,)) for _ in range(64)]
    length = wire.MESSAGE_LIMIT - rest - len(wire.encode(found)) - 3
    for more, fits in ((0, True), (1, False)):
        last = wire.Feature("x" * (length - 8 + more), "int8", (1,))
        all_ = [*found, last]
        if fits:
            assert describing.features_bytes(all_) == wire.MESSAGE_LIMIT - rest
            owner = wire.OwnerFrame(LARGEST, LARGEST, LARGEST, LARGEST, 2**64 - 1, all_)
            assert len(wire.encode(wire.Deliver([owner]))) <= wire.MESSAGE_LIMIT
        else:
            with pytest.raises(ArgumentError, match="takes 65,473 bytes"):
                describing.features_bytes(all_)
