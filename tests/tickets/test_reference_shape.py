"""What a user of SGLang's cuda_vmm transport relies on: the pool, publishing, reconstructing.

One test, or more, for each sentence of the published behaviour, with its topic in the name.  Where
this library does better, the test says so.  Packed features, acknowledging and the life of
requests are in the files beside this one.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import weakref

import pytest
import torch

import asyncvmm
from asyncvmm import Broadcast, OwnerTooLargeError, ReleasedTicketError, WouldBlock
from asyncvmm._types import ALIGNMENT
from asyncvmm.testing import FakeDevice, FakePort, open_pair
from asyncvmm.tickets import FeatureItem, FeatureRequest, FeatureTransport, restore_features
from tests.api.books import check_all_back, check_books, until

X = torch.arange(1000, dtype=torch.float32)


async def test_the_pool_is_bounded_and_says_what_never_fits() -> None:
    async with open_pair(pool_bytes=8192) as pair:
        assert pair.exporter.statistics().pool_bytes == 8192
        with pytest.raises(OwnerTooLargeError) as caught:
            await pair.exporter.export({"x": torch.zeros(9000, dtype=torch.uint8)})
        assert (caught.value.needed, caught.value.limit) == (9216, 8192)


async def test_a_chunk_is_a_multiple_of_256_bytes() -> None:
    async with open_pair() as pair:
        for nbytes in (1, 255, 256, 257):
            tickets = await pair.exporter.export({"x": torch.zeros(nbytes, dtype=torch.uint8)})
            assert tickets.owner.nbytes % ALIGNMENT == 0
            assert 0 <= tickets.owner.nbytes - nbytes < ALIGNMENT
            pair.exporter.cancel(tickets["x"])


async def test_chunks_are_best_fit_and_free_neighbours_are_merged() -> None:
    async with open_pair(pool_bytes=10 * 256) as pair:
        sizes = (3, 1, 2, 1, 3)
        held = [
            await pair.exporter.export({"x": torch.zeros(n * 256, dtype=torch.uint8)})
            for n in sizes
        ]
        for index in (0, 2):  # gaps of 3 and of 2
            pair.exporter.cancel(held[index].owner)
        assert pair.exporter.statistics().gaps == 2
        two = await pair.exporter.export({"x": torch.zeros(512, dtype=torch.uint8)})
        assert pair.exporter.statistics().largest_gap == 3 * 256, "the smallest gap that fits"
        for tickets in (two, held[1], held[3], held[4]):
            pair.exporter.cancel(tickets.owner)
        assert check_all_back(pair.exporter).gaps == 1


async def test_publishing_waits_for_no_device_work() -> None:
    """Better: the reference synchronises the host before it hands out a proxy.

    Kills: asking the ready fence, or waiting for it, before the tickets are returned.
    """
    device = FakeDevice(hold_ready=True)
    async with open_pair(port=FakePort(device)) as pair:
        tickets = await pair.exporter.export({"x": X})
        (fence,) = device.pending("ready")
        assert not fence.asked, "nobody looked at the copy, let alone waited for it"
        tensor = await pair.consumer.reconstruct(tickets["x"])
        assert torch.equal(tensor, X)
        assert device.waits == [(tickets.owner.slot, device.stream)], "the stream waits instead"
        device.finish()
        await tickets.acknowledgement


async def test_a_proxy_is_a_small_picklable_object() -> None:
    async with open_pair() as pair:
        ticket = (await pair.exporter.export({"x": X}, key="r"))["x"]
        assert len(pickle.dumps(ticket)) < 400
        assert pickle.loads(pickle.dumps(ticket)) == ticket
        assert (ticket.shape, ticket.dtype, ticket.feature) == ((1000,), "float32", "x")
        pair.exporter.cancel(ticket)


async def test_a_consumer_maps_the_pool_once() -> None:
    async with open_pair() as pair:
        mapped = pair.consumer._core.segment_count
        for _ in range(5):
            tickets = await pair.exporter.export({"x": X})
            await pair.consumer.reconstruct(tickets["x"])
        assert pair.consumer._core.segment_count == mapped == 1


async def test_reconstructing_copies_into_memory_of_the_consumers_own() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export({"x": X})
        tensor = await pair.consumer.reconstruct(tickets["x"])
        await tickets.acknowledgement
        check_all_back(pair.exporter)
        low = pair.consumer._region.address
        assert not low <= tensor.data_ptr() < low + (1 << 20)
        tensor.zero_()  # it may be written: nobody else has it


async def test_reconstructing_acknowledges_on_the_stream_that_copied() -> None:
    """Kills: a release event on another stream than the copy's."""
    device = FakeDevice(hold_release=True)
    async with open_pair(port=FakePort(device)) as pair:
        tickets = await pair.exporter.export({"x": X})
        await pair.consumer.reconstruct(tickets["x"], stream=11)
        assert device.waits == [(tickets.owner.slot, 11)]
        (fence,) = device.pending("release")
        assert fence.streams == (11,)
        assert check_books(pair.exporter).slots.free == 15
        device.finish()
        await tickets.acknowledgement
        check_all_back(pair.exporter)


