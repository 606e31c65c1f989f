"""What a user of SGLang's cuda_vmm transport relies on: the life of a request."""

from __future__ import annotations

import asyncio
import enum
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import ArgumentError, AttentionGroup, ClosedError, Ticket
from asyncvmm._types import Broadcast
from asyncvmm.testing import open_pair
from asyncvmm.tickets import (
    FeatureItem,
    FeatureRequest,
    FeatureTransport,
    abandon_features,
    restore_features,
)
from asyncvmm.tickets.transport import OnFull
from tests.api.books import check_all_back, check_books, passes
from tests.patience import PROMPTLY


def tensor(seed: int, count: int = 50) -> torch.Tensor:
    return torch.arange(seed, seed + count, dtype=torch.float32)


def request_of(*modalities: str, key: int = 0) -> FeatureRequest:
    return FeatureRequest([FeatureItem(m, tensor(n)) for n, m in enumerate(modalities)], key)


def tickets_of(request: FeatureRequest) -> list[Ticket]:
    found = [item.feature for item in request.items]
    assert all(isinstance(ticket, Ticket) for ticket in found)
    return found


async def test_prepare_packs_two_or_more_image_video_and_audio_features_of_a_request() -> None:
    async with open_pair() as pair, FeatureTransport(pair.exporter) as transport:
        request = request_of("image", "VIDEO", "audio")
        other = request_of("image", key=1)
        await transport.prepare_for_dispatch([request, other])
        first, second, third = tickets_of(request)
        assert first.owner is second.owner is third.owner
        assert [ticket.index for ticket in (first, second, third)] == [0, 1, 2]
        (alone,) = tickets_of(other)
        assert not alone.packed, "requests do not share an owner"
        assert check_books(pair.exporter).slots.held == 2
        assert [owner.key for owner in pair.exporter.statistics().owners] == [0, 1]
        await restore_features(pair.consumer, [request, other])
        assert [item.feature[0].item() for item in request.items] == [0, 1, 2]
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_prepare_exports_the_rest_and_precomputed_embeddings_singly() -> None:
    async with open_pair() as pair, FeatureTransport(pair.exporter) as transport:
        request = request_of("image", "image", "time_series")
        request.items[0].precomputed_embeddings = tensor(100)
        request.items[1].precomputed_embeddings = tensor(200)
        await transport.prepare_for_dispatch([request])
        a, b, c = tickets_of(request)
        d, e = (item.precomputed_embeddings for item in request.items[:2])
        assert a.owner == b.owner
        assert len({ticket.owner.slot for ticket in (a, c, d, e)}) == 4
        assert not any(ticket.packed for ticket in (c, d, e))
        await restore_features(pair.consumer, [request])
        assert request.items[1].precomputed_embeddings[0].item() == 200
        await pair.exporter.drain()


async def test_a_request_without_features_waits_for_nobody() -> None:
    """Kills: a request of nothing but text behind those that wait for room."""
    async with open_pair(slots=1) as pair, FeatureTransport(pair.exporter) as transport:
        held = await pair.exporter.export({"x": tensor(1)})
        late = asyncio.ensure_future(transport.prepare_for_dispatch([request_of("image")]))
        await passes(2)
        text = asyncio.ensure_future(transport.prepare_for_dispatch([FeatureRequest()]))
        await passes(2)
        assert text.done()
        assert not late.done()
        late.cancel()
        pair.exporter.cancel(held.owner)


@pytest.mark.parametrize("field", ["feature", "precomputed_embeddings"])
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("on_full", ["wait", "host", "raise"])
async def test_a_field_holding_a_list_or_tuple_of_tensors_is_a_type_error(
    field: str, kind: Any, on_full: OnFull
) -> None:
    async with open_pair() as pair, FeatureTransport(pair.exporter, on_full=on_full) as transport:
        good, bad = request_of("image"), request_of("image")
        setattr(bad.items[0], field, kind([tensor(1), tensor(2)]))
        before = good.items[0].feature
        with pytest.raises(TypeError, match=f"{field}.*{kind.__name__}"):
            await transport.prepare_for_dispatch([good, bad])
        assert good.items[0].feature is before
        check_all_back(pair.exporter)


