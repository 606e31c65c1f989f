"""Tickets between processes: by any channel, once per process, and when somebody dies."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
import zmq.asyncio

import asyncvmm
from asyncvmm import AttentionGroup, Broadcast, ForeignTicketError, LostTicketError, Ticket
from asyncvmm.testing import Process
from tests.api.books import check_all_back, check_books
from tests.process import steps
from tests.process.harness import Peers, until
from tests.tickets import rank

ABSTRACT = f"@asyncvmm-tickets-{os.getpid()}"
"""For exporters that are killed, and leave no name in a folder behind."""

FEATURES = {
    "image_0": torch.arange(3000, dtype=torch.float32).view(30, 100),
    "image_1": torch.arange(7, dtype=torch.int64),
}


@asynccontextmanager
async def ranks(
    peers: Peers, count: int, **options: Any
) -> AsyncIterator[tuple[asyncvmm.Exporter, list[Process]]]:
    """Open an exporter here, and attach so many ranks in processes of their own."""
    processes = [peers.start() for _ in range(count)]
    async with asyncvmm.open_exporter(
        "t", device="cpu", pool_bytes="1MiB", route=Broadcast(count), close_timeout=0, **options
    ) as exporter:
        for number, process in enumerate(processes):
            await process.call(steps.connect, "t", number)
        await exporter.wait_attached(count)
        yield exporter, processes


def apart(tickets: Any) -> dict[str, bytes]:
    """Pickle each ticket by itself."""
    return {name: pickle.dumps(ticket) for name, ticket in tickets.items()}


ANSWER = {"sums": rank.sums(FEATURES), "buffers": 1}


async def test_siblings_pickled_apart_are_copied_once_per_process(peers: Peers) -> None:
    async with ranks(peers, 2) as (exporter, processes):
        tickets = await exporter.export(FEATURES)
        for process in processes:
            assert await process.call(rank.reconstruct, apart(tickets)) == ANSWER
        assert (await tickets.acknowledgement).released == (0, 1)
        assert [c.released for c in exporter.statistics().consumers] == [1, 1]
        check_all_back(exporter)


async def test_a_ticket_crosses_a_file(peers: Peers, folder: Path) -> None:
    async with ranks(peers, 1) as (exporter, (process,)):
        tickets = await exporter.export(FEATURES)
        path = folder / "tickets"
        await asyncio.to_thread(path.write_bytes, pickle.dumps(tickets))
        assert await process.call(rank.reconstruct_from_file, str(path)) == ANSWER
        await tickets.acknowledgement


async def test_a_ticket_crosses_zeromq(peers: Peers, folder: Path) -> None:
    async with ranks(peers, 1) as (exporter, (process,)):
        tickets = await exporter.export(FEATURES)
        address = f"ipc://{folder}/zmq"
        with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as push:
            push.bind(address)
            answer = process.begin(rank.reconstruct_from_zmq, address)
            await push.send_pyobj(tickets)
            assert await answer == ANSWER
        await tickets.acknowledgement


@pytest.mark.slow
def test_a_ticket_crosses_a_multiprocessing_queue(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    tickets, answers = context.Queue(), context.Queue()

    async def main() -> None:
        async with asyncvmm.open_exporter("t", device="cpu", pool_bytes="1MiB") as exporter:
            process = context.Process(
                target=rank.reconstruct_from_queue, args=("t", tickets, answers)
            )
            process.start()
            try:
                for _ in range(2):
                    exported = await exporter.export(FEATURES)
                    tickets.put(exported)
                    assert await asyncio.to_thread(answers.get, True, 60) == ANSWER
                    await exported.acknowledgement
            finally:
                tickets.put(None)
                await asyncio.to_thread(process.join)
            assert process.exitcode == 0
            process.close()

    asyncio.run(main())
    for queue in (tickets, answers):
        queue.close()
        queue.join_thread()


@pytest.mark.slow
async def test_data_parallel_attention_in_four_processes(peers: Peers) -> None:
    """Two groups of two: a group's owner needs that group, and one for all needs all four."""
    async with ranks(peers, 4) as (exporter, processes):
        for cp_rank in (1, 0, 1):
            group = AttentionGroup(cp_rank, 2)
            tickets = await exporter.export(FEATURES, to=group)
            outside = [r for r in range(4) if r not in group.ranks(4)]
            for number in outside:
                answer = await processes[number].call(rank.refused, apart(tickets)["image_0"])
                assert answer == "RefusedTicketError"
            for number in group.ranks(4):
                assert not tickets.acknowledgement.done()
                await processes[number].call(rank.reconstruct, apart(tickets))
            assert sorted((await tickets.acknowledgement).released) == list(group.ranks(4))
            check_all_back(exporter)
        tickets = await exporter.export(FEATURES)
        for number in (0, 3):
            await processes[number].call(rank.reconstruct, apart(tickets))
        ticket = pickle.dumps(tickets["image_0"])
        await processes[2].call(rank.acknowledge, ticket, 2, (1, 2, 0))
        await until(lambda: exporter.statistics().owners[0].waiting_for == (1,))
        await processes[1].call(rank.acknowledge, ticket, 2, (0, 2, 1))
        assert sorted((await tickets.acknowledgement).released) == [0, 1, 2, 3]
        check_all_back(exporter)


