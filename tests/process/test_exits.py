"""Programs that end without the manners they were asked for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import asyncvmm
from asyncvmm.testing import Process
from asyncvmm.testing.counters import pool_mappings
from tests.patience import PROMPTLY
from tests.process.harness import Peers, turns
from tests.process.patterns import features, note

HEAD = ("Task exception was never retrieved", "future: <Task finished name='Task-1' ")
OTHER = "exception occurred:"

BY_SIGINT = -signal.SIGINT
"""How an interpreter ends after a KeyboardInterrupt that nobody caught."""

HANDLED = -1000
"""It ends with 0, and asyncio prints the traceback of its task."""


def program(body: str) -> str:
    """Return a program whose main function has this body."""
    return (
        "import asyncio, atexit, os, signal, sys, torch, asyncvmm\n"
        "kept = {}\n"
        "async def sending(exporter):\n"
        "    await exporter.wait_attached(1)\n"
        "    for i in range(3):\n"
        "        kept[i] = await exporter.send({'x': torch.full((100,), i)})\n"
        "    received = asyncio.Event()\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, received.set)\n"
        "    tell('ready')\n"
        "    await received.wait()\n"  # what is unread when an exporter vanishes is lost
        "    tell('going')\n"
        "async def main():\n"
        # Without a handler of its own asyncio does not have itself woken by signals, and one that
        # comes as it is about to sleep is acted upon when it wakes.
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, int)\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + "\n"
        "run(main())\n"
    )


def beyond_traceback(lines: list[str]) -> list[str]:
    """Return what was printed besides tracebacks; chained ones count as one.

    Where a task calls sys.exit, asyncio may print one of its own, with a head of two lines, and
    does so without us.
    """
    extra, inside = [], False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith(" "):
            inside = False  # the exception itself
        elif line and not inside and not line.endswith(OTHER) and not line.startswith(HEAD):
            extra.append(line)
    return extra


# -- consumers -----------------------------------------------------------------------------------

CONSUMERS: dict[str, tuple[str, int]] = {
    "forgets to close": (
        """
        consumer = await asyncvmm.connect("pool", device="cpu", rank=0).__aenter__()
        kept["batch"] = await consumer.receive()
        tell("ready")
        """,
        0,
    ),
    "forgets to close, with everything in reference cycles": (
        """
        consumer = await asyncvmm.connect("pool", device="cpu", rank=0).__aenter__()
        batch = await consumer.receive()
        cycle = [consumer, batch, batch[0]["bytes"]]
        cycle.append(cycle)
        tell("ready")
        """,
        0,
    ),
    "raises": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            batch = await consumer.receive()
            tell("ready")
            raise ValueError("mine")
        """,
        1,
    ),
    "raises while it looks at a view": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            async for batch in consumer:
                for owner in batch:
                    with owner:
                        view = owner["bytes"]
                        tell("ready")
                        view.reshape(-7)
        """,
        1,
    ),
    "calls sys.exit in a task": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            async def work():
                batch = await consumer.receive()
                tell("ready")
                sys.exit(3)
            await asyncio.gather(work(), consumer.receive())
        """,
        3,
    ),
    "calls os._exit": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            batch = await consumer.receive()
            tell("ready")
            os._exit(7)
        """,
        7,
    ),
    "gets Ctrl-C while it waits": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            kept["batch"] = await consumer.receive()
            kept["second"] = await consumer.receive()
            tell("ready")
            await asyncio.sleep(60)
        """,
        BY_SIGINT,
    ),
    "gets Ctrl-C while it waits for a batch": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            count = 0
            async for batch in consumer:
                batch.release()
                count += 1
                if count == 4:
                    tell("ready")
        """,
        BY_SIGINT,
    ),
    "gets Ctrl-C while it computes": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            with await consumer.receive() as batch:
                view = batch[0]["bytes"]
                tell("ready")
                while True:
                    view.sum()
                    await asyncio.sleep(0)
        """,
        BY_SIGINT,
    ),
    "has a task that fails and that nobody asks": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            async def work():
                batch = await consumer.receive()
                kept["view"] = batch[0]["bytes"]
                raise ValueError("mine")
            kept["task"] = asyncio.create_task(work())
            await asyncio.wait([kept["task"]])
            tell("ready")
        del kept["task"]
        """,
        HANDLED,
    ),
    "leaves a thread behind that has a view": (
        """
        import threading
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            batch = await consumer.receive()
            def work(view, wait=threading.Event().wait):
                wait()
            threading.Thread(target=work, args=[batch[0]["bytes"]], daemon=True).start()
            tell("ready")
        """,
        0,
    ),
    "raises with views in globals": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            kept["batches"] = [await consumer.receive() for _ in range(2)]
            kept["view"] = kept["batches"][0][0]["bytes"]
            tell("ready")
            raise ValueError("mine")
        """,
        1,
    ),
    "keeps views in globals": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            batch = await consumer.receive()
            kept["view"] = batch[0]["bytes"][3:]
            batch.release()
            kept["owner"] = (await consumer.receive())[0]
            kept["words"] = kept["owner"]["words"].numpy()
            tell("ready")
        """,
        0,
    ),
    "uses a view at exit": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            view = (await consumer.receive())[0]["bytes"]
            atexit.register(lambda: view.sum().item())
            tell("ready")
        """,
        0,
    ),
    "leaves with batches unread": (
        """
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            await consumer.receive()
            tell("ready")
        """,
        0,
    ),
}