@pytest.mark.parametrize("on_full", ["wait", "host", "raise"])
@pytest.mark.parametrize("bad", ["no tensor", "meta", "too late"])
async def test_a_failure_half_way_rolls_everything_back_and_restores_the_fields(
    bad: str, on_full: OnFull
) -> None:
    """Kills: cancelling all but the last owner; fields changed before all are exported."""

    class Stubborn(FeatureItem):
        __slots__ = ()

        def __setattr__(self, name: str, value: object) -> None:
            if isinstance(value, Ticket):
                raise RuntimeError("this item may not change")
            super().__setattr__(name, value)

    async with open_pair() as pair, FeatureTransport(pair.exporter, on_full=on_full) as transport:
        requests = [request_of("image", "image"), request_of("video"), request_of("audio")]
        feature: Any = tensor(9)
        if bad == "meta":
            feature = torch.empty(3, device="meta")
        elif bad == "no tensor":
            feature = {"a": 1}
        requests[2].items.append(Stubborn("audio", feature))
        before = [item.feature for request in requests for item in request.items]
        with pytest.raises((RuntimeError, asyncvmm.InvalidTensorError)):
            await transport.prepare_for_dispatch(requests)
        after = [item.feature for request in requests for item in request.items]
        assert all(a is b for a, b in zip(before, after, strict=True))
        check_all_back(pair.exporter)
        assert transport.statistics().rolled_back == 1


