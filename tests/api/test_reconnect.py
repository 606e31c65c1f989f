"""A consumer that goes on with the next exporter, and is told once what was lost."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import Batch, Exporter, PeerLostError, ReconnectingConsumer
from asyncvmm.testing import ProcessRaisedError
from asyncvmm.testing.counters import pool_mappings
from tests.api.books import passes, until
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers
from tests.process.patterns import features, note, wrong
from tests.process.raw import RawExporter

NAME = "@asyncvmm-restart"


class Crash(Exception):
    """What an exporter's block is left with, so that it hangs up without a goodbye."""


@asynccontextmanager
async def exporting(*, crash: bool = False, **options: Any) -> AsyncIterator[Exporter]:
    """Open an exporter of one rank; leave it in order, or as a crash would."""
    options = {"pool_bytes": "64KiB", "slots": 8, "close_timeout": 5.0, **options}
    try:
        async with asyncvmm.open_exporter(NAME, device="cpu", **options) as exporter:
            yield exporter
            if crash:
                raise Crash
    except Crash:
        pass


def reconnecting(**options: Any) -> asyncvmm.connect[ReconnectingConsumer]:
    options = {"rank": 0, "wait": True, **options}
    found: asyncvmm.connect[ReconnectingConsumer] = asyncvmm.connect(
        NAME, device="cpu", reconnect=True, **options
    )
    return found


async def send(exporter: Exporter, number: int) -> asyncvmm.Acknowledgement:
    return await exporter.send({"x": torch.full((300,), number)}, key=number, require="none")


async def arrived(consumer: ReconnectingConsumer, unread: int) -> None:
    await until(lambda: consumer.statistics().unread == unread)


async def attached(consumer: ReconnectingConsumer) -> None:
    """Wait until an exporter is there."""
    await until(lambda: consumer.statistics().state == "open")


def shows(batch: Batch, number: int) -> bool:
    return bool((batch[0]["x"] == number).all()) and batch[0].key == number


# -- a loss ---------------------------------------------------------------------------------------


async def test_a_loss_is_told_once_with_its_number_and_then_the_next_exporter_comes() -> None:
    """Three lives: what had come and was not received is counted, never shown, never repeated.

    Kills: a loss that is told twice or not at all, one that counts what was received, unread
    batches of the old life that are handed out, and numbers that begin anew with each life.
    """
    async with exporting(crash=True) as exporter:
        consumer = await reconnecting().__aenter__()
        for number in range(4):
            await send(exporter, number)
        assert shows(await consumer.receive(), 0)
        await arrived(consumer, 3)
    async with exporting(crash=True) as exporter:
        await send(exporter, 10)
        with pytest.raises(PeerLostError) as caught:
            await consumer.receive()
        assert caught.value.lost == 3
        assert shows(await consumer.receive(), 10)
    with pytest.raises(PeerLostError) as caught:
        await consumer.receive()
    assert caught.value.lost == 0
    async with exporting() as exporter:
        await send(exporter, 20)
        assert shows(await consumer.receive(), 20)
        numbers = consumer.statistics()
        assert (numbers.exporters, numbers.losses, numbers.lost) == (3, 2, 3)
        assert numbers.delivered == 6
        await consumer.aclose()


async def test_one_of_several_receivers_is_told_and_the_others_wait() -> None:
    """Kills: a loss that every waiting task is told of, and a waiter that sleeps through it."""
    async with exporting(crash=True) as exporter:
        consumer = await reconnecting().__aenter__()
        tasks = [asyncio.create_task(consumer.receive()) for _ in range(3)]
        await until(lambda: consumer.statistics().waiting == 3)
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in done] == [PeerLostError]
    await until(lambda: consumer.statistics().waiting == 2)
    async with exporting() as exporter:
        await send(exporter, 1)
        await send(exporter, 2)
        async with asyncio.timeout(PROMPTLY):
            batches = [await task for task in waiting]
        assert sorted(str(batch[0].key) for batch in batches) == ["1", "2"]
        await consumer.aclose()


