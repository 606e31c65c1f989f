"""Hours of use in minutes: ``python -m tests.process.soak --minutes 5``.

Four things go on at once, each in processes of its own:

* a steady stream of small owners from one exporter to two ranks, looked at ten times;
* chaos: mixed sizes and routes, a growing pool, cancels, stops, reconnects, and kills of either
  end or both at random moments;
* fuzz of an exporter, and fuzz of a consumer (see ``fuzz``).

The run fails if anything of what the tests assert does not hold, or if the last tenth of the
stream has more descriptors, mappings, threads or memory than the first.  It writes a short text,
and with ``--report`` a JSON file with all numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.process import fuzz, steps
from tests.process.chaos import MISHAPS, Chaos
from tests.process.counters import Counters
from tests.process.harness import Nursery, Peer, Peers

CHUNK = 2_000
"""Owners of the stream between two looks at the clock."""

MOST_GROWTH = 8 << 20
"""Bytes that a process of the stream may grow by from the first tenth to the last."""


@dataclass
class Look:
    """The stream at one moment."""

    owners: int
    seconds: float
    descriptors: dict[str, dict[str, int]]
    mappings: dict[str, int]
    threads: dict[str, int]
    rss: dict[str, int]
    p50: float
    """Of what was timed since the look before, in seconds."""
    p99: float


@dataclass
class Report:
    """All that a run found."""

    seed: int
    minutes: float
    owners: int = 0
    seconds: float = 0.0
    stream: list[Look] = field(default_factory=list)
    chaos: dict[str, int] = field(default_factory=dict)
    fuzz: dict[str, fuzz.Result] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How many processes were killed on purpose."""
        return sum(count for what, count in self.chaos.items() if what.startswith("kill"))

    def text(self) -> str:
        """Return it for people."""
        lines = [
            f"soak: seed {self.seed}, {self.seconds:.0f} s",
            f"stream: {self.owners:,} owners to 2 ranks",
        ]
        for look in (self.stream[0], self.stream[-1]) if self.stream else ():
            rss = ", ".join(f"{who} {size >> 20} MiB" for who, size in look.rss.items())
            lines.append(
                f"  at {look.owners:,}: p50 {look.p50 * 1e3:.2f} ms, p99 {look.p99 * 1e3:.2f} ms, "
                f"{rss}, descriptors {sum(look.descriptors['exporter'].values())}"
            )
        what = ", ".join(f"{count} {name}" for name, count in sorted(self.chaos.items()))
        lines.append(f"chaos: {self.kills} kills ({what})")
        for victim, result in self.fuzz.items():
            rate = result.packets / max(result.seconds, 0.001) * 60
            lines.append(f"fuzz of the {victim}: {result.packets:,} packets, {rate:,.0f} a minute")
        lines += [f"PROBLEM {problem}" for problem in self.problems]
        lines.append("FAILED" if self.problems else "all counters are flat")
        return "\n".join(lines) + "\n"


