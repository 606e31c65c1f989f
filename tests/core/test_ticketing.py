"""Owners that are held for whoever shows a ticket: each share ends once, and never early.

The rules are tried one by one, and then in random histories, which are judged by what must hold
whatever happened: nobody holds bytes that were freed, and each member's share ends exactly once.
"""

from __future__ import annotations

import random

import pytest

from asyncvmm._core import wire
from asyncvmm._core.ledger import PeerState, Record
from asyncvmm._core.slots import SlotState
from asyncvmm._errors import RemoteProtocolError
from asyncvmm._types import Broadcast, Compete, Group, Key
from tests.core.pair import UNIT, End, Pair, features

PROOF = b"p" * 16
FORGED = b"f" * 16


def export(pair: Pair, *, to: Group | None = None, proof: bytes = PROOF) -> Record:
    """Export one owner of one feature."""
    record = pair.reserve()
    pair.exporter.publish(record, key="key", features=features(UNIT), to=to, proof=proof)
    pair.collect()
    return record


def redeem(pair: Pair, end: End, record: Record, proof: bytes = PROOF) -> None:
    """Have a consumer show a ticket; the answer comes when it is delivered."""
    end.core.redeem(record.slot, record.generation, proof)
    pair.collect()


def answer(end: End) -> wire.OwnerFrame | str:
    """Take the one answer that came: an owner, or the reason why not."""
    (found,) = end.core.answers
    end.core.answers.clear()
    return found.reason if isinstance(found, wire.Denied) else found


def redeemed(pair: Pair, end: End, record: Record, proof: bytes = PROOF) -> wire.OwnerFrame | str:
    """Show a ticket and take the answer."""
    redeem(pair, end, record, proof)
    pair.settle()
    return answer(end)


def waive(pair: Pair, end: End, record: Record, ranks: range | None = None) -> None:
    """Have a consumer acknowledge unread for some ranks, or itself."""
    end.core.waive(record.slot, record.generation, PROOF, ranks)
    pair.collect()
    pair.settle()


def frame_of(found: wire.OwnerFrame | str) -> wire.OwnerFrame:
    assert isinstance(found, wire.OwnerFrame), found
    return found


def absent(end: End) -> bool:
    return end.peer.absent


def ended(record: Record) -> list[Key]:
    """Return every member whose share has ended, as often as it has."""
    refused = [member for member, _ in record.refused]
    return sorted([*record.released, *refused, *record.lost], key=str)


def test_nothing_is_delivered_before_a_ticket_is_shown() -> None:
    pair = Pair(Broadcast(2))
    end = pair.attach(0)
    record = export(pair)
    pair.settle()
    assert not end.core.held
    assert record.waiting == {0, 1}
    assert frame_of(redeemed(pair, end, record)).slot == record.slot
    assert record.waiting == {1}
    assert not end.core.inbox, "it is no batch of the stream"


def test_the_answer_brings_the_ready_event_before_the_owner() -> None:
    """Kills: an owner before its event, and an event that is sent each time."""
    pair = Pair(Broadcast(1))
    end = pair.attach(0)
    record = pair.reserve()
    pair.exporter.publish(
        record, key=1, features=features(UNIT), proof=PROOF, ready=b"event %d" % record.slot
    )
    redeem(pair, end, record)
    pair.sent.clear()
    pair.deliver_up(end)
    assert [type(message) for _, message in pair.sent] == [wire.Ready, wire.Redeemed]
    pair.settle()
    pair.release(end, frame_of(answer(end)))
    pair.settle()
    pair.finish_fences()
    again = pair.reserve()
    assert again.slot == record.slot
    pair.exporter.publish(
        again, key=2, features=features(UNIT), proof=PROOF, ready=b"event %d" % again.slot
    )
    redeem(pair, end, again)
    pair.sent.clear()
    pair.deliver_up(end)
    assert [type(message) for _, message in pair.sent] == [wire.Redeemed], "it has the event"


