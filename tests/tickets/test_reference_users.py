"""What users of SGLang's transports ask for, and get here.

Two of their wishes are tried elsewhere: a dead consumer's slices come back (test_processes.py),
and a rank maps the pool without a context on the producer's GPU (tests/gpu/test_cuda_region.py).
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm._tensors.host import OFFLOAD_BYTES
from asyncvmm.testing import open_pair
from asyncvmm.tickets import FeatureItem, FeatureRequest, FeatureTransport, restore_features
from tests.api.books import check_all_back, check_books, passes, until

X = torch.arange(1000, dtype=torch.float32)
LARGE = torch.arange(OFFLOAD_BYTES + 64, dtype=torch.int64).to(torch.uint8)


async def test_a_pool_needs_no_guess_at_its_size_and_gives_memory_back_when_idle() -> None:
    async with open_pair(pool_bytes=8192, max_pool_bytes="1MiB", shrink_after=0.01) as pair:
        exported = [await pair.exporter.export({"x": X}, key=k) for k in range(10)]
        assert pair.exporter.statistics().grown > 0
        for tickets in exported:
            assert torch.equal(await pair.consumer.reconstruct(tickets["x"]), X)
        await pair.exporter.drain()
        await until(lambda: pair.exporter.statistics().segments == 1)
        check_all_back(pair.exporter)


async def test_no_blocking_work_is_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a large copy, in or out or to the host, on the loop's thread."""
    async with open_pair(pool_bytes=2 * (OFFLOAD_BYTES + 512)) as pair:
        threads: set[int] = set()

        def noting(function: Any) -> Any:
            def noted(*args: Any) -> Any:
                threads.add(threading.get_ident())
                return function(*args)

            return noted

        monkeypatch.setattr(pair.exporter._port, "copy_in", noting(pair.exporter._port.copy_in))
        monkeypatch.setattr(pair.exporter._port, "to_host", noting(pair.exporter._port.to_host))
        leases = pair.consumer._leases
        monkeypatch.setattr(leases._port, "clone", noting(leases._port.clone))
        transport = FeatureTransport(pair.exporter, on_full="host")
        requests = [FeatureRequest([FeatureItem("image", LARGE)]) for _ in range(3)]
        await transport.prepare_for_dispatch(requests)
        await restore_features(pair.consumer, requests)
        assert all(torch.equal(request.items[0].feature, LARGE) for request in requests)
        assert threads
        assert threading.get_ident() not in threads
        await pair.exporter.drain()


async def test_one_bad_or_refused_request_leaks_no_slice() -> None:
    async with open_pair(slots=2) as pair:
        bad: list[dict[str, Any]] = [
            {},
            {"x": [X]},
            {"x": X, "y": torch.empty(3, device="meta")},
            {"x": torch.zeros(1 << 21, dtype=torch.uint8)},
            {"": X},
        ]
        for features in bad:
            with pytest.raises(asyncvmm.ArgumentError):
                await pair.exporter.export(features)
            check_all_back(pair.exporter)
        for _ in range(3):
            tickets = await pair.exporter.export({"x": X})
            owner = await pair.consumer.borrow(tickets["x"])
            del owner  # dropped unread: refused
            with pytest.raises(asyncvmm.DeliveryError):
                await tickets.acknowledgement
            check_all_back(pair.exporter)


async def test_one_failing_rank_does_not_take_the_others_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair(consumers=3) as pair:
        failing, *others = pair.consumers

        def fail(*_: Any) -> Any:
            raise MemoryError

        monkeypatch.setattr(failing._leases, "local", fail)
        for _ in range(3):
            tickets = await pair.exporter.export({"x": X}, require="any")
            with pytest.raises(MemoryError):
                await failing.reconstruct(tickets["x"])
            for consumer in others:
                assert torch.equal(await consumer.reconstruct(tickets["x"]), X)
            assert check_books(pair.exporter).owners[-1].waiting_for == (0,)
        await failing.aclose()
        outcome = await tickets.acknowledgement
        assert (outcome.released, [member for member, _ in outcome.refused]) == ((1, 2), [0])
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_numbers_say_who_is_late_and_why_the_pool_is_full() -> None:
    async with open_pair(consumers=2, slots=1) as pair:
        tickets = await pair.exporter.export({"x": X}, key="first")
        await pair.consumers[0].reconstruct(tickets["x"])
        waiting = asyncio.ensure_future(pair.exporter.export({"x": X}))
        await until(lambda: not pair.exporter.statistics().owners[0].held_by)
        await passes()
        explanation = pair.exporter.explain()
        assert (explanation.waiting, explanation.lacks) == (1, "slot")
        (obstacle,) = explanation.obstacles
        assert (obstacle.kind, obstacle.member, obstacle.oldest) == ("unredeemed", 1, "first")
        await pair.consumers[1].reconstruct(tickets["x"])
        pair.exporter.cancel((await waiting).owner)


async def test_each_tokenizer_worker_has_a_pool_of_its_own() -> None:
    async with open_pair() as one, open_pair() as two:
        for pair, other in ((one, two), (two, one)):
            tickets = await pair.exporter.export({"x": X})
            with pytest.raises(asyncvmm.ForeignTicketError):
                await other.consumer.reconstruct(tickets["x"])
            assert torch.equal(await pair.consumer.reconstruct(tickets["x"]), X)
            await tickets.acknowledgement


async def test_a_rank_that_is_stopped_keeps_only_its_own_share() -> None:
    """Nobody has to be quick: what one rank has not redeemed delays no owner of another group."""
    async with open_pair(consumers=2, slots=3) as pair:
        slow = await pair.exporter.export({"x": X}, to=1)
        for _ in range(5):
            tickets = await pair.exporter.export({"x": X}, to=0)
            await pair.consumers[0].reconstruct(tickets["x"])
            await tickets.acknowledgement
        assert pair.exporter.cancel(slow.owner)
