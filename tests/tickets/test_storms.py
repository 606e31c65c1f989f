"""Cancel storms: wherever a cancellation falls, no slot, byte, ticket or tensor is lost.

Cancels are placed by counting loop passes, so that over the rounds they fall on every await there
is.  The books are checked after each round.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm._tensors.host import OFFLOAD_BYTES
from asyncvmm.testing import Pair, open_pair
from asyncvmm.tickets import FeatureItem, FeatureRequest, FeatureTransport, restore_features
from tests.api.books import check_all_back, check_books, passes, until

SMALL = torch.arange(64, dtype=torch.uint8)
LARGE = torch.arange(OFFLOAD_BYTES + 64, dtype=torch.int64).to(torch.uint8)  # copied in a thread

SIZES = pytest.mark.parametrize("tensor", [SMALL, LARGE], ids=["small", "large"])


def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def ended(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Wait for tasks; return what those that were not cancelled return, or raise their error."""
    await asyncio.wait(tasks)
    return [task.result() for task in tasks if not task.cancelled()]


def rounds(tensor: torch.Tensor, count: int) -> int:
    return count if tensor is SMALL else count // 8


@pytest.mark.slow
@SIZES
async def test_a_storm_on_export_leaves_only_tickets_that_were_returned(
    tensor: torch.Tensor,
) -> None:
    """Kills: a chunk that is not given back, a wake-up that is lost, an owner without a ticket."""
    chance = random.Random(1)
    async with open_pair(pool_bytes=2 * (OFFLOAD_BYTES + 256), slots=3) as pair:
        for number in range(rounds(tensor, 120)):
            features = [{"a": tensor}, {"a": tensor, "b": SMALL}]
            if tensor is SMALL:
                tasks = [start(pair.exporter.export(features[k % 2], key=k)) for k in range(6)]
            else:
                tasks = [start(pair.exporter.export({"a": tensor}, key=k)) for k in range(4)]
            tasks.append(start(pair.exporter.export_all([{"a": tensor}] * 2)))
            for task in chance.sample(tasks, len(tasks)):
                await passes(chance.randrange(3))
                if chance.random() < 0.6:
                    task.cancel()
            waiting = set(tasks)
            while waiting:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done = {task for task in waiting if task.done()}
                waiting -= done
                found = [task.result() for task in done if not task.cancelled()]
                returned = [t for each in found for t in (each if type(each) is list else [each])]
                stats = check_books(pair.exporter)
                out = {(o.slot, o.generation) for o in stats.owners if o.state == "held"}
                assert out == {(t.owner.slot, t.owner.generation) for t in returned}, number
                for tickets in returned:
                    await pair.consumer.reconstruct(tickets["a"])
                    await tickets.acknowledgement
            await until(lambda: pair.exporter.statistics().slots.free == 3)
            check_all_back(pair.exporter)


@pytest.mark.slow
@SIZES
async def test_a_storm_on_reconstruct_copies_and_releases_once_or_changes_nothing(
    tensor: torch.Tensor,
) -> None:
    """Kills: an answer that nobody takes, a release per caller, a copy that is not found again."""
    chance = random.Random(2)
    clones = 0
    async with open_pair(pool_bytes=2 * (OFFLOAD_BYTES + 512), slots=3) as pair:
        clone = pair.consumer._port.clone

        def counted(*args: Any) -> Any:
            nonlocal clones
            clones += 1
            return clone(*args)

        pair.consumer._leases._port.clone = counted  # type: ignore[method-assign,assignment]  # so
        for number in range(rounds(tensor, 160)):
            tickets = await pair.exporter.export({"a": tensor, "b": SMALL}, key=number)
            before = clones
            tasks = [start(pair.consumer.reconstruct(tickets[n])) for n in ("a", "b", "a")]
            for task in chance.sample(tasks, 3):
                await passes(chance.randrange(4))
                task.cancel()
            await ended(tasks)
            check_books(pair.exporter)
            if number % 3:  # else it joins what goes on
                await until(lambda: not pair.consumer._copying)
            found = await pair.consumer.reconstruct(tickets["a"])
            assert torch.equal(found, tensor)
            assert clones == before + 1, number
            assert (await tickets.acknowledgement).released == (0,)
            check_all_back(pair.exporter)
            assert pair.exporter.statistics().consumers[0].released == number + 1
        assert pair.consumer.statistics().held == 0
        assert not pair.consumer._asked


