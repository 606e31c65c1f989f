"""What a user of SGLang's cuda_vmm transport relies on: features packed under one owner."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

import asyncvmm
from asyncvmm import BackendError, PackedReleaseError, ReleasedTicketError, StaleTicketError
from asyncvmm.testing import FakeDevice, FakePort, Pair, open_pair
from tests.api.books import check_all_back, check_books, until

FEATURES = {
    "image_0": torch.arange(300, dtype=torch.float32).view(3, 100),
    "image_1": torch.arange(7, dtype=torch.int64),
    "video_0": torch.arange(130, dtype=torch.uint8),
}


async def test_packed_features_lie_in_one_chunk_each_with_its_own_shape_and_dtype() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export(FEATURES)
        assert check_books(pair.exporter).slots.held == 1
        assert {ticket.owner for ticket in tickets.values()} == {tickets.owner}
        for name, tensor in FEATURES.items():
            ticket = tickets[name]
            assert ticket.packed
            assert (ticket.shape, f"torch.{ticket.dtype}") == (tensor.shape, str(tensor.dtype))
            found = await pair.consumer.reconstruct(ticket)
            assert torch.equal(found, tensor)
            assert found.dtype == tensor.dtype
        assert (await tickets.acknowledgement).released == (0,)


async def test_packed_features_without_a_contiguous_chunk_are_not_published() -> None:
    """The caller is told so, and nothing is taken, although the bytes are free in sum."""
    async with open_pair(pool_bytes=4 * 256) as pair:
        small = torch.zeros(256, dtype=torch.uint8)
        held = [await pair.exporter.export({"x": small}) for _ in range(4)]
        pair.exporter.cancel(held[0].owner)
        pair.exporter.cancel(held[2].owner)
        before = check_books(pair.exporter)
        assert before.free_bytes == 512
        with pytest.raises(asyncvmm.WouldBlock):
            await pair.exporter.export_nowait({"a": small, "b": small})
        after = check_books(pair.exporter)
        assert (after.published, after.free_bytes) == (before.published, before.free_bytes)
        for index in (1, 3):
            pair.exporter.cancel(held[index].owner)


async def copies_of(pair: Pair) -> list[int]:
    """Return the size of every copy that the consumer makes, as it makes them."""
    made: list[int] = []
    clone = pair.consumer._port.clone

    def counted(holder: object, nbytes: int, features: object) -> object:
        made.append(nbytes)
        return clone(holder, nbytes, features)  # type: ignore[arg-type]  # passed on

    pair.consumer._leases._port.clone = counted  # type: ignore[method-assign,assignment]  # counted
    return made


async def test_any_one_member_copies_and_acknowledges_the_whole_owner_once() -> None:
    """Kills: a copy per member, a release per member."""
    async with open_pair(consumers=2) as pair:
        made = await copies_of(pair)
        tickets = await pair.exporter.export(FEATURES)
        for consumer in pair.consumers:
            for name in reversed(FEATURES):
                await consumer.reconstruct(tickets[name])
        assert made == [tickets.owner.nbytes]
        assert (await tickets.acknowledgement).released == (0, 1)
        assert [c.released for c in pair.exporter.statistics().consumers] == [1, 1]
        assert [c.stale for c in pair.exporter.statistics().consumers] == [0, 0]


async def test_siblings_are_views_of_one_local_buffer() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export(FEATURES)
        found = [await pair.consumer.reconstruct(ticket) for ticket in tickets.values()]
        assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
        await tickets.acknowledgement


@pytest.mark.parametrize("together", [True, False])
async def test_siblings_are_views_of_one_buffer_also_after_pickling(together: bool) -> None:
    """Better: also when they were pickled apart."""
    async with open_pair() as pair:
        made = await copies_of(pair)
        tickets = await pair.exporter.export(FEATURES)
        if together:
            group = pickle.loads(pickle.dumps(list(tickets.values())))
            assert len({id(ticket.owner) for ticket in group}) == 1
        else:
            group = [pickle.loads(pickle.dumps(ticket)) for ticket in tickets.values()]
            assert len({id(ticket.owner) for ticket in group}) == 3
        found = [await pair.consumer.reconstruct(ticket) for ticket in group]
        assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
        assert len(made) == 1
        await tickets.acknowledgement


@pytest.mark.slow
async def test_a_sibling_is_found_while_only_a_slice_of_another_is_left() -> None:
    """Kills: remembering tensors, or tickets, and not the buffer."""
    async with open_pair() as pair:
        tickets = await pair.exporter.export(FEATURES)
        data = pickle.dumps(tickets)
        left = (await pair.consumer.reconstruct(pickle.loads(data)["image_0"]))[1:, 3:5]
        gc.collect()
        assert not pair.consumer._kept, "the ticket that it was made for is gone"
        found = await pair.consumer.reconstruct(pickle.loads(data)["video_0"])
        assert torch.equal(found, FEATURES["video_0"])
        assert found.untyped_storage().data_ptr() == left.untyped_storage().data_ptr()
        del found, left
        gc.collect()
        assert not pair.consumer._copies
        with pytest.raises((ReleasedTicketError, StaleTicketError)):
            await pair.consumer.reconstruct(pickle.loads(data)["video_0"])


@pytest.mark.slow
async def test_a_ticket_keeps_the_copy_that_was_made_for_it() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export({"x": FEATURES["image_0"]})
        place = (await pair.consumer.reconstruct(tickets["x"])).data_ptr()
        gc.collect()
        assert (await pair.consumer.reconstruct(tickets["x"])).data_ptr() == place
        del tickets
        gc.collect()
        assert not pair.consumer._copies
        assert not pair.consumer._kept


async def test_acknowledging_a_single_member_is_refused_always() -> None:
    text = "^Packed CUDA VMM features must be reconstructed before release$"
    async with open_pair() as pair:
        tickets = await pair.exporter.export(FEATURES)
        ticket = tickets["image_1"]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text):
                ticket.acknowledge()
            with pytest.raises(PackedReleaseError, match=text):
                ticket.acknowledge(pair.consumer)
            with pytest.raises(RuntimeError, match=text):
                pair.consumer.acknowledge(ticket, count=1)
            # ... and no less once it is reconstructed.
            await pair.consumer.reconstruct(ticket)
        assert (await tickets.acknowledgement).released == (0,)


async def test_release_goes_through_the_owner() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export(FEATURES)
        pair.consumer.acknowledge(tickets["image_1"].owner)
        assert (await tickets.acknowledgement).released == (0,)
        check_all_back(pair.exporter)


async def test_an_abandoned_request_releases_the_owner_once_and_again_is_a_no_op() -> None:
    """Kills: the second release of rank 0 counted as that of rank 1."""
    async with open_pair(consumers=2) as pair:
        tickets = await pair.exporter.export(FEATURES)
        for _ in range(3):
            pair.consumer.acknowledge(tickets.owner)
        await until(lambda: pair.exporter.statistics().consumers[0].stale == 2)
        assert pair.exporter.statistics().owners[0].waiting_for == (1,)
        assert check_books(pair.exporter).slots.held == 1
        pair.consumers[1].acknowledge(tickets.owner)
        assert (await tickets.acknowledgement).released == (0, 1)
        check_all_back(pair.exporter)


async def test_a_producer_cancels_what_was_never_dispatched_through_any_member_once() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export(FEATURES)
        assert pair.exporter.cancel(tickets["video_0"])
        check_all_back(pair.exporter)  # the bytes are free at once
        for ticket in tickets.values():
            assert not pair.exporter.cancel(ticket)
        stats = pair.exporter.statistics()
        assert (stats.exported, stats.cancelled) == (1, 1)
        outcome = tickets.acknowledgement.outcome
        assert outcome is not None
        assert outcome.refused == ((0, "cancelled by the exporter"),)
        with pytest.raises(StaleTicketError):
            await pair.consumer.reconstruct(tickets["image_0"])


async def test_a_producer_that_cancels_what_somebody_reads_takes_it_from_the_others() -> None:
    """Kills: a cancel that frees what is held."""
    async with open_pair(consumers=2) as pair:
        tickets = await pair.exporter.export(FEATURES, require="any")
        owner = await pair.consumer.borrow(tickets["image_0"])
        view = owner["image_0"]
        assert not pair.exporter.cancel(tickets.owner)
        assert check_books(pair.exporter).slots.held == 1
        with pytest.raises(StaleTicketError):
            await pair.consumers[1].reconstruct(tickets["image_0"])
        assert torch.equal(view, FEATURES["image_0"])
        owner.release()
        del view
        outcome = await tickets.acknowledgement
        assert (outcome.released, len(outcome.refused)) == ((0,), 1)
        check_all_back(pair.exporter)


async def test_a_failed_copy_rolls_the_reservation_back_and_the_error_passes() -> None:
    device = FakeDevice()
    port = FakePort(device)
    async with open_pair(port=port) as pair:

        def fail(address: int, plan: object, stream: int) -> None:
            raise BackendError("no copy", call="cuMemcpyAsync", code="no")

        pair.exporter._copy_in = fail
        with pytest.raises(BackendError, match="no copy"):
            await pair.exporter.export(FEATURES)
        check_all_back(pair.exporter)
        assert pair.exporter.statistics().published == 0


async def test_a_chunk_that_the_device_may_still_use_is_kept_and_not_the_pool_failed() -> None:
    """Better: the reference fails its pool; here that slot is quarantined, and shown.

    Kills: freeing a slot whose fence cannot be asked.
    """
    device = FakeDevice(hold_ready=True)
    with pytest.warns(asyncvmm.OwnersOutstandingWarning):
        await _lose_a_fence(device)


async def _lose_a_fence(device: FakeDevice) -> None:
    async with open_pair(port=FakePort(device), close_timeout=0.0) as pair:
        tickets = await pair.exporter.export(FEATURES)
        (fence,) = device.pending("ready")
        fence.fail(BackendError("unknown", call="cuEventQuery", code="unknown"))
        pair.exporter.cancel(tickets.owner)
        await until(lambda: pair.exporter.statistics().slots.quarantined == 1)
        assert check_books(pair.exporter).slots.free == 15
        device.hold_ready = False
        others = await pair.exporter.export(FEATURES)
        assert torch.equal(await pair.consumer.reconstruct(others["image_1"]), FEATURES["image_1"])
        await others.acknowledgement