def test_each_reason_to_deny_has_its_word() -> None:
    pair = Pair(Broadcast(2))
    first, second = pair.attach(0), pair.attach(1)
    record = export(pair, to=Group(0))
    assert redeemed(pair, second, record) == "not_addressed"
    assert redeemed(pair, first, record, FORGED) == "forged"
    owner = frame_of(redeemed(pair, first, record))
    assert redeemed(pair, first, record) == "borrowed"
    other = export(pair)
    waive(pair, first, other)
    assert redeemed(pair, first, other) == "released"
    pair.release(first, owner)
    pair.settle()
    pair.finish_fences()
    assert redeemed(pair, first, record) == "stale"
    assert pair.exporter.cancel(other.slot, other.generation, PROOF) is False
    assert redeemed(pair, second, other) == "stale"
    for slot, generation in ((3, 1), (99, 1), (0, 99), (0, 0)):
        first.core.redeem(slot, generation, PROOF)
        pair.collect()
        pair.settle()
        assert answer(first) == "forged", (slot, generation)


def test_a_forged_ticket_of_a_streamed_owner_is_refused_and_the_stream_goes_on() -> None:
    """Kills: an owner of the stream that is taken for the answer to a ticket."""
    pair = Pair(Broadcast(1))
    end = pair.attach(0)
    record = pair.send()
    redeem(pair, end, record, b"\0" * 16)
    end.core.waive(record.slot, record.generation, b"\0" * 16, None)
    pair.collect()
    pair.settle()
    assert answer(end) == "stale"
    assert [owner.slot for owner in pair.read(end)] == [record.slot]
    assert not record.waiting
    pair.settle()
    assert record.released == (0,)


def test_waiving_for_others_ends_only_what_they_have_not_redeemed() -> None:
    """Kills: a share that is held ended in another's name, and the bytes freed under it."""
    pair = Pair(Broadcast(3))
    ends = [pair.attach(rank) for rank in range(3)]
    record = export(pair)
    owner = frame_of(redeemed(pair, ends[1], record))
    waive(pair, ends[0], record, range(3))
    assert (record.waiting, record.holders) == (frozenset(), {ends[1].id})
    assert ended(record) == [0, 2]
    assert not pair.fences
    assert redeemed(pair, ends[2], record) == "released"
    pair.release(ends[1], owner)
    pair.settle()
    assert pair.fences == [record]
    assert ended(record) == [0, 1, 2]


def test_waiving_twice_is_counted_and_changes_nothing() -> None:
    """Kills: a second waive that counts for somebody else."""
    pair = Pair(Broadcast(2))
    first = pair.attach(0)
    record = export(pair)
    for _ in range(3):
        waive(pair, first, record)
    assert record.waiting == {1}
    assert (first.peer.stale, pair.exporter.tally.stale) == (2, 2)
    waive(pair, first, record, range(1, 2))
    assert pair.fences == [record]


def test_a_waive_of_an_older_generation_changes_nothing() -> None:
    pair = Pair(Broadcast(1), slots=1)
    end = pair.attach(0)
    old = export(pair)
    waive(pair, end, old)
    pair.finish_fences()
    new = export(pair)
    waive(pair, end, old)
    assert new.waiting == {0}
    assert end.peer.stale == 1


@pytest.mark.parametrize("way", ["die", "leave"])
def test_a_consumer_that_goes_settles_what_it_has_not_redeemed(way: str) -> None:
    """Kills: an owner that waits for ever for a rank that came and went."""
    pair = Pair(Broadcast(2))
    end = pair.attach(0)
    records = [export(pair), export(pair, to=Group(1))]
    late = pair.attach(1)
    getattr(pair, way)(late)
    pair.settle()
    assert records[0].waiting == {0}
    assert ended(records[0]) == [1]
    assert (records[0].lost == (1,)) == (way == "die")
    assert pair.fences == [records[1]]
    owner = frame_of(redeemed(pair, end, records[0]))
    pair.release(end, owner)
    pair.settle()
    assert pair.fences == [records[1], records[0]]