@pytest.mark.slow
async def test_a_storm_on_borrow_puts_back_what_nobody_has() -> None:
    """Kills: an owner that is held for a cancelled borrower, or given to two."""
    chance = random.Random(3)
    async with open_pair(slots=3) as pair:
        for number in range(150):
            tickets = await pair.exporter.export({"a": SMALL}, key=number)
            tasks = [start(pair.consumer.borrow(tickets.owner)) for _ in range(3)]
            for task in chance.sample(tasks, 3):
                await passes(chance.randrange(3))
                if chance.random() < 0.7:
                    task.cancel()
            await asyncio.wait(tasks)
            owners = []
            for task in tasks:
                if not task.cancelled():
                    error = task.exception()
                    assert error is None or isinstance(error, asyncvmm.BorrowedTicketError)
                    owners += [] if error else [task.result()]
            assert len(owners) <= 1
            check_books(pair.exporter)
            if not owners and number % 2:  # nobody has it, so nobody may keep it
                pair.exporter.cancel(tickets.owner)
                await until(lambda: pair.exporter.statistics().slots.free == 3)
                continue
            owner = owners[0] if owners else await pair.consumer.borrow(tickets["a"])
            assert torch.equal(owner["a"], SMALL)
            owner.release()
            assert (await tickets.acknowledgement).released == (0,)
            check_all_back(pair.exporter)


async def test_a_copy_whose_callers_are_cancelled_is_finished_and_kept_for_its_ticket() -> None:
    """Kills: a copy that is thrown away, after which the ticket is void."""
    async with open_pair(pool_bytes="4MiB") as pair:
        tickets = await pair.exporter.export({"a": LARGE})
        tasks = [start(pair.consumer.reconstruct(tickets["a"])) for _ in range(2)]
        await until(lambda: bool(pair.consumer._copying))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        await tickets.acknowledgement
        del task, tasks  # their tracebacks keep frames, and so the copy
        gc.collect()
        assert torch.equal(await pair.consumer.reconstruct(tickets["a"]), LARGE)