@pytest.mark.slow
async def test_a_dead_consumer_settles_what_it_held_and_what_it_never_redeemed(
    peers: Peers,
) -> None:
    async with ranks(peers, 2) as (exporter, (first, second)):
        held = await exporter.export(FEATURES, require="any")
        unread = [await exporter.export(FEATURES, require="any") for _ in range(3)]
        for process in (first, second):
            await process.call(rank.borrow, pickle.dumps(held["image_1"]))
        for tickets in unread:
            assert await first.call(rank.reconstruct, apart(tickets)) == ANSWER
        assert check_books(exporter).slots.held == 4
        await second.killed()
        for tickets in unread:
            outcome = await tickets.acknowledgement
            assert (outcome.released, outcome.lost) == ((0,), (1,))
        assert exporter.statistics().owners[0].held_by == (0,)
        await first.killed()
        with pytest.raises(asyncvmm.DeliveryError):
            await held.acknowledgement
        check_all_back(exporter)


async def test_what_waits_for_a_rank_that_never_attaches_is_shown(peers: Peers) -> None:
    process = peers.start()
    async with asyncvmm.open_exporter(
        "t", device="cpu", pool_bytes="1MiB", route=Broadcast(2)
    ) as exporter:
        await process.call(steps.connect, "t", 0)
        tickets = await exporter.export(FEATURES, key="stuck")
        await process.call(rank.reconstruct, apart(tickets))
        await until(lambda: not exporter.statistics().owners[0].held_by)
        (owner,) = exporter.statistics().owners
        assert (owner.key, owner.waiting_for, owner.exported) == ("stuck", (1,), True)
        assert not exporter.cancel(tickets.owner), "one has had it"
        check_all_back(exporter)


async def test_a_ticket_of_a_dead_exporter_is_a_typed_error(peers: Peers) -> None:
    """Also at the exporter that follows it under its name."""
    process, heir = peers.start(), peers.start()
    await process.call(steps.open_exporter, ABSTRACT, 1)
    async with asyncvmm.connect(ABSTRACT, device="cpu", rank=0) as consumer:
        tickets = [pickle.loads(data) for data in await process.call(rank.export, 2)]
        kept = await consumer.reconstruct(tickets[0])
        await process.killed()
        with pytest.raises(LostTicketError) as caught:
            await consumer.reconstruct(tickets[1])
        assert isinstance(caught.value, asyncvmm.PeerLostError)
        with pytest.raises(LostTicketError):
            await consumer.borrow(tickets[1])
        consumer.acknowledge(tickets[1])  # nobody is left to be told
        assert await consumer.reconstruct(tickets[0]) is kept, "what is here stays"
    await heir.call(steps.open_exporter, ABSTRACT, 1)
    async with asyncvmm.connect(ABSTRACT, device="cpu", rank=0) as consumer:
        with pytest.raises(ForeignTicketError) as foreign:
            await consumer.reconstruct(tickets[1])
        assert foreign.value.made_by == foreign.value.attached_to


async def test_who_waits_for_an_answer_is_told_that_the_exporter_died(peers: Peers) -> None:
    process = peers.start()
    await process.call(steps.open_exporter, ABSTRACT, 1)
    async with asyncvmm.connect(ABSTRACT, device="cpu", rank=0) as consumer:
        (data,) = await process.call(rank.export, 1)
        process.stop()
        waits = [
            asyncio.ensure_future(consumer.reconstruct(pickle.loads(data))) for _ in range(3)
        ] + [asyncio.ensure_future(consumer.borrow(pickle.loads(data)))]
        await asyncio.sleep(0)
        await process.killed()
        for error in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(error, LostTicketError)
        assert not consumer._asked


async def test_a_consumer_that_closes_tells_those_who_wait(peers: Peers) -> None:
    process = peers.start()
    await process.call(steps.open_exporter, ABSTRACT, 1)
    async with asyncvmm.connect(ABSTRACT, device="cpu", rank=0) as consumer:
        (data,) = await process.call(rank.export, 1)
        process.stop()
        wait = asyncio.ensure_future(consumer.reconstruct(pickle.loads(data)))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(consumer.aclose())
        with pytest.raises(asyncvmm.ClosedError):
            await wait
        process.resume()
        await closing
    for work in (consumer.reconstruct, consumer.borrow):
        with pytest.raises(asyncvmm.ClosedError):
            await work(pickle.loads(data))
    with pytest.raises(asyncvmm.ClosedError):
        consumer.acknowledge(pickle.loads(data))
    assert isinstance(pickle.loads(data), Ticket)