class Soak:
    """One run."""

    def __init__(self, peers: Peers, folder: Path, minutes: float, owners: int, seed: int) -> None:
        self.peers = peers
        self.folder = folder
        self.began = time.monotonic()
        self.end = self.began + minutes * 60
        self.owners = owners
        self.chance = random.Random(seed)
        self.report = Report(seed, minutes)

    @property
    def time_left(self) -> float:
        """Seconds; 0 when it is over."""
        return max(0.0, self.end - time.monotonic())

    async def run(self) -> Report:
        """Do everything at once; a lane that fails ends alone."""
        report = self.report
        seeds = [self.chance.randrange(1 << 30) for _ in range(3)]
        await asyncio.gather(
            self.lane("stream", self.stream()),
            self.lane("chaos", self.chaos(random.Random(seeds[0]))),
            self.lane("fuzz", self.fuzz("exporter", fuzz.fuzz_exporter, seeds[1])),
            self.lane("fuzz", self.fuzz("consumer", fuzz.fuzz_consumer, seeds[2])),
        )
        report.seconds = time.monotonic() - self.began
        return report

    async def lane(self, name: str, work: Awaitable[None]) -> None:
        """Do one thing, and note how it failed."""
        try:
            await work
        except Exception as error:
            self.report.problems.append(f"{name}: {type(error).__name__}: {error}")

    async def fuzz(self, victim: str, attack: Any, seed: int) -> None:
        """Fuzz one victim for as long as there is time."""
        result = await attack(self.peers, self.folder, self.time_left, seed)
        self.report.fuzz[victim] = result
        self.report.problems += [f"fuzz of the {victim}: {problem}" for problem in result.problems]

    async def chaos(self, chance: random.Random) -> None:
        """Have things happen to ever new exporters and consumers."""
        happened = Counter[str]()
        turn = 0
        while self.time_left or not turn:
            turn += 1
            options = {
                "slots": chance.choice([4, 8, 32]),
                "pool_bytes": chance.choice(["128KiB", "256KiB", "1MiB"]),
                "max_pool_bytes": "4MiB",
                "shrink_after": 0.05,
                "debug": chance.random() < 0.3,
            }
            ranks = chance.choice([0, 2])
            chaos = Chaos(
                self.peers, ranks, chance, name=f"chaos-{turn}", options=options, wild=True
            )
            await chaos.open()
            for _ in range(chance.randrange(10, 40)):
                await chaos.happen(chance.choice(MISHAPS))
                if not self.time_left:
                    break
            await chaos.finish()
            happened += chaos.happened
            self.report.chaos = dict(happened)

    # -- the stream --------------------------------------------------------------------------

    async def stream(self) -> None:
        """Send until time and owners are used up, and look at it ten times on the way."""
        exporter, *ranks = who = [self.peers.start() for _ in range(3)]
        await exporter.call(steps.open_exporter, "stream", 2, {"slots": 64, "pool_bytes": "256KiB"})
        for rank, peer in enumerate(ranks):
            await peer.call(steps.connect, "stream", rank)
        reading = [peer.begin_long(1e6, steps.read_stream) for peer in ranks]
        took: list[float] = []
        looks = 0
        await exporter.call(steps.stream, 2 * CHUNK)  # warm
        self.report.owners = 2 * CHUNK
        while self.time_left or self.report.owners < self.owners:
            took += await exporter.call(steps.stream, CHUNK)
            self.report.owners += CHUNK
            for task in reading:
                if task.done():
                    await task
            if self.done_share() >= (looks + 1) / 10:
                looks += 1
                self.look(who, took)
                took.clear()
        if took or not self.report.stream:
            self.look(who, took or [0.0])
        await exporter.call(steps.leave)
        assert [await task for task in reading] == [self.report.owners] * 2
        self.compare()

    def done_share(self) -> float:
        """Return how much of the stream is done, from 0 to 1."""
        total = self.end - self.began
        by_time = 1 - self.time_left / total if total else 1.0
        by_owners = self.report.owners / self.owners if self.owners else 1.0
        return min(by_time, by_owners)

    def look(self, who: list[Peer], took: list[float]) -> None:
        """Count everything now."""
        names = ["exporter", "rank 0", "rank 1"]
        found = [Counters.of(peer.pid) for peer in who]
        cuts = statistics.quantiles(took, n=100) if len(took) > 1 else [took[0]] * 99
        self.report.stream.append(
            Look(
                owners=self.report.owners,
                seconds=time.monotonic() - self.began,
                descriptors={n: dict(c.descriptors) for n, c in zip(names, found, strict=True)},
                mappings={n: c.mappings for n, c in zip(names, found, strict=True)},
                threads={n: c.threads for n, c in zip(names, found, strict=True)},
                rss={n: c.rss for n, c in zip(names, found, strict=True)},
                p50=cuts[49],
                p99=cuts[98],
            )
        )

    def compare(self) -> None:
        """Note what is not in the last look as it was in the first."""
        first, last = self.report.stream[0], self.report.stream[-1]
        for name in ("descriptors", "mappings", "threads"):
            if getattr(first, name) != getattr(last, name):
                self.report.problems.append(
                    f"stream: {name} were {getattr(first, name)}, became {getattr(last, name)}"
                )
        for who, size in last.rss.items():
            if size - first.rss[who] > MOST_GROWTH:
                self.report.problems.append(
                    f"stream: the {who} grew from {first.rss[who]:,} to {size:,} bytes"
                )


async def soak(minutes: float, owners: int, seed: int) -> Report:
    """Run it in a folder of its own, of which nothing may be left."""
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="avmm-soak-") as name:
        folder = Path(name)
        os.environ["XDG_RUNTIME_DIR"] = name
        nursery = Nursery(folder)
        before = Counters.of().descriptors
        try:
            async with Peers(nursery, folder, deadline=int(minutes * 60) + 36_000) as peers:
                report = await Soak(peers, folder, minutes, owners, seed).run()
        finally:
            nursery.close()
        names = os.listdir(folder / "asyncvmm")
    if names:
        report.problems.append(f"names were left in the socket folder: {names}")
    if left := [n for n in set(os.listdir("/dev/shm")) - shared if "asyncvmm" in n]:
        report.problems.append(f"names were left in shared memory: {left}")
    if (after := Counters.of().descriptors)["socket"] > before["socket"]:
        report.problems.append(f"the soak itself has {after['socket']} sockets left")
    return report


def main() -> int:
    """Read the options, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--owners", type=int, default=0, help="go on until the stream had so many")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--report", type=Path, help="where to write all numbers as JSON")
    options = parser.parse_args()
    report = asyncio.run(soak(options.minutes, options.owners, options.seed))
    sys.stdout.write(report.text())
    if options.report:
        numbers = dataclasses.asdict(report) | {"kills": report.kills}
        options.report.write_text(json.dumps(numbers, indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
