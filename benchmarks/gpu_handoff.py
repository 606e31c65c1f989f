"""GPU hand-offs beside their floor, in one run: ``python -m benchmarks.gpu_handoff --json OUT``.

Rounds of the library and of :mod:`benchmarks.floor` take turns, ratios are taken per round, and
medians with their spread are reported.  It also lists and counts the driver calls of one
hand-off in steady state, and what the fence watcher costs when nothing happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvloop

import asyncvmm
from asyncvmm._backends import driver
from benchmarks.floor import Floor, quantile
from benchmarks.measures import Counting, Heartbeat, machine, spread

KIB, MIB = 1 << 10, 1 << 20
SLOTS = 64


async def consume(name: str, device: str) -> None:
    """Take every owner, make a view of it, release it; count driver calls when told to."""
    async with asyncvmm.connect(name, rank=0, device=device, wait=True) as consumer:
        counting: Counting | None = None
        real = driver.load()
        async for batch in consumer:
            for owner in batch:
                view = owner["x"]
                if owner.metadata == "count":
                    counting = Counting(real)
                    driver._loaded = counting
                elif owner.metadata == "report" and counting is not None:
                    driver._loaded = real
                    sys.stdout.write(json.dumps(counting.calls) + "\n")
                    sys.stdout.flush()
                owner.release()
                del view


async def closed_loop(
    exporter: asyncvmm.Exporter, source: torch.Tensor | None, rounds: int, spec: Any
) -> list[float]:
    """Return the seconds of each hand-off and acknowledgement, one in flight."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        await (await hand_over(exporter, source, spec))
        times.append(time.perf_counter() - begin)
    return times


async def hand_over(
    exporter: asyncvmm.Exporter, source: torch.Tensor | None, spec: Any
) -> asyncvmm.Acknowledgement:
    """Send a copy, or reserve and publish without one."""
    if source is not None:
        return await exporter.send({"x": source})
    async with exporter.reserve(spec) as owner:
        return owner.publish()


async def pipelined(
    exporter: asyncvmm.Exporter, source: torch.Tensor | None, rounds: int, spec: Any
) -> float:
    """Return the seconds of ``rounds`` hand-offs with every slot in flight."""
    begin = time.perf_counter()
    for _ in range(rounds):
        await hand_over(exporter, source, spec)
    await exporter.drain()
    return time.perf_counter() - begin


async def compare(device: str, loop: str, rounds: int) -> list[dict[str, Any]]:
    """Run every workload against the floor."""
    rows = []
    peer = torch.device(device).index
    for nbytes, copies in ((16 * KIB, True), (2 * MIB, True), (16 * KIB, False), (36 * MIB, False)):
        name = f"bench-{uuid.uuid4().hex}"
        consumer = start(name, device, loop)
        floor = Floor(nbytes, SLOTS, 0, peer)
        source = torch.ones(nbytes, dtype=torch.uint8, device="cuda:0") if copies else None
        spec = {"x": asyncvmm.TensorSpec((nbytes,), torch.uint8)}
        closed: list[dict[str, float]] = []
        rate: list[dict[str, float]] = []
        async with asyncvmm.open_exporter(
            name, device="cuda:0", pool_bytes=nbytes * SLOTS, slots=SLOTS
        ) as exporter:
            await exporter.wait_attached(1)
            await pipelined(exporter, source, 4 * SLOTS, spec)
            gaps: list[float] = []
            for _ in range(rounds):
                base = floor.closed_loop(source, 200)
                ours = await closed_loop(exporter, source, 200, spec)
                closed.append({"floor": quantile(base, 0.5), "ours": quantile(ours, 0.5)})
                slow = floor.pipelined(source, 1000)
                heartbeat = Heartbeat()
                fast = await pipelined(exporter, source, 1000, spec)
                gaps += await heartbeat.stop()
                rate.append({"floor": 1000 / slow, "ours": 1000 / fast})
            gap = sorted(gaps)[int(len(gaps) * 0.99)] * 1e3
            calls = await count_calls(exporter, source, spec) if nbytes == 2 * MIB else {}
        floor.close()
        output, _ = consumer.communicate()
        if calls:
            seen = json.loads(output.strip().splitlines()[-1])
            calls["consumer_driver_calls_per_handoff"] = {k: v / 101 for k, v in seen.items()}
        rows.append(
            {
                "workload": f"{'send' if copies else 'reserve'}_{nbytes // KIB}KiB",
                "consumer": device,
                "loop": loop,
                "closed_p50_us": spread([c["ours"] for c in closed]),
                "floor_closed_p50_us": spread([c["floor"] for c in closed]),
                "closed_ratio": spread([c["ours"] / c["floor"] for c in closed]),
                "pipelined_per_s": spread([r["ours"] for r in rate]),
                "floor_pipelined_per_s": spread([r["floor"] for r in rate]),
                "pipelined_ratio": spread([r["ours"] / r["floor"] for r in rate]),
                "loop_gap_p99_ms": round(gap, 3),
                **calls,
            }
        )
    return rows


async def count_calls(
    exporter: asyncvmm.Exporter, source: torch.Tensor | None, spec: Any
) -> dict[str, Any]:
    """Count the driver calls of 100 hand-offs on each side, and torch's own on this one."""
    assert source is not None
    real = driver.load()
    await (await exporter.send({"x": source}, metadata="count"))
    counting = Counting(real)
    driver._loaded = counting
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(100):
            await (await exporter.send({"x": source}))
    driver._loaded = real
    await (await exporter.send({"x": source}, metadata="report"))
    runtime = {
        event.key: event.count / 100
        for event in profile.key_averages()
        if event.key.startswith("cu") or "Synchronize" in event.key
    }
    return {
        "exporter_driver_calls_per_handoff": {k: v / 100 for k, v in counting.calls.items()},
        "exporter_torch_runtime_calls_per_handoff": runtime,
    }


async def watcher_cost(device: str, loop: str) -> dict[str, float]:
    """Return the share of a core used with nothing pending, and with one fence for 5 s."""
    name = f"bench-{uuid.uuid4().hex}"
    async with asyncvmm.open_exporter(name, device="cuda:0", pool_bytes="4MiB", slots=2) as e:
        async with e.reserve({"x": asyncvmm.TensorSpec((16,), torch.uint8)}):
            pass
        await asyncio.sleep(0.5)
        idle = await share(2.0)
        async with e.reserve({"x": asyncvmm.TensorSpec((16,), torch.uint8)}):
            for _ in range(60):
                torch.cuda._sleep(150_000_000)  # about 0.1 s each: some 6 s in all
        pending = await share(5.0)
        torch.cuda.synchronize()
    return {"idle_percent": round(idle * 100, 2), "pending_percent": round(pending * 100, 2)}


async def share(seconds: float) -> float:
    """Return this process's CPU time over wall time."""
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def start(name: str, device: str, loop: str) -> subprocess.Popen[str]:
    """Start the consumer."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_handoff", "--consume", name, device, "--loop", loop],
        stdout=subprocess.PIPE,
        text=True,
    )


def run(loop: str, work: Callable[[], Any]) -> Any:
    """Run a coroutine function on the chosen loop."""
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work())


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--consume", nargs=2)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--consumer-device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.consume:
        name, device = options.consume
        torch.cuda.set_device(torch.device(device))
        run(options.loop, lambda: consume(name, device))
        return
    rows = run(options.loop, lambda: compare(options.consumer_device, options.loop, options.rounds))
    cost = run(options.loop, lambda: watcher_cost(options.consumer_device, options.loop))
    result = {"machine": machine(), "watcher": cost, "rows": rows}
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
