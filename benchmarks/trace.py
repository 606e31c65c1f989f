"""What a first and a steady hand-off on a GPU ask of the driver, and what the watcher costs.

``python -m benchmarks trace --device cuda:0 --json OUT``.  Calls are counted by standing before
the bindings in both processes, so counting slows them.  Of a first connection it says how long
the calls took: some take milliseconds, beside which the counting is nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import asyncvmm
import benchmarks.transports.ours  # noqa: F401 - it imports what connecting would import first
from benchmarks.setting import MIB

HANDOFFS = 100
_WARM_UP = 256


class Calls:
    """Counts and times the driver calls of this process, by name, while it is told to."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.counting = False
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._since = 0.0
        for name in dir(driver):
            call = getattr(driver, name)
            if name.startswith("cu") and callable(call) and not isinstance(call, type):
                setattr(driver, name, self._counted(name, call))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: object) -> Any:
            if not self.counting:
                return call(*args)
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.counts[name] += 1
                took = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took

        return counted

    def begin(self) -> None:
        """Count and time from now on, from nothing."""
        self.counts.clear()
        self.seconds.clear()
        self.counting = True
        self._since = time.perf_counter()

    def end(self) -> dict[str, Any]:
        """Count no more; return how long that was, and each call's number and milliseconds."""
        self.counting = False
        return {
            "ms": _milliseconds(time.perf_counter() - self._since),
            "calls": {
                name: {"count": self.counts[name], "ms": _milliseconds(seconds)}
                for name, seconds in sorted(self.seconds.items(), key=lambda each: -each[1])
            },
        }

    def per_handoff(self) -> dict[str, float]:
        """Return the mean of what was counted."""
        return {name: count / HANDOFFS for name, count in self.counts.items() if count}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


async def _consume(name: str, device: str, conn: Connection) -> None:
    calls = Calls()
    torch.cuda.set_device(torch.device(device))
    torch.zeros(1, device=device)  # a context is not what connecting costs
    conn.send("ready")
    calls.begin()
    first: dict[str, Any] = {}
    async with asyncvmm.connect(name, rank=0, device=device, wait=True) as consumer:
        async for batch in consumer:
            for owner in batch:
                if owner.metadata == "count":
                    calls.begin()
                view = owner["x"]
                owner.release()
                if owner.metadata == "first":
                    first = calls.end()
                if owner.metadata == "last":
                    calls.counting = False
                del view
    conn.send((first, calls.per_handoff()))


def _consumer(name: str, device: str, conn: Connection) -> None:
    asyncio.run(_consume(name, device, conn))


async def _handoffs(device: str, consumer_device: str) -> dict[str, Any]:
    calls = Calls()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    source = torch.ones(2 * MIB, dtype=torch.uint8, device=device)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        name = str(Path(folder) / "exporter")
        process = context.Process(target=_consumer, args=(name, consumer_device, theirs))
        process.start()
        await asyncio.to_thread(ours.recv)
        calls.begin()
        async with asyncvmm.open_exporter(
            name, device=device, pool_bytes=128 * MIB, slots=64
        ) as exporter:
            await exporter.wait_attached(1)
            await (await exporter.send({"x": source}, metadata="first"))
            first = calls.end()
            for _ in range(_WARM_UP):
                await (await exporter.send({"x": source}))
            calls.begin()
            with _profile() as profile:
                for turn in range(HANDOFFS):
                    metadata = "count" if not turn else "last" if turn == HANDOFFS - 1 else None
                    await (await exporter.send({"x": source}, metadata=metadata))
            calls.counting = False
        their_first, theirs_counted = await asyncio.to_thread(ours.recv)
        await asyncio.to_thread(process.join)
    # The profiler itself synchronises the device once, at its end.
    runtime = {
        event.key: event.count / HANDOFFS
        for event in profile.key_averages()
        if event.key.startswith("cu") or "Synchronize" in event.key
    }
    return {
        "first_connection": {"exporter": first, "consumer": their_first},
        "driver_calls_per_handoff": {
            "exporter": calls.per_handoff(),
            "exporter_torch_runtime": runtime,
            "consumer": theirs_counted,
        },
    }


def _profile() -> torch.profiler.profile:
    """See what torch asks of the runtime, which does not go through the bindings."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=activities)


async def _watcher(device: str) -> dict[str, float]:
    """Return the percentage of a core used with nothing pending, and with one fence for 5 s."""
    spec = {"x": asyncvmm.TensorSpec((16,), torch.uint8)}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        name = str(Path(folder) / "exporter")
        async with asyncvmm.open_exporter(name, device=device, pool_bytes=4 * MIB, slots=2) as e:
            async with e.reserve(spec):
                pass
            await asyncio.sleep(0.5)
            idle = await _share(2.0)
            async with e.reserve(spec):
                for _ in range(60):
                    torch.cuda._sleep(150_000_000)  # about 0.1 s each: some 6 s in all
            pending = await _share(5.0)
            torch.cuda.synchronize()
    return {"idle_percent": round(idle * 100, 2), "pending_percent": round(pending * 100, 2)}


async def _share(seconds: float) -> float:
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def trace(device: str, consumer_device: str) -> dict[str, Any]:
    """Return the driver calls of a first and a later hand-off of 2 MiB, and the watcher's cost."""
    handoffs = asyncio.run(_handoffs(device, consumer_device))
    return {**handoffs, "watcher": asyncio.run(_watcher(device))}
