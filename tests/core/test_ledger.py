"""Records and peers."""

from __future__ import annotations

from asyncvmm._core import ledger
from asyncvmm._core.ledger import BatchRecord, Peer, PeerState, Record
from asyncvmm._types import Outcome


def test_an_outcome_says_who_did_what_in_order() -> None:
    """Kills an outcome that mixes up the three ways out, or shares them between records."""
    record, other = Record(0, 1, 0, 256), Record(1, 1, 256, 256)
    assert record.outcome == Outcome()
    record.released += (2,)
    record.released += (0,)
    record.refused += ((1, "why"),)
    record.lost += (3,)
    assert record.outcome == Outcome(released=(2, 0), refused=((1, "why"),), lost=(3,))
    assert not record.outcome.complete
    assert other.outcome == Outcome()
    record.holders.add(1)
    assert not other.holders


def test_a_record_is_published_once_it_is_in_a_batch() -> None:
    """Kills a loan that a close takes for an owner that is out."""
    record = Record(0, 1, 0, 256)
    assert (record.published, record.ready, record.stamp) == (False, b"", 0.0)
    record.batch = BatchRecord(1, [record], b"")
    assert record.published


def test_shared_outcomes_are_bounded() -> None:
    """Kills a memory that grows with every name a competitor ever had."""
    for number in range(3000):
        record = Record(0, 1, 0, 256)
        record.released += (f"consumer-{number}",)
        assert record.outcome.released == (f"consumer-{number}",)
        assert 0 < len(ledger._complete) <= 1024


def test_outcomes_without_a_flaw_are_shared_and_right() -> None:
    """Kills a shared outcome that is found under another's name."""
    outcomes = set()
    for member in range(3000):
        record = Record(0, 1, 0, 256)
        record.released += (member,)
        assert record.outcome.released == (member,)
        assert record.outcome is record.outcome
        record.lost += ("worker",)
        outcomes.add(record.outcome)
        assert record.outcome == Outcome((member,), (), ("worker",))
    assert len(outcomes) == 3000


def test_a_peer_finds_only_what_it_holds_in_that_generation() -> None:
    """Kills a release that is matched by its slot alone (inv. 5, field report 19)."""
    peer = Peer(7, "worker", window=2)
    record = Record(3, 5, 0, 256)
    peer.holds[3] = record
    assert peer.find(3, 5) is record
    assert peer.stale == 0
    for slot, generation in ((3, 4), (3, 6), (2, 5), (2**62, 5), (3, 0)):
        assert peer.find(slot, generation) is None
    assert peer.stale == 5


def test_credit_is_the_window_less_what_is_not_taken() -> None:
    """Kills a credit that counts what is held instead of what is not taken."""
    peer = Peer(0, "worker", window=2)
    assert peer.credit == 2
    record = Record(0, 1, 0, 256)
    peer.holds[0] = record
    assert peer.credit == 2
    peer.untaken[1] = BatchRecord(1, [record], b"")
    assert peer.credit == 1


def test_names_for_people() -> None:
    """Kills a log line that does not say who and which."""
    peer = Peer(4, 1, window=2)
    assert peer.state is PeerState.CONNECTING
    assert repr(peer) == "Peer(4, 1, connecting, holds=0)"
    record = Record(3, 5, 0, 256)
    record.key = "request-17"
    assert repr(record) == "Record(slot=3, generation=5, key='request-17')"
