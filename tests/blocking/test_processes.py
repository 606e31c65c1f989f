"""The facade among processes: peers that stop or die, forks, and interpreters that end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

import asyncvmm
from asyncvmm import blocking
from asyncvmm.blocking import _thread
from asyncvmm.testing import Process
from tests.blocking import steps
from tests.blocking.ends import SECONDS
from tests.process import steps as async_steps
from tests.process.harness import Peers, until
from tests.process.patterns import wrong


@pytest.fixture(autouse=True)
async def the_same_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the facade's thread run the kind of loop that the test runs."""
    is_uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    factory = uvloop.new_event_loop if is_uvloop else asyncio.new_event_loop
    monkeypatch.setattr(_thread, "_loop_factory", lambda: factory)


@pytest.fixture
async def exporting(peers: Peers) -> AsyncIterator[tuple[Process, blocking.Consumer]]:
    """An async exporter in another process, and a blocking consumer of it here."""
    peer = peers.start()
    await peer.call(async_steps.open_exporter, "pool", 1)
    opening = blocking.connect("pool", device="cpu", rank=0)
    consumer = await asyncio.to_thread(opening.__enter__)
    yield peer, consumer
    await asyncio.to_thread(consumer.close)
    await peer.killed()
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB"):
        pass  # leaves nothing of the name


def poll_for(consumer: blocking.Consumer, count: int) -> list[Any]:
    """Be a scheduler's loop until so many owners came, and check their bytes."""
    keys: list[Any] = []
    while len(keys) < count:
        batch = consumer.poll()
        if batch is not None:
            with batch:
                assert [wrong(owner) for owner in batch] == [""] * len(batch)
                keys += [owner.key for owner in batch]
    return keys


async def test_a_scheduler_polls_what_another_process_sends(
    exporting: tuple[Process, blocking.Consumer],
) -> None:
    """Fifty owners through a pool of eight slots, each let go of in the step that saw it."""
    peer, consumer = exporting
    sending = peer.begin(async_steps.send, list(range(50)))
    assert await asyncio.to_thread(poll_for, consumer, 50) == list(range(50))
    await sending
    last = peer.begin(async_steps.send, [50], 0, 1000, True)  # returns once it is acknowledged
    assert await asyncio.to_thread(poll_for, consumer, 1) == [50]
    await last


async def test_a_scheduler_goes_on_while_its_exporter_stands_still(
    exporting: tuple[Process, blocking.Consumer],
) -> None:
    """Stopped: polls find nothing and no error; continued: everything comes (field report 26).

    Kills the planted bug of a silence that is taken for a death.
    """
    peer, consumer = exporting
    await peer.call(async_steps.send, [0])
    peer.stop()
    assert await asyncio.to_thread(poll_for, consumer, 1) == [0]
    for _ in range(100):
        assert consumer.poll() is None
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(consumer.receive, 0.02)
    peer.resume()
    await peer.call(async_steps.send, [1, 2])
    assert await asyncio.to_thread(poll_for, consumer, 2) == [1, 2]


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_schedulers_exporter_is_killed(
    exporting: tuple[Process, blocking.Consumer], stopped: bool
) -> None:
    """The loop is told by the poll in which it could have been told; what it holds it may read.

    Kills: a loop that polls a dead exporter for ever.
    """
    peer, consumer = exporting
    await peer.call(async_steps.send, [0])
    batch = await asyncio.to_thread(consumer.receive, SECONDS)
    receiving = asyncio.create_task(asyncio.to_thread(consumer.receive))
    if stopped:
        peer.stop()
    await peer.killed()
    with pytest.raises(asyncvmm.PeerLostError):
        await receiving
    for _ in range(2):
        with pytest.raises(asyncvmm.PeerLostError):
            await asyncio.to_thread(poll_for, consumer, 1)
    assert [wrong(owner) for owner in batch] == [""]
    batch.release()