def check_end(peer: Process, status: int) -> None:
    """See that a program ended as it was to, and printed what is Python's and one line at most."""
    assert peer.status() == (0 if status == HANDLED else status)
    assert len(beyond_traceback(peer.printed)) <= 1
    if status != 3:  # see beyond_traceback
        assert ("Traceback" in "".join(peer.printed)) == (status in {1, BY_SIGINT, HANDLED})


@pytest.mark.parametrize(("body", "status"), CONSUMERS.values(), ids=CONSUMERS)
async def test_a_consumer_program_that_ends_gives_everything_back(
    peers: Peers, body: str, status: int
) -> None:
    """Kills: an end that prints, hangs, changes the exit status, or keeps an owner."""
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB", slots=4) as e:
        acks = []
        for owner in range(4):
            terms = {"key": owner, "metadata": note(owner, 0, 500)}
            acks.append(await e.send(features(owner, 0, 500), require="none", **terms))  # type: ignore[arg-type]  # two types in one dict
        peer = peers.start(script=program(body))
        await peer.at("ready")
        if status == BY_SIGINT:
            peer.signal(signal.SIGINT)
        await peer.died()
        async with asyncio.timeout(PROMPTLY):
            for ack in acks:
                await ack
        check_end(peer, status)
        assert e.statistics().slots.free == 4
        assert e.statistics().consumers == ()


# -- exporters -----------------------------------------------------------------------------------

EXPORTERS: dict[str, tuple[str, int, type[Exception]]] = {
    "forgets to close": (
        """
        opening = asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB")
        exporter = await opening.__aenter__()
        kept["exporter"] = exporter
        await sending(exporter)
        """,
        0,
        asyncvmm.PeerLostError,
    ),
    "raises": (
        """
        async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
            await sending(exporter)
            raise ValueError("mine")
        """,
        1,
        asyncvmm.PeerLostError,
    ),
    "raises inside a reservation": (
        """
        async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
            await sending(exporter)
            async with exporter.reserve({"x": asyncvmm.TensorSpec((9,), "uint8")}) as owner:
                kept["tensor"] = owner["x"]
                raise ValueError("mine")
        """,
        1,
        asyncvmm.PeerLostError,
    ),
    "calls sys.exit in a task": (
        """
        async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
            async def work():
                await sending(exporter)
                sys.exit(3)
            await asyncio.gather(work(), exporter.drain())
        """,
        3,
        asyncvmm.PeerLostError,
    ),
    "gets Ctrl-C while it waits": (
        """
        async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
            await sending(exporter)
            await exporter.drain()
        """,
        BY_SIGINT,
        asyncvmm.PeerLostError,
    ),
    "gets Ctrl-C while it waits for room": (
        """
        options = {"pool_bytes": "64KiB", "slots": 3}
        async with asyncvmm.open_exporter("pool", device="cpu", **options) as exporter:
            await sending(exporter)
            await exporter.send({"x": torch.ones(9)})
        """,
        BY_SIGINT,
        asyncvmm.PeerLostError,
    ),
    "gets Ctrl-C while it computes inside a reservation": (
        """
        async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
            await sending(exporter)
            async with exporter.reserve({"x": asyncvmm.TensorSpec((9,), "uint8")}) as owner:
                while True:
                    owner["x"].add_(1)
                    await asyncio.sleep(0)
        """,
        BY_SIGINT,
        asyncvmm.PeerLostError,
    ),
    "calls os._exit": (
        """
        async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
            await sending(exporter)
            os._exit(7)
        """,
        7,
        asyncvmm.PeerLostError,
    ),
    "gets Ctrl-C while it closes": (
        """
        options = {"pool_bytes": "64KiB", "close_timeout": 60}
        async with asyncvmm.open_exporter("pool", device="cpu", **options) as exporter:
            await sending(exporter)
        """,
        BY_SIGINT,
        asyncvmm.EndOfStream,
    ),
    "keeps tensors of its pool in globals": (
        """
        options = {"pool_bytes": "64KiB", "close_timeout": 0}
        async with asyncvmm.open_exporter("pool", device="cpu", **options) as exporter:
            async with exporter.reserve({"x": asyncvmm.TensorSpec((9,), "uint8")}) as owner:
                kept["tensor"] = owner["x"]
                kept["owner"] = owner
            await sending(exporter)
        """,
        0,
        asyncvmm.EndOfStream,
    ),
}