async def test_reconstructing_again_returns_the_same_tensor() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export({"x": X})
        tensor = await pair.consumer.reconstruct(tickets["x"])
        assert await pair.consumer.reconstruct(tickets["x"]) is tensor
        copy = pickle.loads(pickle.dumps(tickets["x"]))
        assert await pair.consumer.reconstruct(copy) is tensor


async def test_reconstructing_after_a_release_without_a_tensor_is_an_error() -> None:
    async with open_pair(consumers=2) as pair:
        tickets = await pair.exporter.export({"x": X})
        tickets["x"].acknowledge(pair.consumer)
        with pytest.raises(ReleasedTicketError):
            await pair.consumer.reconstruct(tickets["x"])
        assert isinstance(ReleasedTicketError("x"), asyncvmm.ReleasedError)
        await pair.consumers[1].reconstruct(tickets["x"])
        await tickets.acknowledgement


async def test_recycling_is_at_once_when_the_last_word_is_set() -> None:
    """Better: the reference looks at its control words every 50 ms."""
    async with open_pair(consumers=2) as pair:
        tickets = await pair.exporter.export({"x": X})
        await pair.consumers[0].reconstruct(tickets["x"])
        assert check_books(pair.exporter).slots.held == 1
        await pair.consumers[1].reconstruct(tickets["x"])
        await tickets.acknowledgement
        check_all_back(pair.exporter)


async def test_a_full_pool_waits_and_that_is_the_default() -> None:
    """Better: the reference falls back to a host copy, and so hides that it is behind."""
    async with open_pair(pool_bytes=4096) as pair:
        first = await pair.exporter.export({"x": X})
        second = asyncio.ensure_future(pair.exporter.export({"x": X}))
        await asyncio.sleep(0)
        assert pair.exporter.statistics().waiting == 1
        await pair.consumer.reconstruct(first["x"])
        tickets = await second
        assert torch.equal(await pair.consumer.reconstruct(tickets["x"]), X)
        await tickets.acknowledgement


async def test_a_full_pool_falls_back_to_an_inline_host_copy_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_pair(pool_bytes=4096) as pair:
        transport = FeatureTransport(pair.exporter, on_full="host")
        requests = [FeatureRequest([FeatureItem("image", X.clone())]) for _ in range(3)]
        with caplog.at_level(logging.WARNING, "asyncvmm.tickets"):
            await transport.prepare_for_dispatch(requests)
        first, *rest = (request.items[0].feature for request in requests)
        assert isinstance(first, asyncvmm.Ticket)
        assert all(isinstance(t, torch.Tensor) and torch.equal(t, X) for t in rest)
        assert len(caplog.records) == 1
        assert pair.exporter.statistics().fallbacks == transport.statistics().fallbacks == 2
        assert transport.cancel_for_dispatch(requests) == 0