async def test_a_blocking_exporters_consumer_is_killed(peers: Peers, name: str) -> None:
    """Its share is lost, said by the acknowledgement, and the slot is free."""

    def send(exporter: blocking.Exporter, key: int) -> blocking.Acknowledgement:
        import torch

        return exporter.send({"x": torch.ones(3)}, key=key, timeout=SECONDS)

    opening = blocking.open_exporter("pool", device="cpu", pool_bytes="64KiB", slots=1)
    exporter = await asyncio.to_thread(opening.__enter__)
    peer = peers.start()
    await peer.call(async_steps.connect, "pool", 0)
    ack = await asyncio.to_thread(send, exporter, 1)
    waiting = asyncio.create_task(asyncio.to_thread(send, exporter, 2))
    await until(lambda: exporter.statistics().waiting == 1)
    await peer.killed()
    with pytest.raises(asyncvmm.DeliveryError) as caught:
        await asyncio.to_thread(ack.result, SECONDS)
    assert caught.value.outcome == asyncvmm.Outcome(lost=(0,))
    await waiting  # for the rank's next process
    peer = peers.start()
    await peer.call(async_steps.connect, "pool", 0)
    await asyncio.to_thread(_hang_up, opening)


def _hang_up(opening: blocking.open_exporter) -> None:
    opening.__exit__(KeyError, KeyError(), None)


# -- forks ---------------------------------------------------------------------------------------


async def test_a_forked_child_can_use_nothing_and_open_anew(peers: Peers, name: str) -> None:
    """ForkError with the next step from every method; the parent does not notice.

    Kills: a poll that says None in the child for ever, a call that waits for a thread which is
    not there, a lock that was held, and a child that cannot end.
    """
    found = await peers.start().call(steps.fork_with_all_open, name)
    assert found.pop("status") == "0"
    assert found.pop("anew") == "5"
    assert set(found.values()) == {"ForkError"}, found


# -- the interpreter's end -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("held", [[], ["held"], ["waiting"], ["polling"]])
async def test_an_interpreter_ends_with_a_consumer_open(
    peers: Peers, name: str, held: list[str]
) -> None:
    """It leaves in order, quietly: nothing counts as lost.

    Kills: an interpreter that waits for a thread which waits for ever, one that dies on its
    exporter without a word, and a traceback of each thread that goes down with it.
    """
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
        import torch

        peer = peers.start()
        await peer.call(steps.open_and_leave_open, "pool", "consumer")
        if held in (["waiting"], ["polling"]):
            await peer.call(steps.open_and_leave_open, "pool", *held)
        if held == ["held"]:
            ack = await exporter.send({"x": torch.ones(2)}, key=1, require="none")
            await peer.call(steps.open_and_leave_open, "pool", "held")
        assert await peer.ends() == 0
        assert peer.printed == []
        await exporter.drain()
        assert exporter.statistics().lost == 0
        if held == ["held"]:
            assert (await ack).lost == ()


@pytest.mark.slow
async def test_an_interpreter_ends_with_an_exporter_open(peers: Peers, folder: Path) -> None:
    """It hangs up: its consumers learn that it is lost, and its name is free.

    Kills: an end that waits ``close_timeout`` for consumers, and a name that stays behind.
    """
    peer = peers.start()
    await peer.call(steps.open_and_leave_open, "pool", "exporter")
    async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
        assert await peer.ends() == 0
        assert peer.printed == []
        with pytest.raises(asyncvmm.PeerLostError):
            await consumer.receive()


@pytest.mark.slow
async def test_a_thread_that_outlives_main_goes_on(peers: Peers) -> None:
    """The interpreter waits for it, and so does the loop's thread; it can close both ends.

    Kills: a loop that ends with the main thread, and a close that wants a new thread when none
    can be had any more.
    """
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
        peer = peers.start()
        await peer.call(steps.go_on_after_main, "pool", 3)
        ending = asyncio.ensure_future(peer.ends())
        import torch

        for number in itertools.count():
            if number == 3:
                break
            await exporter.send({"x": torch.full((4,), float(number))}, key=number)
        assert await ending == 0
        assert peer.printed == []
        await exporter.drain()
        assert exporter.statistics().lost == 0