@pytest.mark.parametrize("way", ["die", "return", "cancel", "waive"])
def test_a_consumer_that_lost_its_link_keeps_its_share(way: str) -> None:
    """A killed process's socket is closed before its death is told of.

    Kills: a share that ends with the link; one that two consumers of a rank both end; a peer that
    is kept for ever although nothing can come of it.
    """
    pair = Pair(Broadcast(2))
    first, end = pair.attach(0), pair.attach(1)
    record = export(pair, to=Group(1))
    pair.vanish(end)
    assert record.waiting == {1}
    assert absent(end)
    if way == "die":
        pair.die(end)
        assert record.lost == (1,)
    elif way == "cancel":
        assert pair.exporter.cancel(record.slot, record.generation, PROOF)
        pair.collect()
    elif way == "waive":
        waive(pair, first, record, range(2))
    else:
        heir = pair.attach(1)
        assert not absent(end)
        pair.die(end)
        owner = frame_of(redeemed(pair, heir, record))
        pair.release(heir, owner)
        pair.settle()
        assert record.released == (1,)
    assert ended(record) == [1]
    assert pair.fences == [record]
    assert end.id not in pair.exporter.peers


def test_a_late_release_leaves_the_shares_of_an_absent_consumer() -> None:
    """Kills: a peer that is forgotten with its last owner, and whose death then settles nothing."""
    pair = Pair(Broadcast(1))
    end = pair.attach(0)
    held, unread = export(pair), export(pair)
    frame_of(redeemed(pair, end, held))
    pair.vanish(end)
    pair.inject(end, wire.Release(held.slot, held.generation))
    assert pair.fences == [held]
    pair.die(end)
    assert unread.lost == (0,)


def test_a_rank_that_never_attaches_keeps_its_share_waiting() -> None:
    pair = Pair(Broadcast(2))
    pair.attach(0)
    record = export(pair, to=Group(1))
    assert record.waiting == {1}
    late = pair.attach(1)
    frame_of(redeemed(pair, late, record))


def test_what_is_put_back_may_be_redeemed_again() -> None:
    """Kills: a generation that counts as seen, a share that ended although nothing was read."""
    pair = Pair(Broadcast(1))
    end = pair.attach(0)
    record = export(pair)
    for _ in range(3):
        owner = frame_of(redeemed(pair, end, record))
        end.core.put_back(owner)
        pair.collect()
        pair.settle()
        assert record.waiting == {0}
        assert not record.holders
        assert ended(record) == []
    pair.die(end)
    assert pair.fences == [record]
    assert record.lost == (0,)


def test_what_is_put_back_after_a_cancel_or_a_goodbye_is_over() -> None:
    for leaves in (False, True):
        pair = Pair(Broadcast(1))
        end = pair.attach(0)
        record = export(pair)
        owner = frame_of(redeemed(pair, end, record))
        if leaves:
            pair.leave(end)
            pair.settle()
        else:
            assert not pair.exporter.cancel(record.slot, record.generation, PROOF)
        end.core.put_back(owner)
        pair.collect()
        pair.settle()
        assert ended(record) == [0]
        assert pair.fences == [record]


def test_a_hostile_put_back_of_a_streamed_owner_is_a_refusal() -> None:
    pair = Pair(Broadcast(1))
    end = pair.attach(0)
    record = pair.send()
    pair.inject(end, wire.PutBack(record.slot, record.generation))
    pair.inject(end, wire.PutBack(record.slot, record.generation))
    assert pair.fences == [record]
    assert ended(record) == [0]


def test_a_competitor_redeems_and_nobody_else() -> None:
    pair = Pair(Compete())
    first, second = pair.attach(), pair.attach()
    record = export(pair)
    owner = frame_of(redeemed(pair, first, record))
    assert redeemed(pair, second, record) == "not_addressed"
    first.core.put_back(owner)
    pair.collect()
    pair.settle()
    owner = frame_of(redeemed(pair, second, record))
    assert not first.peer.untaken
    assert not second.peer.untaken
    pair.release(second, owner)
    pair.settle()
    assert pair.fences == [record]


def test_tickets_are_redeemed_after_the_exporters_goodbye() -> None:
    pair = Pair(Broadcast(1))
    end = pair.attach(0)
    record = export(pair)
    pair.say_goodbye()
    pair.settle()
    assert end.core.ended
    owner = frame_of(redeemed(pair, end, record))
    pair.release(end, owner)
    pair.settle()
    assert pair.fences == [record]


def test_giving_up_settles_what_nobody_redeemed() -> None:
    pair = Pair(Broadcast(2))
    end = pair.attach(0)
    record = export(pair)
    owner = frame_of(redeemed(pair, end, record))
    pair.say_goodbye()
    pair.give_up_waiting()
    assert (ended(record), record.waiting) == ([1], frozenset())
    pair.release(end, owner)
    pair.settle()
    assert pair.fences == [record]


