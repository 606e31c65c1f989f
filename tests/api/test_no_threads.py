"""A process that may not have another thread, and one whose loop's own threads are all in use."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from concurrent.futures import Executor
from functools import partial
from typing import Any

import pytest
import torch

from asyncvmm._io import threads
from asyncvmm._tensors.host import OFFLOAD_BYTES
from asyncvmm.testing import FakeDevice, FakePort, open_pair
from tests.api.books import until
from tests.patience import PROMPTLY

LARGE = OFFLOAD_BYTES
"""Bytes of a feature whose copy leaves the loop."""


class Limit:
    """How many threads the process may still begin; None is no limit."""

    left: int | None = None


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Refuse to begin threads, with the words of the interpreter, for as long as the test says."""
    limit, start = Limit(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if limit.left is not None:
            if not limit.left:
                raise RuntimeError("can't start new thread")
            limit.left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return limit


def feature(nbytes: int, value: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((nbytes,), value, dtype=torch.uint8)}


async def whole_life(**options: Any) -> None:
    """Open, attach, grow, copy, shrink, close; each makes slow calls."""
    async with (
        asyncio.timeout(PROMPTLY),
        open_pair(pool_bytes=LARGE, max_pool_bytes=3 * LARGE, shrink_after=0.01, **options) as pair,
    ):
        acks = [await pair.exporter.send(feature(LARGE, value)) for value in (1, 2)]
        for value in (1, 2):
            with await pair.consumer.receive() as batch:
                assert batch[0].clone()["x"].unique().tolist() == [value]
            del batch
        for ack in acks:
            await ack
        assert pair.exporter.statistics().grown == 1
        await until(lambda: pair.exporter.statistics().shrunk == 1)


async def test_slow_calls_are_made_at_once_where_no_thread_can_be_had(limit: Limit) -> None:
    """Kills: a send that waits for ever for a pool that could not begin to grow, a consumer that
    is never sent the pool, and a close that leaves memory, sockets and name behind."""
    limit.left = 0
    await whole_life()


async def test_a_copy_that_could_not_begin_is_not_made_later(limit: Limit) -> None:
    """An executor keeps the work that it had no thread for until it has one.

    Kills: a copy that is made twice, the second time into bytes that are another owner's (inv. 2).
    """
    async with open_pair(pool_bytes=3 * LARGE) as pair:
        limit.left = 0
        ack = await pair.exporter.send(feature(LARGE, 1))
        (await pair.consumer.receive()).release()
        await ack
        await pair.exporter.send(feature(LARGE // 2, 2))  # in the same place
        (owner,) = await pair.consumer.receive()
        view = owner["x"]
        limit.left = None
        await pair.exporter.send(feature(LARGE, 3))
        (later,) = await pair.consumer.receive()
        assert later["x"].unique().tolist() == [3]
        assert view.unique().tolist() == [2]
        del view, owner, later


async def test_a_call_that_a_thread_has_taken_is_waited_for() -> None:
    """An executor may say that it has no thread for work which one of its threads then takes.

    Kills: an outcome that is dropped with the executor's own.
    """

    class Taker(Executor):
        def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            raise RuntimeError("can't start new thread")

    calls = iter((1, 2))
    assert await threads.begin(partial(next, calls), Taker()) == 1
    assert next(calls) == 2


async def test_slow_calls_need_no_thread_of_the_loop() -> None:
    """A program may have them all wait for requests.

    Kills: attaching, growing or closing in the loop's executor, behind whatever waits there.
    """
    loop, over = asyncio.get_running_loop(), threading.Event()
    for _ in range(64):
        loop.run_in_executor(None, over.wait)
    try:
        await whole_life()
    finally:
        over.set()


@pytest.mark.parametrize("lacking", ["thread", "descriptor"])
async def test_fences_are_watched_once_their_watcher_can_begin(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Kills: a slot that drains for ever, its fence dropped with the watcher's first error."""
    refused: list[int] = []

    def no_descriptor(*_: object) -> int:
        refused.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    def no_thread(_: object) -> None:
        refused.append(1)
        raise RuntimeError("can't start new thread")

    device = FakeDevice(hold_release=True)
    async with asyncio.timeout(PROMPTLY), open_pair(port=FakePort(device)) as pair:
        if lacking == "thread":
            monkeypatch.setattr(threading.Thread, "start", no_thread)
        else:
            monkeypatch.setattr(os, "eventfd", no_descriptor)
        ack = await pair.exporter.send(feature(100, 1))
        with await pair.consumer.receive() as batch:
            assert batch[0].clone()["x"].unique().tolist() == [1]
        await until(lambda: len(refused) > 1)
        assert not ack.done()
        monkeypatch.undo()
        device.finish()
        assert (await ack).complete