async def test_what_falls_back_arrives_as_what_does_not(caplog: pytest.LogCaptureFixture) -> None:
    """0.5, 1, 1.01 and 100 times a full pool: same dtype, layout and values (field report 30).

    Kills: a fallback that shows how the sender's tensor lay, one that keeps what it copied, one
    warning for two causes, and one for each request.
    """
    async with open_pair(pool_bytes=4096) as pair:
        transport = FeatureTransport(pair.exporter, on_full="host")
        held = await pair.exporter.export({"x": X})
        with caplog.at_level(logging.WARNING, "asyncvmm.tickets"):
            for share in (0.5, 1.0, 1.01, 100.0) * 5:
                source = torch.ones(2, int(1024 * share), dtype=torch.bfloat16).cumsum(1).t()
                request = FeatureRequest([FeatureItem("image", source.requires_grad_())])
                await transport.prepare_for_dispatch([request])
                copy = weakref.ref(request.items[0].feature)
                request = pickle.loads(pickle.dumps(request))
                await until(lambda copy=copy: copy() is None)  # type: ignore[misc]  # a default
                await restore_features(pair.consumer, [request])
                found = request.items[0].feature
                assert torch.equal(found, source)
                assert (found.dtype, found.requires_grad) == (torch.bfloat16, False)
                assert not source.is_contiguous()
                assert found.is_contiguous()
        assert len(caplog.records) == 2, "one for a full pool, one for what never fits"
        assert transport.statistics().fallbacks == pair.exporter.statistics().fallbacks == 20
        assert pair.exporter.cancel(held.owner)
        check_all_back(pair.exporter)


async def test_a_full_pool_may_raise_instead() -> None:
    async with open_pair(pool_bytes=4096) as pair:
        transport = FeatureTransport(pair.exporter, on_full="raise")
        requests = [FeatureRequest([FeatureItem("image", X)]) for _ in range(2)]
        with pytest.raises(WouldBlock):
            await transport.prepare_for_dispatch(requests)
        assert all(request.items[0].feature is X for request in requests)
        check_all_back(pair.exporter)


async def test_a_closed_pool_raises() -> None:
    async with open_pair() as pair:
        exporter = pair.exporter
    with pytest.raises(asyncvmm.ClosedError):
        await exporter.export({"x": X})


async def test_a_failed_pool_raises_and_names_the_call() -> None:
    """Better: one refused event costs that one call, and the pool goes on."""
    device = FakeDevice()
    async with open_pair(port=FakePort(device)) as pair:
        record = pair.exporter._region.record_ready

        def refuse(slot: int, stream: int) -> bytes:
            raise asyncvmm.BackendError("no", call="cuEventRecord", code="no")

        pair.exporter._region.record_ready = refuse  # type: ignore[method-assign]  # it fails
        with pytest.raises(asyncvmm.BackendError) as caught:
            await pair.exporter.export({"x": X})
        assert caught.value.call == "cuEventRecord"
        pair.exporter._region.record_ready = record  # type: ignore[method-assign]  # and works
        tickets = await pair.exporter.export({"x": X})
        assert torch.equal(await pair.consumer.reconstruct(tickets["x"]), X)
        await tickets.acknowledgement


async def test_consumer_count_words_stand_for_the_ranks_that_receive() -> None:
    async with open_pair(consumers=3, route=Broadcast(3)) as pair:
        tickets = await pair.exporter.export({"x": X})
        assert pair.exporter.statistics().owners[0].waiting_for == (0, 1, 2)
        for rank, consumer in enumerate(pair.consumers):
            assert not tickets.acknowledgement.done(), f"before rank {rank}"
            await consumer.reconstruct(tickets["x"])
        assert (await tickets.acknowledgement).released == (0, 1, 2)
