"""A long steady stream of small owners from one process to another, looked at ten times."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from asyncvmm.testing import Counters, Process
from tests.process import steps
from tests.process.harness import Peers
from tests.process.puppet import Me
from tests.soak.report import Look, Report

CHUNK = 2_000
"""Owners between two looks at the clock."""

WARM = 5 * CHUNK
"""Owners before anything is compared: caches fill, and allocators find their size."""

ALONE = 20
"""Owners that are timed one by one after each chunk."""

MOST_GROWTH = 1 << 20
"""Bytes by which a process may be larger after the last tenth than after the first."""

MOST_BLOCKS = 1_000
"""Blocks that the interpreter may have given out more, of some hundred thousand."""

MOST_SLOWER = 2.0
"""How many times as long as in the first tenth a hand-off by itself may take in the last one."""

MOST_WORK = 2.0
"""The same for processor time per owner, which others change less."""


class Clock(Protocol):
    """Says when a lane may end."""

    @property
    def share(self) -> float:
        """How much of the time is over, from 0 to 1."""


class Stream:
    """One exporter, one consumer, and what was seen of them."""

    def __init__(
        self, peers: Peers, clock: Clock, report: Report, owners: int, *, alone: bool
    ) -> None:
        self.exporter = peers.start()
        self.consumer = peers.start()
        self.clock = clock
        self.least = owners
        self.by_itself = alone
        """Whether no other lane takes processor time, so that times may be compared."""
        self.report = report
        self._began = time.monotonic()

    @property
    def owners(self) -> int:
        """How many were sent."""
        return self.report.owners

    @property
    def looks(self) -> list[Look]:
        """What was seen at the end of each tenth."""
        return self.report.stream

    @property
    def ends(self) -> dict[str, Process]:
        """Both processes by name."""
        return {"exporter": self.exporter, "consumer": self.consumer}

    @property
    def share(self) -> float:
        """How much of it is done: as much of the time, and of the owners."""
        return min(self.clock.share, self.owners / self.least if self.least else 1.0)

    async def run(self) -> list[str]:
        """Send until time and owners are used up; return what is wrong."""
        await self.exporter.call(
            steps.open_exporter, "stream", 1, {"slots": 64, "pool_bytes": "256KiB"}
        )
        await self.consumer.call(steps.connect, "stream", 0)
        reading = self.consumer.begin_long(1e6, steps.read_stream)
        await self._send(steps.stream, WARM)
        tenth = Tenth(self)
        while self.share < 1 or not self.looks:
            tenth.in_flight += await self._send(steps.stream, CHUNK)
            tenth.alone += await self._send(steps.stream_alone, ALONE)
            if reading.done():
                await reading
            if self.share >= (len(self.looks) + 1) / 10:
                self.looks.append(await tenth.look())
                tenth = Tenth(self)
        await self.exporter.call(steps.leave)
        problems = compare_counters(self.looks[0], self.looks[-1])
        if self.by_itself:
            problems += compare_times(self.looks[0], self.looks[-1])
        if (came := await reading) != self.owners:
            problems.append(f"{self.owners:,} were sent and {came:,} came")
        return problems

    async def _send(
        self, step: Callable[[Me, int], Awaitable[list[float]]], count: int
    ) -> list[float]:
        took = await self.exporter.call(step, count)
        self.report.owners += count
        return took


class Tenth:
    """What is measured over one tenth, from now until it is looked at."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.in_flight: list[float] = []
        self.alone: list[float] = []
        self._owners = stream.owners
        self._began = time.monotonic()
        self._cpu = {name: cpu_seconds(peer.pid) for name, peer in stream.ends.items()}

    async def look(self) -> Look:
        """Return everything now."""
        stream, now = self.stream, time.monotonic()
        count = stream.owners - self._owners
        cpu = {
            name: (cpu_seconds(peer.pid) - self._cpu[name]) / count * 1e6
            for name, peer in stream.ends.items()
        }
        blocks = {name: await peer.call(steps.blocks) for name, peer in stream.ends.items()}
        found = {name: Counters.of(peer.pid) for name, peer in stream.ends.items()}
        return Look(
            owners=stream.owners,
            seconds=now - stream._began,
            per_second=count / (now - self._began),
            alone_p10=statistics.quantiles(self.alone, n=100)[9],
            alone_p50=statistics.median(self.alone),
            alone_p99=statistics.quantiles(self.alone, n=100)[98],
            in_flight_p50=statistics.median(self.in_flight),
            in_flight_p99=statistics.quantiles(self.in_flight, n=100)[98],
            cpu_us=cpu,
            load=os.getloadavg()[0],
            descriptors={name: dict(each.descriptors) for name, each in found.items()},
            mappings={name: each.mappings for name, each in found.items()},
            threads={name: each.threads for name, each in found.items()},
            rss={name: each.rss for name, each in found.items()},
            blocks=blocks,
        )


def compare_counters(first: Look, last: Look) -> list[str]:
    """Say what a process has after the last tenth that it had not after the first."""
    problems = [
        f"stream: {what} were {before}, became {after}"
        for what in ("descriptors", "mappings", "threads")
        if (before := getattr(first, what)) != (after := getattr(last, what))
    ]
    for what, most in (("rss", MOST_GROWTH), ("blocks", MOST_BLOCKS)):
        for who, before in getattr(first, what).items():
            if (after := getattr(last, what)[who]) - before > most:
                problems.append(f"stream: {what} of the {who} grew from {before:,} to {after:,}")
    return problems


def compare_times(first: Look, last: Look) -> list[str]:
    """Say what takes longer in the last tenth than it took in the first.

    Others use the machine, too.  So of hand-offs by themselves the quickest tenth is compared,
    which nobody interrupted, and not the median.  With many in flight the time is the number of
    slots divided by the throughput, which is others' doing as well; processor time per owner is
    not.
    """
    problems = []
    if last.alone_p10 > MOST_SLOWER * first.alone_p10:
        took = f"{first.alone_p10 * 1e6:,.0f} us, became {last.alone_p10 * 1e6:,.0f}"
        problems.append(f"stream: a hand-off by itself took {took}")
    problems += [
        f"stream: the {who} used {before:.0f} us of CPU for an owner, then {last.cpu_us[who]:.0f}"
        for who, before in first.cpu_us.items()
        if last.cpu_us[who] > MOST_WORK * before
    ]
    return problems


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
