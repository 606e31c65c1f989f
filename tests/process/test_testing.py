"""The fault harness that users get: ``asyncvmm.testing`` and its example."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import signal
import socket
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import asyncvmm
import asyncvmm.testing
from asyncvmm.testing import (
    ForkServer,
    Here,
    ProcessEndedError,
    Processes,
    ProcessRaisedError,
    fill,
    live_events,
    mismatch,
    pattern,
)
from asyncvmm.testing.here import send


async def add(here: Here, first: int, second: int) -> int:
    return first + second


async def stand(here: Here) -> str:
    here.tell("began")
    await here.reach("stands", fact=7)
    here.block("stands still")
    return "went on"


async def fail(here: Here) -> None:
    raise asyncvmm.OwnerTooLargeError(5, 4)


async def keep(here: Here, value: int) -> None:
    here.exits.callback(print, "closed")
    here.kept["value"] = value


async def recall(here: Here) -> int:
    return int(here.kept["value"])


# -- processes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_of_the_docstring_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a server of its own, and functions of a module that only the test's path has.

    Kills: an example that rots, and a server that does not find the user's modules.
    """
    text = asyncvmm.testing.__doc__ or ""
    code = re.search(r"\n    import asyncvmm\n(    .*\n|\n)+", text)
    assert code is not None
    (tmp_path / "their_test.py").write_text(textwrap.dedent(code[0]))
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("their_test")
    try:
        (test,) = (each for name, each in inspect.getmembers(theirs) if name.startswith("test_"))
        asyncio.run(test())
    finally:
        del sys.modules["their_test"]


async def test_functions_run_there_and_say_what_came_of_them(nursery: ForkServer) -> None:
    async with Processes(nursery) as processes:
        process = processes.start()
        assert await process.call(add, 2, 3) == 5
        failing = process.begin(fail)
        with pytest.raises(ProcessRaisedError):  # and not after half a minute
            await process.at("never")
        with pytest.raises(ProcessRaisedError) as caught:
            await failing
        assert (caught.value.kind, caught.value.facts) == (
            "OwnerTooLargeError",
            {"needed": 5, "limit": 4},
        )
        await process.call(keep, 11)
        assert await process.call(recall) == 11
        assert await process.events() == live_events() == 0
        assert await process.ends() == 0
        assert process.printed == ["closed"]
        with pytest.raises(ProcessEndedError):
            await process.call(add, 2, 3)


async def test_a_process_stands_at_its_points_and_is_stopped_and_killed_there(
    nursery: ForkServer,
) -> None:
    """Kills: an arrival that is told twice, and a future left behind by a death."""
    async with Processes(nursery) as processes:
        process = processes.start()
        standing = process.begin(stand)
        assert await process.at("stands") == {"fact": 7}
        assert process.reached("began") == 1
        assert process.reached("stands") == 0
        process.go("stands")
        assert await process.at("stands still") == {}
        process.go("stands still")
        assert await standing == "went on"
        process.stop()
        answer = process.begin(add, 1, 1)
        process.resume()
        assert await answer == 2
        standing = process.begin(stand)
        await process.at("stands")
        await process.killed()
        assert process.dead
        with pytest.raises(ProcessEndedError) as caught:
            await standing
        assert caught.value.pid == process.pid
        with pytest.raises(ProcessEndedError):
            await process.at("never")
        assert process.status() == -signal.SIGKILL


async def test_only_what_can_be_imported_there_is_taken(nursery: ForkServer) -> None:
    """Kills: a mistake that shows as a time-out of the other process."""

    async def inside(here: Here) -> None:
        pass

    async with Processes(nursery) as processes:
        process = processes.start()
        for bad in (inside, lambda here: None):
            with pytest.raises(asyncvmm.ArgumentError, match="cannot be imported"):
                process.begin(bad)  # type: ignore[arg-type]  # the second is no coroutine either
        with pytest.raises(asyncvmm.ArgumentError, match="second as positional"):
            process.begin(add, 1, second=2)


async def test_no_process_outlives_its_test(nursery: ForkServer) -> None:
    """Kills: one that is forgotten because it stood still, or was stopped."""
    async with Processes(nursery) as processes:
        stopped, standing = processes.start(), processes.start()
        stopped.stop()
        standing.begin(stand)
        await standing.at("began")
        pids = processes.pids
    assert not {str(pid) for pid in pids} & set(os.listdir("/proc"))


# -- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16, torch.complex128])
def test_a_pattern_fills_and_is_found(dtype: torch.dtype) -> None:
    tensor = fill(torch.empty((5, 7), dtype=dtype), owner=3, generation=9)
    assert mismatch(tensor, 3, 9) == ""
    assert mismatch(tensor[2:], 3, 9, start=2 * 7 * dtype.itemsize // 8 * 8) == "" or (
        2 * 7 * dtype.itemsize % 8
    )
    assert fill(torch.empty((), dtype=dtype), 3, 9).numel() == 1
    assert fill(torch.empty((0, 4), dtype=dtype), 3, 9).numel() == 0


def test_stale_mixed_and_shifted_bytes_are_told_from_the_right_ones() -> None:
    """Kills: a pattern that leaves out the owner, the generation, or the offset."""
    right = pattern(1, 1, 800)
    assert torch.equal(right[80:], pattern(1, 1, 720, start=80))
    for owner, generation, start in ((2, 1, 0), (1, 2, 0), (1, 1, 8), (1, 1, 1 << 20)):
        other = pattern(owner, generation, 800, start).view(torch.int64)
        assert not torch.eq(right.view(torch.int64), other).any()


def test_a_mismatch_says_where() -> None:
    tensor = fill(torch.empty(64, dtype=torch.uint8), 1, 1)
    tensor[20] ^= 255
    tensor[30] ^= 255
    found, expected = int(tensor[20]), int(tensor[20]) ^ 255
    assert mismatch(tensor, 1, 1) == (
        "2 of 64 bytes are not those of owner 1, generation 1: the first at offset 20 is "
        f"{found} and should be {expected}"
    )
    with pytest.raises(asyncvmm.ArgumentError, match="contiguous"):
        fill(torch.empty((4, 4)).t(), 1, 1)
    with pytest.raises(asyncvmm.ArgumentError, match="no multiple of 8"):
        pattern(1, 1, 8, start=4)


def test_what_a_process_says_waits_for_a_test_that_is_slow_to_read() -> None:
    """Kills: an answer that is dropped because what was told before fills the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        theirs.setblocking(False)
        full = 0
        with suppress(BlockingIOError):
            while theirs.send(bytes(4096)):
                full += 1
        saying = thread.submit(send, theirs, b"answer")
        assert [len(ours.recv(8192)) for _ in range(full)] == [4096] * full
        assert ours.recv(8192) == b"answer"
        saying.result()