async def test_the_async_form_keeps_no_room_while_it_waits() -> None:
    """Two batches, each more than half of the pool: neither holds what the other waits for.

    Kills: exporting one request after the other, which ends with each call holding a part.
    """
    async with open_pair(pool_bytes=4 * 256) as pair, FeatureTransport(pair.exporter) as transport:
        held = await pair.exporter.export({"x": tensor(0)})
        batches = [[request_of("image", key=k) for k in range(3)] for _ in range(2)]
        tasks = [asyncio.ensure_future(transport.prepare_for_dispatch(b)) for b in batches]
        await passes(3)
        for task, batch in zip(tasks, batches, strict=True):
            await pair.consumer.reconstruct(held["x"])
            async with asyncio.timeout(PROMPTLY):
                await task
            await restore_features(pair.consumer, batch)
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_a_cancelled_caller_has_its_publication_cancelled() -> None:
    async with open_pair(pool_bytes=2 * 256) as pair, FeatureTransport(pair.exporter) as transport:
        held = await pair.exporter.export({"x": tensor(0)})
        requests = [request_of("image"), request_of("image")]
        before = [request.items[0].feature for request in requests]
        task = asyncio.ensure_future(transport.prepare_for_dispatch(requests))
        await passes(3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert [request.items[0].feature for request in requests] == before
        assert pair.exporter.cancel(held.owner)
        check_all_back(pair.exporter)


async def test_a_batch_that_can_never_fit_is_refused_at_once() -> None:
    async with open_pair(pool_bytes=2 * 256) as pair, FeatureTransport(pair.exporter) as transport:
        requests = [request_of("image") for _ in range(3)]
        with pytest.raises(ArgumentError, match="3 owners of 768 bytes can never"):
            await transport.prepare_for_dispatch(requests)
        assert all(isinstance(r.items[0].feature, torch.Tensor) for r in requests)
        check_all_back(pair.exporter)


async def test_cancel_for_dispatch_gives_back_every_slice_and_reports_how_many_could_not_be() -> (
    None
):
    async with open_pair() as pair, FeatureTransport(pair.exporter) as transport:
        requests = [request_of("image", "image"), request_of("video"), request_of("audio")]
        await transport.prepare_for_dispatch(requests)
        read = tickets_of(requests[1])[0]
        await pair.consumer.reconstruct(read)
        assert transport.cancel_for_dispatch(requests) == 1
        await pair.exporter.drain()
        check_all_back(pair.exporter)
        assert transport.statistics().cancelled == 2
        assert transport.cancel_for_dispatch([requests[0]]) == 1, "again is a no-op"


async def test_shutdown_waits_for_publishers_at_work_and_takes_no_more() -> None:
    async with open_pair(pool_bytes=256) as pair:
        transport = FeatureTransport(pair.exporter)
        held = await pair.exporter.export({"x": tensor(0)})
        request = request_of("image")
        work = asyncio.ensure_future(transport.prepare_for_dispatch([request]))
        await passes(2)
        closing = asyncio.ensure_future(transport.shutdown())
        await passes(3)
        assert not closing.done()
        with pytest.raises(ClosedError):
            await transport.prepare_for_dispatch([request_of("image")])
        pair.exporter.cancel(held.owner)
        await work
        await closing
        await transport.shutdown()
        await restore_features(pair.consumer, [request])
        await pair.exporter.drain()


async def test_an_abandoned_request_is_released_unread_once() -> None:
    async with open_pair(consumers=2) as pair, FeatureTransport(pair.exporter) as transport:
        request = request_of("image", "image")
        await transport.prepare_for_dispatch([request])
        received = pickle.loads(pickle.dumps(request))
        abandon_features(pair.consumers[0], [received])
        abandon_features(pair.consumers[0], [received])
        await restore_features(pair.consumers[1], [received])
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_requests_are_addressed_to_one_group_and_acknowledged_for_it() -> None:
    async with (
        open_pair(consumers=4, route=Broadcast(4)) as pair,
        FeatureTransport(pair.exporter) as transport,
    ):
        group = AttentionGroup(1, 2, 0)
        request = request_of("image", "image")
        await transport.prepare_for_dispatch([request], to=group)
        assert check_books(pair.exporter).owners[0].waiting_for == (2, 3)
        await restore_features(pair.consumers[2], [request], count=2, group=group)
        await pair.exporter.drain()
        check_all_back(pair.exporter)


class Modality(enum.Enum):
    IMAGE = enum.auto()


@dataclass
class OtherItem:
    modality: Modality
    feature: Any
    hashes: tuple[int, ...] = (1, 2)


@dataclass
class OtherRequest:
    items: tuple[OtherItem, ...]


async def test_any_object_with_these_fields_is_a_request() -> None:
    async with open_pair() as pair, FeatureTransport(pair.exporter) as transport:
        item: Any = OtherItem(Modality.IMAGE, tensor(1))
        request = OtherRequest((item, OtherItem(Modality.IMAGE, None), item))
        await transport.prepare_for_dispatch([request])
        prepared = item.feature
        assert isinstance(prepared, Ticket)
        assert not prepared.packed, "one item twice is one feature"
        await transport.prepare_for_dispatch([request])
        unchanged = item.feature is prepared
        assert unchanged, "what is prepared stays"
        await restore_features(pair.consumer, [request])
        assert torch.equal(item.feature, tensor(1))
        await pair.exporter.drain()
        with pytest.raises(ArgumentError, match="items"):
            await transport.prepare_for_dispatch([item])
        alone: Any = request
        with pytest.raises(ArgumentError, match=r"OtherRequest; give one request as \[request\]"):
            await transport.prepare_for_dispatch(alone)
        with pytest.raises(ArgumentError, match="give one request"):
            transport.cancel_for_dispatch(alone)
        with pytest.raises(ArgumentError, match="give one request"):
            await restore_features(pair.consumer, alone)
        with pytest.raises(ArgumentError, match="give one request"):
            abandon_features(pair.consumer, alone)