def test_an_answer_that_was_not_asked_for_is_refused() -> None:
    pair = Pair(Broadcast(1))
    end = pair.attach(0)
    with pytest.raises(RemoteProtocolError):
        end.core.denied(wire.Denied(0, 1, "stale"))
    frame = wire.OwnerFrame(1, 1, UNIT, UNIT, "other", features(UNIT))
    with pytest.raises(RemoteProtocolError, match="not shown"):
        end.core.redeemed(wire.Redeemed(frame))


def test_an_owner_that_cannot_be_mapped_here_is_refused_and_said_so() -> None:
    pair = Pair(Broadcast(1))
    end = pair.attach(0)
    pair.settle()
    for info in pair.segments.values():
        end.core.remove_segment(info.index)
        end.core.add_segment(info, failure="no memory")
    record = export(pair)
    assert redeemed(pair, end, record) == "unmapped"
    pair.settle()
    assert pair.fences == [record]
    assert "no memory" in record.refused[0][1]


class History:
    """A random history of exports, tickets, deaths and packets, and its judge."""

    def __init__(self, seed: int, *, competes: bool) -> None:
        self.chance = random.Random(seed)
        self.competes = competes
        self.ranks = 3
        self.pair = Pair(Compete() if competes else Broadcast(self.ranks))
        self.out: list[tuple[Record, list[Key]]] = []  # whom each export or send is for
        self.hands: list[tuple[End, wire.OwnerFrame]] = []  # what consumers hold
        self.over: set[Record] = set()
        self.forged: set[tuple[int, int, int]] = set()  # peer, slot, generation

    def ends(self) -> list[End]:
        return [e for e in self.pair.ends.values() if e.linked and e.core.state is PeerState.OPEN]

    def attach(self) -> None:
        taken = {end.member for end in self.ends()}
        free = [rank for rank in range(self.ranks) if rank not in taken]
        seats = set(getattr(self.pair.exporter.route, "seats", ()))
        rank = next((rank for rank in free if rank not in seats), None)
        if self.competes and len(taken) < self.ranks:
            self.pair.attach()
        elif not self.competes and rank is not None:
            self.pair.attach(rank)

    def publish(self) -> None:
        record = self.pair.exporter.reserve(UNIT * self.chance.choice((1, 1, 2, 5)))
        if record is None:
            return
        to = None
        members: list[Key] = list(range(self.ranks))
        if not self.competes and self.chance.random() < 0.5:
            members = list(range(self.chance.randrange(1, self.ranks + 1)))
            to = Group(*[int(member) for member in members])
        proof = PROOF if self.chance.random() < 0.8 else b""
        self.pair.exporter.publish(
            record, key=len(self.out), features=features(record.nbytes), to=to, proof=proof
        )
        self.out.append((record, members))

    def record(self) -> Record | None:
        """Pick one of the last few, over or not."""
        return self.chance.choice(self.out[-6:])[0] if self.out else None

    def ticket(self) -> None:
        record = self.record()
        ends = self.ends()
        if record is None or not ends:
            return
        end = self.chance.choice(ends)
        proof = PROOF if self.chance.random() < 0.9 else FORGED
        if self.chance.random() < 0.6:
            if (record.slot, record.generation) not in end.core.asked:
                end.core.redeem(record.slot, record.generation, proof)
                name = (end.id, record.slot, record.generation)
                (self.forged.add if proof is FORGED else self.forged.discard)(name)
        else:
            first = self.chance.randrange(self.ranks)
            ranks = range(first, first + self.chance.randrange(1, 3))
            whom = None if self.chance.random() < 0.5 else ranks
            end.core.waive(record.slot, record.generation, proof, whom)

    def hand(self) -> None:
        """Let a consumer do something with what it holds."""
        for end in self.ends():
            while (owners := end.core.take()) is not None:
                self.hands += [(end, owner) for owner in owners]
        alive = [held for held in self.hands if held[0].alive]
        if not alive:
            return
        held = self.chance.choice(alive)
        self.hands.remove(held)
        end, owner = held
        exported = self.out[int(owner.key)][0].exported
        if self.chance.random() < 0.3 and exported:
            end.core.put_back(owner)
        elif self.chance.random() < 0.7:
            end.core.release(owner)
        else:
            end.core.refuse(owner, "no")

    def cancel(self) -> None:
        record = self.record()
        if record is not None and self.chance.random() < 0.3:
            proof = PROOF if self.chance.random() < 0.9 else FORGED
            self.pair.exporter.cancel(record.slot, record.generation, proof)

    def packet(self) -> None:
        busy = [end for end in self.pair.ends.values() if end.up or end.down]
        if not busy:
            return
        end = self.chance.choice(busy)
        if end.up and (not end.down or self.chance.random() < 0.5):
            self.pair.deliver_up(end)
        else:
            self.pair.deliver_down(end)
            found = [a for a in end.core.answers if isinstance(a, wire.OwnerFrame)]
            self.hands += [(end, owner) for owner in found]
            names = {(end.id, owner.slot, owner.generation) for owner in found}
            assert not names & self.forged, "an owner for a forged proof"
            end.core.answers.clear()

    def go(self) -> None:
        if not self.ends() or self.chance.random() < 0.6:
            return
        end = self.chance.choice(self.ends())
        way = self.chance.choice(("die", "leave", "vanish"))
        if way == "leave":
            self.pair.leave(end)
        elif way == "vanish":
            self.pair.vanish(end)
        else:
            self.die(end)

    def die(self, end: End) -> None:
        self.pair.die(end)
        self.hands = [held for held in self.hands if held[0] is not end]

    def fence(self) -> None:
        if self.pair.fences:
            self.pair.fence_done(self.chance.choice(self.pair.fences))

    def step(self) -> None:
        steps = (
            self.attach, self.publish, self.ticket, self.hand, self.cancel, self.go, self.fence,
        )  # fmt: skip
        weights = (3, 6, 14, 8, 2, 1, 4)
        if self.chance.random() < 0.5:
            self.packet()
        else:
            self.chance.choices(steps, weights)[0]()
        self.pair.collect()
        self.judge()

    def judge(self) -> None:
        exporter = self.pair.exporter
        for end in self.pair.ends.values():
            if not end.alive:
                continue
            for owner in end.core.held.values():
                record = exporter.records.get(owner.slot)
                assert record is not None, f"{end} holds {owner.key}, whose bytes were freed"
                assert record.generation == owner.generation
                assert end.id in record.holders
                state = exporter.slots.states[owner.slot]
                assert state in (SlotState.HELD, SlotState.QUARANTINED), state
        for record, members in self.out:
            if record not in self.over and record in self.pair.fences:
                self.over.add(record)
                found = ended(record)
                if self.competes:
                    assert len(found) == 1, found
                else:
                    assert found == members, f"the shares of {record!r}: {found}"
                assert record.slot not in exporter._exported

    def finish(self) -> None:
        """Let somebody sit in every seat, and end every consumer: all must come back."""
        if not self.competes:
            for end in self.ends():
                self.pair.leave(end)
            self.pair.settle()
            for rank in range(self.ranks):
                if rank not in self.pair.exporter.route.seats:  # type: ignore[union-attr]  # Ranks
                    self.pair.attach(rank)
        for end in list(self.pair.ends.values()):
            if end.alive:
                self.die(end)
                self.judge()
        if self.competes:
            self.pair.give_up_waiting()  # it is nobody's, so nobody's death ends it
        self.judge()
        self.pair.finish_fences()
        exporter = self.pair.exporter
        assert exporter.slots.counts == [len(exporter.slots.states), 0, 0, 0, 0]
        assert exporter.bytes.free_bytes == exporter.bytes.capacity
        assert not exporter._exported
        assert self.over == {record for record, _ in self.out}


@pytest.mark.parametrize("competes", [False, True])
@pytest.mark.parametrize("block", range(4))
def test_any_history_of_tickets_frees_nothing_early_and_everything_once(
    competes: bool, block: int
) -> None:
    """Kills: a waive that ends a held share; a death that settles a share twice, or not at all;
    a put back that counts as an end; a cancel that frees what is held; a seat's shares that the
    next in the seat does not get; a proof that is not looked at.
    """
    for seed in range(block * 20, block * 20 + 20):
        history = History(seed, competes=competes)
        for _ in range(150):
            history.step()
        history.finish()