@pytest.mark.parametrize(("body", "status", "end"), EXPORTERS.values(), ids=EXPORTERS)
async def test_an_exporter_program_that_ends_leaves_what_was_received(
    peers: Peers, folder: Path, body: str, status: int, end: type[Exception]
) -> None:
    """Kills: an end that prints, hangs, changes the exit status, or takes a reader's bytes."""
    peer = peers.start(script=program(body))
    async with (
        asyncio.timeout(PROMPTLY),
        asyncvmm.connect("pool", device="cpu", rank=0, wait=True) as consumer,
    ):
        await peer.at("ready")
        held = [await consumer.receive() for _ in range(3)]
        peer.signal(signal.SIGUSR1)
        if status == BY_SIGINT:
            await peer.at("going")
            peer.signal(signal.SIGINT)
        await peer.died()
        with pytest.raises(end):
            async with asyncio.timeout(PROMPTLY):
                await consumer.receive()
        assert [batch[0]["x"].tolist() for batch in held] == [[i] * 100 for i in range(3)]
        check_end(peer, status)
        for batch in held:
            batch.release()
        del batch, held
        await turns()
        assert pool_mappings() == []
    left = os.listdir(folder / "asyncvmm")
    stale = "__aenter__" in body or "_exit" in body.replace("sys.exit", "")
    assert left == (["pool.sock"] if stale else [])
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB"):
        pass  # the name can be had by the next


async def test_ctrl_c_ends_a_consumer_that_waits_for_its_exporter(
    peers: Peers, folder: Path
) -> None:
    """Kills: a loop over attempts to connect that takes Ctrl-C for one more failure."""
    body = """
    tell("ready")
    async with asyncvmm.connect("pool", device="cpu", rank=0, wait=True):
        pass
    """
    peer = peers.start(script=program(body))
    await peer.at("ready")
    peer.signal(signal.SIGINT)
    await peer.died()
    check_end(peer, BY_SIGINT)
    assert not (folder / "asyncvmm").exists() or not os.listdir(folder / "asyncvmm")


# -- a whole interpreter -------------------------------------------------------------------------

WHOLE = """
import asyncio, sys, asyncvmm
kept = []
async def main():
    async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
        batch = await consumer.receive()
        kept.append(batch[0]["bytes"])
        kept.append(await consumer.receive())
        sys.exit(5)
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_program_of_its_own_ends_as_those_of_the_nursery_do(folder: Path) -> None:
    """The control of the tests above, whose programs are forked from one that has torch loaded."""

    async def main() -> None:
        async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
            acks = [
                await exporter.send(features(owner, 0, 500), require="none") for owner in range(4)
            ]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WHOLE, stderr=subprocess.PIPE
            )
            _, printed = await process.communicate()
            async with asyncio.timeout(PROMPTLY):
                for ack in acks:
                    await ack
            assert process.returncode == 5
            assert printed == b""

    asyncio.run(main())