async def test_a_failing_copy_is_told_to_all_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair(pool_bytes="4MiB") as pair:
        tickets = await pair.exporter.export({"a": LARGE})

        def fail(*_: Any) -> Any:
            raise MemoryError("no memory for the copy")

        monkeypatch.setattr(pair.consumer._leases._port, "clone", fail)
        for error in await asyncio.gather(
            *(pair.consumer.reconstruct(tickets["a"]) for _ in range(3)), return_exceptions=True
        ):
            assert isinstance(error, MemoryError)
        monkeypatch.undo()
        assert torch.equal(await pair.consumer.reconstruct(tickets["a"]), LARGE)
        assert (await tickets.acknowledgement).released == (0,)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_exporting_all_or_none_gives_back_what_was_done_and_what_was_not(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: owners that stay exported; loans that are never filled and never given back."""
    async with open_pair(pool_bytes="8MiB") as pair:
        copy, begun, count = pair.exporter._copier.copy, asyncio.Event(), 0

        async def stand_still_at_the_second(*args: Any) -> None:
            nonlocal count
            count += 1
            if count == 2:
                begun.set()
                if how == "failed":
                    raise asyncvmm.BackendError("no copy", call="memcpy", code="no")
                await asyncio.Event().wait()
            await copy(*args)

        monkeypatch.setattr(pair.exporter._copier, "copy", stand_still_at_the_second)
        task = start(pair.exporter.export_all([{"a": LARGE}] * 4))
        await begun.wait()
        if how == "cancelled":
            assert pair.exporter.statistics().slots.held == 1
            assert pair.exporter.statistics().slots.filling == 3
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == (how == "cancelled")
        check_all_back(pair.exporter)
        assert pair.exporter.statistics().cancelled == 1
        if how == "failed":
            with pytest.raises(asyncvmm.BackendError, match="no copy"):
                task.result()


async def test_a_batch_takes_its_room_in_as_many_pieces_as_it_has_owners() -> None:
    """Owners that nobody lets go of lie between the gaps.

    Kills: a batch that waits for one piece, and so for those (field report 27); one that takes
    what room there is for some of it, and fails.
    """
    async with open_pair(pool_bytes=6 * 256, slots=6) as pair:
        exporter = pair.exporter
        out = [await exporter.export({"a": SMALL}) for _ in range(6)]
        batch = start(
            exporter.export_all([{"a": SMALL}, {"a": torch.zeros(512)[:100]}, {"a": SMALL}])
        )
        for number in (0, 2, 4, 3):
            await passes(3)
            assert not batch.done()
            exporter.cancel(out[number].owner)
        await until(batch.done)
        assert len(await batch) == 3
        assert check_books(exporter).used_bytes == 6 * 256
        for tickets in [out[1], out[5], *batch.result()]:
            exporter.cancel(tickets.owner)
        check_all_back(exporter)


async def test_a_sibling_that_comes_between_an_answer_and_its_taker_gets_it() -> None:
    """Kills: an answer that is forgotten before somebody has taken it."""
    async with open_pair() as pair:
        tickets = await pair.exporter.export({"a": SMALL, "b": SMALL})
        answered = asyncio.Event()
        take = pair.consumer._take_answers

        def first_wake_the_sibling() -> None:
            answered.set()
            take()

        pair.consumer._take_answers = first_wake_the_sibling  # type: ignore[method-assign]  # order

        async def sibling() -> torch.Tensor:
            await answered.wait()
            return await pair.consumer.reconstruct(tickets["b"])

        late, early = start(sibling()), start(pair.consumer.reconstruct(tickets["a"]))
        b, a = await asyncio.gather(late, early)
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        assert (await tickets.acknowledgement).released == (0,)


async def _use(pair: Pair, batch: list[FeatureRequest]) -> None:
    await restore_features(pair.consumer, batch)
    for request in batch:
        assert all(torch.equal(item.feature, SMALL) for item in request.items)


@pytest.mark.slow
async def test_a_storm_on_prepare_for_dispatch_prepares_all_of_a_batch_or_nothing() -> None:
    """Kills: fields that are half tickets, owners of a batch that was given up, a lost wake-up."""
    chance = random.Random(4)
    async with open_pair(pool_bytes=5 * 256, slots=4) as pair:
        transport = FeatureTransport(pair.exporter)
        for _ in range(60):
            batches = [
                [
                    FeatureRequest([FeatureItem("image", SMALL) for _ in range(1 + k % 2)], k)
                    for k in range(chance.randrange(1, 4))
                ]
                for _ in range(4)
            ]
            tasks = [start(transport.prepare_for_dispatch(batch)) for batch in batches]
            for task in chance.sample(tasks, len(tasks)):
                await passes(chance.randrange(3))
                if chance.random() < 0.5:
                    task.cancel()
            waiting = dict(zip(tasks, batches, strict=True))
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    batch = waiting.pop(task)
                    fields = [item.feature for request in batch for item in request.items]
                    if task.cancelled():
                        assert all(field is SMALL for field in fields)
                    else:
                        task.result()
                        assert all(isinstance(field, asyncvmm.Ticket) for field in fields)
                        check_books(pair.exporter)
                        await _use(pair, batch)
            await pair.exporter.drain()
            check_all_back(pair.exporter)
        stats = transport.statistics()
        assert stats.rolled_back > 10, stats
        await transport.shutdown()