@pytest.mark.parametrize("reconnect", [False, True])
async def test_the_first_exporter_may_die_before_it_has_let_anybody_in(
    folder: Path, reconnect: bool
) -> None:
    """Who waits for whichever exporter comes goes on waiting; who asked for this one is told.

    Kills: a loss that is told of an exporter that never was there to its consumer.
    """
    address = folder / "pool"
    dying = RawExporter(str(address))
    options: Any = {"device": "cpu", "rank": 0, "wait": True, "reconnect": reconnect}
    coming = asyncvmm.connect(str(address), **options)
    entering = asyncio.create_task(coming.__aenter__())
    end = await dying.accept()
    dying.listener.close()
    address.unlink()
    end.sock.close()
    if not reconnect:
        with pytest.raises(PeerLostError, match="hung up during the handshake"):
            await entering
        return
    async with asyncvmm.open_exporter(str(address), device="cpu", pool_bytes="64KiB") as exporter:
        async with asyncio.timeout(PROMPTLY):
            consumer = await entering
        await send(exporter, 3)
        batch = await consumer.receive()
        assert shows(batch, 3)
        batch.release()
        await consumer.aclose()


async def test_iteration_ends_with_a_loss_and_goes_on_when_begun_again() -> None:
    """Kills: an iteration that ends silently, or cannot be begun again."""
    async with exporting(crash=True) as exporter:
        consumer = await reconnecting().__aenter__()
        await send(exporter, 0)
        seen: list[object] = []

        async def iterate() -> None:
            async for batch in consumer:
                with batch:
                    seen.append(batch[0].key)

        first = asyncio.create_task(iterate())
        await until(lambda: seen == [0])
    with pytest.raises(PeerLostError):
        await first
    second = asyncio.create_task(iterate())
    for number in (1, 2):  # goodbyes, which it does not end with
        async with exporting() as exporter:
            await send(exporter, number)
            await until(lambda number=number: seen[-1] == number)  # type: ignore[misc]  # a default
    assert not second.done()
    await consumer.aclose()
    with pytest.raises(asyncvmm.ClosedError):
        await second
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("crash", [True, False])
async def test_old_owners_stay_readable_and_the_old_mapping_goes_with_the_last(crash: bool) -> None:
    """Two lives at once: no view shows the other's bytes, and each mapping ends by itself.

    Kills: owners that are released by a reconnect, an old mapping that goes early or never, one
    that is used for the new exporter's owners, and a release that is said to the wrong exporter.
    """
    before = len(pool_mappings())
    warned = nullcontext() if crash else pytest.warns(asyncvmm.OwnersOutstandingWarning)
    with warned:
        async with exporting(crash=crash, close_timeout=0.05) as exporter:
            consumer = await reconnecting().__aenter__()
            for number in (1, 2):
                await send(exporter, number)
            old, viewed = await consumer.receive(), await consumer.receive()
            view = viewed[0]["x"]
            viewed.release()
            del viewed
    async with exporting() as exporter:
        ack = await send(exporter, 3)
        if crash:
            with pytest.raises(PeerLostError):
                await consumer.receive()
        new = await consumer.receive()
        assert new[0].slot == old[0].slot
        assert new[0].generation == old[0].generation
        assert shows(old, 1)
        assert shows(new, 3)
        assert bool((view == 2).all())
        assert consumer.statistics().held == 3
        assert consumer.statistics().pinned == (2,)
        del view
        old.release()
        await passes(5)
        assert consumer.statistics().held == 1
        assert not ack.done()  # the old life's slot 0 is not the new one's
        gc.collect()
        assert len(pool_mappings()) == before + 2  # the exporter's, and ours of the new one
        assert shows(new, 3)
        new.release()
        assert (await ack).complete
        await consumer.aclose()
    gc.collect()
    assert len(pool_mappings()) == before


# -- a goodbye ------------------------------------------------------------------------------------


async def test_after_a_goodbye_the_rest_is_received_and_the_next_exporter_is_waited_for() -> None:
    """Kills: a goodbye that ends the stream, one that counts as a loss, batches that it drops."""
    async with exporting() as exporter:
        consumer = await reconnecting().__aenter__()
        await send(exporter, 1)
        await send(exporter, 2)
        first = await consumer.receive()
        receiving = asyncio.create_task(receive_and_release(consumer, 2))
        first.release()
        del first
    async with exporting() as exporter:
        await send(exporter, 3)
        assert await receiving == [2, 3]
        numbers = consumer.statistics()
        assert (numbers.exporters, numbers.losses, numbers.lost) == (2, 0, 0)
        await consumer.aclose()


