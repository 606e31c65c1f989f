"""The two processes of a lane: what they do, and how they are told.

Each has one pipe to the conductor, read by a thread that otherwise waits in the kernel; so a side
may block on its transport, and one whose conductor is gone ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from benchmarks.contents import CHECKED, Contents
from benchmarks.flows import Flow, bursts, check, stream
from benchmarks.heartbeat import Gaps, Heartbeat
from benchmarks.setting import Loop, Setting
from benchmarks.transports import load

Told = tuple[str, dict[str, Any]]


def produce(name: str, setting: Setting, shared: Any, conn: Connection) -> None:
    """Be the producer's process."""
    hold(setting, 0)
    _be(conn, setting, "producer", lambda: _produce(name, setting, shared, conn))


def consume(name: str, setting: Setting, shared: Any, conn: Connection, index: int) -> None:
    """Be a consumer's process."""
    hold(setting, 1 + index)
    _be(conn, setting, f"consumer-{index}", lambda: _consume(name, setting, shared, conn, index))


def hold(setting: Setting, place: int) -> None:
    """Keep this process, and every thread that it starts, to the processors given for it."""
    if setting.cores:
        os.sched_setaffinity(0, setting.cores[place % len(setting.cores)])


def touch(device: str) -> None:
    """Try whether a process that was started like a side can use a GPU."""
    torch.zeros(1, device=device)


def _be(
    conn: Connection, setting: Setting, role: str, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the conductor ends us
    with open(setting.folder / f"{role}.err", "w") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if setting.on_gpu:
        device = setting.device if role == "producer" else setting.consumer_device
        torch.cuda.set_device(torch.device(device))
        torch.zeros(1, device=device)  # a context is not what connecting costs
    try:
        run(setting.loop, work())
    except BaseException as error:
        traceback.print_exc()
        conn.send(("failed", f"{role}: {type(error).__name__}: {error}"))
        sys.stderr.flush()
        os._exit(1)  # not held up by what failed


def run(loop: Loop, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the chosen loop, or on none at all."""
    if loop == "none":
        try:
            work.send(None)
        except StopIteration:
            return
        raise RuntimeError("a transport without an event loop has to wait by blocking")
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)


def _listen(conn: Connection, hear: Callable[[Told], None]) -> None:
    """Pass on what the conductor says, from a thread; end with it."""

    def listen() -> NoReturn:
        while True:
            try:
                told = conn.recv()
            except (EOFError, OSError):
                os._exit(1)
            hear(told)

    threading.Thread(target=listen, daemon=True).start()


class Inbox:
    """What a producer was told and has not done yet."""

    def __init__(self, conn: Connection, loop: Loop) -> None:
        if loop == "none":
            self._blocking: queue.SimpleQueue[Told] | None = queue.SimpleQueue()
            _listen(conn, self._blocking.put)
            return
        self._blocking = None
        self._async: asyncio.Queue[Told] = asyncio.Queue()
        running = asyncio.get_running_loop()
        _listen(conn, lambda t: _ignore(running.call_soon_threadsafe(self._async.put_nowait, t)))

    async def next(self) -> Told:
        """Wait for the next command."""
        return await self._async.get() if self._blocking is None else self._blocking.get()


def _ignore(_: object) -> None:
    pass


async def _produce(name: str, setting: Setting, shared: Any, conn: Connection) -> None:
    inbox = Inbox(conn, setting.loop)
    producer = load(name).producer(setting, Contents(setting.payload, setting.device), shared)
    number = fallen = 0
    async with producer:
        conn.send(("open", None))
        await producer.ready()
        gc.freeze()  # as servers do once they are up: a full collection looks at all of torch
        conn.send(("ready", None))
        while (told := await inbox.next())[0] != "close":
            what, how = told
            beats = how.pop("beats", False)
            heartbeat = Heartbeat() if beats else None
            cpu = time.process_time()
            if what == "stream":
                flow = await stream(producer, number, **how)
            elif what == "bursts":
                flow = await bursts(producer, number, **how)
            else:
                flow = await check(producer, number, **how)
            cpu = time.process_time() - cpu
            number += flow.count
            gaps = heartbeat.stop() if heartbeat else Gaps()
            facts = producer.facts()
            fell, fallen = producer.fallbacks - fallen, producer.fallbacks
            conn.send(("done", _Report(flow, cpu, gaps, fell, facts)))
    conn.send(("closed", None))


class _Report:
    """What a producer has to say after each command."""

    def __init__(
        self, flow: Flow, cpu: float, gaps: Gaps, fallbacks: int, facts: dict[str, Any]
    ) -> None:
        self.flow = flow
        self.cpu = cpu
        self.gaps = gaps
        self.fallbacks = fallbacks
        self.facts = facts


class Seen:
    """What a consumer has seen since it was last told to begin."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._contents: Contents | None = None
        self._work = setting.work
        self.first = 0.0
        """When the first hand-off of all was seen."""
        self.begin()

    def begin(self, *, stamps: bool = False) -> None:
        """Count from here on; note the time of each hand-off if asked to, for that takes some."""
        self._stamping = stamps
        self.taken = 0
        self.wrong = 0
        self.stamps = array("d")
        self.gaps = Gaps()
        self._cpu = time.process_time()

    def report(self) -> dict[str, Any]:
        """Return what was counted; CPU time in seconds."""
        return {
            "taken": self.taken,
            "wrong": self.wrong,
            "stamps": self.stamps,
            "gaps": self.gaps,
            "cpu": time.process_time() - self._cpu,
        }

    def take(self, number: int, features: Sequence[torch.Tensor]) -> None:
        """Look at one hand-off."""
        self.taken += 1
        if not self.first:
            self.first = time.perf_counter()
        if number & CHECKED and not self._right(number, features):
            self.wrong += 1
        if self._work:
            time.sleep(self._work)
        if self._stamping:
            self.stamps.append(time.perf_counter())

    def _right(self, number: int, features: Sequence[torch.Tensor]) -> bool:
        if self._contents is None:
            self._contents = Contents(self._setting.payload, self._setting.consumer_device)
        return self._contents.right(number, features)


async def _consume(name: str, setting: Setting, shared: Any, conn: Connection, index: int) -> None:
    seen = Seen(setting)
    loop = asyncio.get_running_loop() if setting.loop != "none" else None
    beat: list[Heartbeat] = []

    def hear(told: Told) -> None:
        """Obey in the listening thread; heartbeats start and stop on the loop."""
        what, how = told
        if what == "begin":
            seen.begin(stamps=how["stamps"])
            if loop is not None and how["beats"]:
                loop.call_soon_threadsafe(lambda: beat.append(Heartbeat()))
            conn.send(("begun", None))
        elif beat and loop is not None:
            loop.call_soon_threadsafe(stop)
        else:
            conn.send(("seen", seen.report()))

    def stop() -> None:
        seen.gaps = beat.pop().stop()
        conn.send(("seen", seen.report()))

    _listen(conn, hear)
    kind = load(name).consumer  # imports are not what connecting costs
    begin = time.perf_counter()
    async with kind(setting, index, shared) as consumer:
        conn.send(("open", time.perf_counter() - begin))
        gc.freeze()
        await consumer.consume(seen.take)
    conn.send(("closed", seen.first - begin))
