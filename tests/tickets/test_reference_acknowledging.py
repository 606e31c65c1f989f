"""What a user of SGLang's cuda_vmm transport relies on: who acknowledges for whom."""

from __future__ import annotations

import pickle

import pytest
import torch

from asyncvmm import (
    ArgumentError,
    AttentionGroup,
    AttentionGroupError,
    Broadcast,
    ReleasedTicketError,
    StaleTicketError,
)
from asyncvmm._groups import acknowledged_ranks
from asyncvmm.testing import open_pair
from tests.api.books import check_all_back, check_books, until

X = torch.arange(100, dtype=torch.float32)


def test_the_attention_group_is_the_contiguous_range_of_its_context_parallel_rank() -> None:
    for cp_rank in range(3):
        for tp_size in (1, 2, 4):
            for tp_rank in range(tp_size):
                group = AttentionGroup(cp_rank, tp_size, tp_rank)
                start = cp_rank * tp_size
                assert group.ranks(12) == range(start, start + tp_size)
                assert group.slot == start + tp_rank
                assert group.slot in group.ranks(12)


def test_a_range_outside_consumer_count_is_a_value_error_with_its_text_and_the_remedy() -> None:
    group = AttentionGroup(2, 2, 1)
    text = "attention group range [4, 6) is outside consumer_count=5"
    for count in (1, 2):
        with pytest.raises(ValueError, match="attention group range") as caught:
            acknowledged_ranks(count, rank=5, consumer_count=5, group=group)
        error = caught.value
        assert str(error) == text
        assert isinstance(error, AttentionGroupError)
        assert (error.start, error.end, error.consumer_count) == (4, 6, 5)
        assert "world size" in error.__notes__[0]
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.__notes__) == (str(error), error.__notes__)


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1"])
def test_a_count_below_one_is_a_value_error(count: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        acknowledged_ranks(count, rank=0, consumer_count=4)


def test_any_other_count_is_a_value_error_that_names_the_three_allowed_and_what_was_given() -> None:
    group = AttentionGroup(1, 2, 0)
    with pytest.raises(ValueError, match=r"count=3 .*1 .*group \(2\).*consumer_count \(4,"):
        acknowledged_ranks(3, rank=2, consumer_count=4, group=group)
    with pytest.raises(ValueError, match=r"count=2 .*no group was given.*consumer_count \(4,"):
        acknowledged_ranks(2, rank=2, consumer_count=4)


def test_the_three_counts_stand_for_the_rank_its_group_and_all() -> None:
    group = AttentionGroup(1, 2, 1)
    assert acknowledged_ranks(1, rank=3, consumer_count=4, group=group) == range(3, 4)
    assert acknowledged_ranks(2, rank=3, consumer_count=4, group=group) == range(2, 4)
    assert acknowledged_ranks(4, rank=3, consumer_count=4, group=group) == range(4)
    assert acknowledged_ranks(1, rank=3, consumer_count=4) == range(3, 4)
    assert acknowledged_ranks(4, rank=3, consumer_count=4) == range(4)


def test_a_group_of_another_rank_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"rank 2.*rank 3"):
        acknowledged_ranks(2, rank=3, consumer_count=4, group=AttentionGroup(1, 2, 0))


@pytest.mark.parametrize("numbers", [(-1, 2, 0), (0, 0, 0), (0, 2, 2), (0, 2, -1), (0, True, 0)])
def test_an_attention_group_that_cannot_be_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ArgumentError):
        AttentionGroup(*numbers)


async def test_a_call_acknowledges_for_its_own_rank() -> None:
    async with open_pair(consumers=4) as pair:
        tickets = await pair.exporter.export({"x": X})
        await pair.consumers[2].reconstruct(tickets["x"])
        await until(lambda: pair.exporter.statistics().owners[0].waiting_for == (0, 1, 3))
        pair.exporter.cancel(tickets.owner)


@pytest.mark.parametrize("way", ["reconstruct", "acknowledge"])
async def test_a_call_acknowledges_for_its_attention_group(way: str) -> None:
    async with open_pair(consumers=4) as pair:
        tickets = await pair.exporter.export({"x": X})
        group = AttentionGroup(1, 2, 1)
        if way == "reconstruct":
            await pair.consumers[3].reconstruct(tickets["x"], count=2, group=group)
        else:
            tickets["x"].acknowledge(pair.consumers[3], count=2, group=group)
        await until(lambda: pair.exporter.statistics().owners[0].waiting_for == (0, 1))
        await pair.consumers[0].reconstruct(tickets["x"], count=2, group=AttentionGroup(0, 2, 0))
        assert sorted((await tickets.acknowledgement).released) == [0, 1, 2, 3]
        check_all_back(pair.exporter)


@pytest.mark.parametrize("way", ["reconstruct", "acknowledge"])
async def test_a_call_acknowledges_for_all(way: str) -> None:
    async with open_pair(consumers=4) as pair:
        tickets = await pair.exporter.export({"x": X})
        if way == "reconstruct":
            await pair.consumers[1].reconstruct(tickets["x"], count=4)
        else:
            tickets["x"].acknowledge(pair.consumers[1], count=4)
        assert sorted((await tickets.acknowledgement).released) == [0, 1, 2, 3]
        check_all_back(pair.exporter)