async def receive_and_release(consumer: ReconnectingConsumer, count: int) -> list[object]:
    keys: list[object] = []
    for _ in range(count):
        with await consumer.receive() as batch:
            keys.append(batch[0].key)
    return keys


async def test_an_exporter_that_is_still_closing_is_not_come_in_to_again() -> None:
    """It waits for a competitor, and we wait for its end without asking it again and again.

    Kills: a consumer that attaches to a closing exporter over and over.
    """
    route = asyncvmm.Compete()
    opening = asyncvmm.open_exporter(NAME, device="cpu", pool_bytes="64KiB", route=route)
    exporter = await opening.__aenter__()
    async with asyncvmm.connect(NAME, device="cpu") as other:
        await send(exporter, 1)
        kept = await other.receive()
        consumer = await reconnecting(rank=None).__aenter__()
        receiving = asyncio.create_task(receive_and_release(consumer, 1))
        closing = asyncio.create_task(opening.__aexit__(None, None, None))
        await until(lambda: consumer.statistics().state == "connecting")
        admitted = exporter._core._next_peer
        await passes(50)
        assert exporter._core._next_peer == admitted
        kept.release()
        await closing
    async with exporting(route=route) as exporter:
        await send(exporter, 2)
        assert await receiving == [2]
        await consumer.aclose()


# -- polling, and what keeps us out ---------------------------------------------------------------


async def test_receive_nowait_tells_the_loss_and_looks_for_the_next_exporter() -> None:
    """For a loop that polls between steps of its own.  Kills: one that never reconnects."""
    async with exporting(crash=True):
        consumer = await reconnecting().__aenter__()
        with pytest.raises(asyncvmm.WouldBlock):
            consumer.receive_nowait()
    await until(lambda: consumer.statistics().losses == 1)
    with pytest.raises(PeerLostError):
        consumer.receive_nowait()
    with pytest.raises(asyncvmm.WouldBlock, match="no exporter"):
        consumer.receive_nowait()
    async with exporting() as exporter:
        await attached(consumer)
        await send(exporter, 1)
        await arrived(consumer, 1)
        assert shows(consumer.receive_nowait(), 1)
        await consumer.aclose()


async def test_what_keeps_us_out_is_raised_once_per_try() -> None:
    """The next exporter has another secret, then the right one.

    Kills: an error that is swallowed by trying again for ever, and one after which nothing helps.
    """
    async with exporting(crash=True):
        consumer = await reconnecting().__aenter__()
    with pytest.raises(PeerLostError):
        await consumer.receive()
    async with exporting(secret="another"):
        for _ in range(2):
            with pytest.raises(asyncvmm.AccessDeniedError):
                await consumer.receive()
    async with exporting() as exporter:
        await send(exporter, 1)
        assert shows(await consumer.receive(), 1)
        await consumer.aclose()


async def test_a_rank_that_is_taken_is_waited_for() -> None:
    """Kills: a seat that somebody leaves in a moment taken for one that can never be had."""
    async with exporting(crash=True):
        consumer = await reconnecting().__aenter__()
    async with exporting() as exporter:
        async with asyncvmm.connect(NAME, device="cpu", rank=0):
            with pytest.raises(PeerLostError):
                await consumer.receive()
            receiving = asyncio.create_task(consumer.receive())
            await until(lambda: consumer._tries._pause > 0.05)  # it was refused
        await send(exporter, 1)
        assert shows(await receiving, 1)
        await consumer.aclose()


# -- cancelling and closing -----------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(12))
async def test_a_receive_may_be_cancelled_at_any_point_of_a_reconnect(turns: int) -> None:
    """Kills: a reconnect that belongs to the caller that began it, and is lost with it."""
    async with exporting(crash=True):
        consumer = await reconnecting().__aenter__()
    with pytest.raises(PeerLostError):
        await consumer.receive()
    receiving = asyncio.create_task(consumer.receive())
    await passes()
    async with exporting() as exporter:
        await passes(turns)
        receiving.cancel()
        await asyncio.wait((receiving,))
        await send(exporter, 1)
        batch = receiving.result() if not receiving.cancelled() else await consumer.receive()
        assert shows(batch, 1)
        await consumer.aclose()