async def test_a_wrong_count_is_told_before_anything_is_redeemed() -> None:
    async with open_pair(consumers=2) as pair:
        tickets = await pair.exporter.export({"x": X})
        for group in (None, AttentionGroup(1, 2, 0)):
            with pytest.raises(ValueError, match=r"3|range"):
                await pair.consumer.reconstruct(tickets["x"], count=3, group=group)
            with pytest.raises(ValueError, match=r"3|range"):
                pair.consumer.acknowledge(tickets["x"], count=3, group=group)
        assert check_books(pair.exporter).owners[0].waiting_for == (0, 1)
        assert pair.exporter.cancel(tickets.owner)


async def test_acknowledging_twice_or_for_each_other_never_frees_a_slot_early() -> None:
    """Kills: counting acknowledgements; one in another's name ending what that other holds."""
    async with open_pair(consumers=4) as pair:
        first, second, *others = pair.consumers
        groups = [AttentionGroup(0, 2, rank) for rank in (0, 1)]
        tickets = await pair.exporter.export({"x": X})
        ticket = tickets["x"]
        owner = await second.borrow(ticket)
        view = owner["x"]
        for _ in range(3):  # for itself and for the one that reads
            first.acknowledge(ticket, count=2, group=groups[0])
        for consumer in others:
            consumer.acknowledge(ticket)
            consumer.acknowledge(ticket)
        await until(lambda: sum(c.stale for c in pair.exporter.statistics().consumers) == 4)
        stats = check_books(pair.exporter)
        assert (stats.slots.held, stats.owners[0].held_by) == (1, (1,))
        assert torch.equal(view, X), "its bytes are nobody else's yet"
        second.acknowledge(ticket)  # holding it, it lets go by release() alone
        owner.release()
        assert not tickets.acknowledgement.done(), "a view is alive"
        del view
        assert sorted((await tickets.acknowledgement).released) == [0, 1, 2, 3]
        check_all_back(pair.exporter)


async def test_who_was_acknowledged_for_cannot_read_freed_bytes() -> None:
    async with open_pair(consumers=2) as pair:
        tickets = await pair.exporter.export({"x": X})
        held = await pair.exporter.export({"x": X})
        group = AttentionGroup(0, 2, 0)
        for exported in (tickets, held):
            await pair.consumers[0].reconstruct(exported["x"], count=2, group=group)
            await exported.acknowledgement
            with pytest.raises(StaleTicketError):
                await pair.consumers[1].reconstruct(exported["x"])
        check_all_back(pair.exporter)


async def test_who_was_acknowledged_for_is_denied_while_another_still_reads() -> None:
    async with open_pair(consumers=2) as pair:
        tickets = await pair.exporter.export({"x": X})
        owner = await pair.consumers[0].borrow(tickets["x"])
        pair.consumers[0].acknowledge(tickets["x"], count=2)
        await until(lambda: pair.exporter.statistics().owners[0].waiting_for == ())
        with pytest.raises(ReleasedTicketError):
            await pair.consumers[1].reconstruct(tickets["x"])
        owner.release()
        assert sorted((await tickets.acknowledgement).released) == [0, 1]


async def test_data_parallel_attention_reaches_one_group_only_and_frees_with_that_group() -> None:
    """4 ranks in 2 groups, streamed and by ticket; a batch for everyone needs all four."""
    async with open_pair(consumers=4) as pair:
        groups = [AttentionGroup(cp, 2) for cp in (0, 1)]
        for number in range(8):
            group = groups[number % 2]
            ack = await pair.exporter.send({"x": X}, key=number, to=group)
            inside = [pair.consumers[rank] for rank in group.ranks(4)]
            for consumer in inside:
                assert not ack.done()
                with await consumer.receive() as batch:
                    assert batch[0].key == number
            assert (await ack).released == tuple(group.ranks(4))
            tickets = await pair.exporter.export({"x": X}, to=group)
            assert check_books(pair.exporter).owners[0].waiting_for == tuple(group.ranks(4))
            for consumer in inside:
                await consumer.reconstruct(tickets["x"])
            assert sorted((await tickets.acknowledgement).released) == list(group.ranks(4))
            check_all_back(pair.exporter)
        assert all(consumer.statistics().unread == 0 for consumer in pair.consumers)
        ack = await pair.exporter.send({"x": X})
        for consumer in pair.consumers:
            assert not ack.done()
            with await consumer.receive():
                pass
        assert len((await ack).released) == 4


async def test_a_group_that_the_pool_was_not_sized_for_is_refused_when_it_is_addressed() -> None:
    async with open_pair(route=Broadcast(3)) as pair:
        for work in (pair.exporter.send, pair.exporter.export):
            with pytest.raises(AttentionGroupError, match=r"\[2, 4\) is outside consumer_count=3"):
                await work({"x": X}, to=AttentionGroup(1, 2))
        check_all_back(pair.exporter)