@pytest.mark.parametrize("turns", range(0, 24, 2))
async def test_a_consumer_may_be_closed_at_any_point_of_a_reconnect(turns: int) -> None:
    """Whoever waits is told, the seat is free, and nothing stays mapped.

    Kills: a consumer that comes in after it was closed, and keeps the seat.
    """
    before = len(pool_mappings())
    async with exporting(crash=True):
        consumer = await reconnecting().__aenter__()
    with pytest.raises(PeerLostError):
        await consumer.receive()
    receiving = asyncio.create_task(consumer.receive())
    await passes()
    async with exporting() as exporter:
        if turns > 10:
            await until(lambda: bool(exporter.statistics().consumers))
        await passes(turns)
        await consumer.aclose()
        with pytest.raises(asyncvmm.ClosedError):
            await receiving
        with pytest.raises(asyncvmm.ClosedError):
            await consumer.receive()
        await consumer.aclose()
        assert consumer.statistics().state == "closed"
        async with asyncvmm.connect(NAME, device="cpu", rank=0):
            pass
        await until(lambda: exporter.statistics().consumers == ())
    assert len(pool_mappings()) == before


async def test_a_broken_link_to_an_exporter_that_lives_is_a_loss_like_any_other() -> None:
    """The same exporter is come in to again, as somebody new.

    Kills: a seat that stays taken by the broken link, and owners that leaving the block forgets.
    """
    async with exporting() as exporter:
        async with reconnecting() as consumer:
            await send(exporter, 1)
            await send(exporter, 2)
            old = await consumer.receive()
            await arrived(consumer, 1)
            assert consumer._current is not None
            consumer._current._link._sock.shutdown(socket.SHUT_RDWR)
            await until(lambda: consumer.statistics().losses == 1)
            with pytest.raises(PeerLostError) as caught:
                await consumer.receive()
            assert caught.value.lost == 1
            ack = await send(exporter, 3)
            new = await consumer.receive()
            assert shows(old, 1)
            assert shows(new, 3)
        assert (await ack).complete
        assert old[0].released
        assert new[0].released


# -- processes ------------------------------------------------------------------------------------


async def test_a_killed_exporter_is_replaced_by_one_of_its_name(peers: Peers) -> None:
    """Kill it between what was received and what was not; its successor begins anew (report 4).

    Kills: an old mapping that is read for the new exporter, and a death that only shows later.
    """
    consumer: ReconnectingConsumer | None = None
    kept: list[Batch] = []
    for life in range(3):
        host = peers.start()
        await host.call(steps.open_exporter, NAME, 1)
        if consumer is None:
            consumer = await reconnecting().__aenter__()
        await host.call(steps.send, [0, 1, 2], life)
        if life:
            with pytest.raises(PeerLostError) as caught:
                await consumer.receive()
            assert caught.value.lost == 2
        batch = await consumer.receive()
        assert dict(batch[0].metadata)["generation"] == life  # type: ignore[call-overload]  # plain data
        kept.append(batch)
        await arrived(consumer, 2)
        await host.killed()
        for each in kept:
            assert wrong(each[0]) == ""
    assert consumer is not None
    assert consumer.statistics().held == 3
    for each in kept:
        each.release()
    await consumer.aclose()
    assert pool_mappings() == []


async def test_a_rank_in_a_process_of_its_own_outlives_two_exporters(peers: Peers) -> None:
    """The exporter's side: each life sees its rank come, and gets everything back.

    Kills: a rank that keeps its seat with a dead exporter.
    """
    rank = peers.start()
    connecting = rank.begin(steps.connect, NAME, 0, {"reconnect": True})
    taking: asyncio.Future[list[int]] | None = None
    for life in range(3):
        async with exporting(crash=life < 2) as exporter, asyncio.timeout(PROMPTLY):
            await exporter.wait_attached(1)
            await connecting
            acks = [
                await exporter.send(features(n, life, 500), key=n, metadata=note(n, life, 500))
                for n in range(3)
            ]
            first = await (taking or rank.begin(steps.take, 1))
            assert first + await rank.call(steps.take, 2) == [0, 1, 2]
            await rank.call(steps.give_back)
            for ack in acks:
                assert (await ack).released == (0,)
        if life < 2:
            with pytest.raises(ProcessRaisedError, match="PeerLostError"):
                await rank.call(steps.take, 1)
            taking = rank.begin(steps.take, 1)
    await rank.call(steps.leave)
