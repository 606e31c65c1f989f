"""Hours of use in minutes: ``python -m tests.soak --minutes 5 --kills 500``.

Four lanes run at once, each in processes of its own:

* stream: small owners from one process to another, looked at ten times;
* chaos: mixed sizes and routes, pools that grow and shrink, cancels, stops, reconnects, and kills
  of either end or both at random moments;
* fuzz of an exporter, and fuzz of a consumer (see ``tests.process.fuzz``).

Each lane goes on until the minutes are over *and* it has done what was asked of it: so many owners,
kills, or packets.  The run fails if anything does not hold that the tests assert, or if the last
tenth of the stream is not like the first.  ``--only stream --owners 5000000`` is the long run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from asyncvmm.testing import Counters
from tests.process import fuzz
from tests.process.chaos import MISHAPS, Chaos, ReconnectingChaos
from tests.process.harness import Peers, fork_server
from tests.soak.report import Report
from tests.soak.stream import Stream

LANES = ("stream", "chaos", "fuzz-exporter", "fuzz-consumer")
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

PACKETS = 100_000
"""Fuzzed packets each way for every minute that was asked for."""


class Soak:
    """One run."""

    def __init__(
        self, peers: Peers, folder: Path, options: argparse.Namespace, console: Console
    ) -> None:
        self.peers = peers
        self.folder = folder
        self.options = options
        self.console = console
        self.began = time.monotonic()
        self.report = Report(options.seed, options.loop, options.minutes)

    @property
    def share(self) -> float:
        """How much of the time is over, from 0 to 1."""
        seconds = self.options.minutes * 60
        return min(1.0, (time.monotonic() - self.began) / seconds) if seconds else 1.0

    async def run(self) -> Report:
        """Do everything at once, until the first lane fails; Ctrl-C still has a report."""
        chance = random.Random(self.options.seed)
        seeds = [chance.randrange(1 << 30) for _ in range(3)]
        lanes: dict[str, Coroutine[Any, Any, None]] = {
            "stream": self.stream(),
            "chaos": self.chaos(random.Random(seeds[0])),
            "fuzz-exporter": self.fuzz("exporter", fuzz.fuzz_exporter, seeds[1]),
            "fuzz-consumer": self.fuzz("consumer", fuzz.fuzz_consumer, seeds[2]),
        }
        chosen = [self.lane(name, lanes.pop(name)) for name in self.options.only or LANES]
        for left in lanes.values():
            left.close()
        telling = asyncio.create_task(self.tell())
        running = {asyncio.ensure_future(each) for each in chosen}
        try:
            while running and not self.report.problems:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.report.problems.append("it was interrupted")
        for task in (telling, *running):
            task.cancel()
        await asyncio.wait((telling, *running))
        self.report.seconds = time.monotonic() - self.began
        return self.report

    async def tell(self) -> None:
        """Say on a terminal how far it is."""
        with self.console.status("") as line:
            while True:
                seconds = time.monotonic() - self.began
                problems = f", {len(found)} PROBLEMS" if (found := self.report.problems) else ""
                line.update(
                    f"{seconds:,.0f} s: {self.report.owners:,} owners, {self.report.kills} kills"
                    f"{problems}"
                )
                await asyncio.sleep(1)

    async def lane(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do one thing, and note how it failed."""
        try:
            await work
        except Exception as error:
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            self.report.problems.append(f"{name}: {type(error).__name__}: {error}{notes}")

    async def stream(self) -> None:
        """Stream for as long as there is time, and at least so many owners."""
        alone = self.options.only == ["stream"]
        stream = Stream(self.peers, self, self.report, self.options.owners, alone=alone)
        self.report.problems += await stream.run()

    async def fuzz(self, victim: str, attack: Any, seed: int) -> None:
        """Fuzz one victim for as long as there is time, and with at least so many packets."""
        left = self.options.minutes * 60 - (time.monotonic() - self.began)
        packets = int(PACKETS * self.options.minutes)
        result = await attack(self.peers, self.folder, left, seed, packets)
        self.report.fuzz[victim] = result
        self.report.problems += [f"fuzz of the {victim}: {problem}" for problem in result.problems]

    async def chaos(self, chance: random.Random) -> None:
        """Have things happen to ever new exporters and consumers, and at least so many kills."""
        happened, pools = Counter[str](), Counter[str]()
        turn = 0
        while not self.enough() or not turn:
            turn += 1
            options = {
                "slots": chance.choice([4, 8, 32]),
                "pool_bytes": chance.choice(["128KiB", "256KiB", "1MiB"]),
                "max_pool_bytes": "4MiB",
                "shrink_after": 0.05,
                "debug": chance.random() < 0.3,
            }
            ranks = chance.choice([0, 2])
            kind = chance.choice([Chaos, ReconnectingChaos])
            chaos = kind(
                self.peers, ranks, chance, name=f"chaos-{turn}", options=options, wild=True
            )
            await chaos.open()
            for _ in range(chance.randrange(10, 40)):
                await chaos.happen(chance.choice(MISHAPS))
                happened[chaos.last] += 1
                self.report.chaos = dict(happened)
                if self.enough():
                    break
            await chaos.finish()
            pools += chaos.pools
            self.report.slowest = max(self.report.slowest, chaos.slowest)
            self.report.pools = dict(pools)

    def enough(self) -> bool:
        """Say whether chaos has had its time and its kills."""
        return self.share == 1 and self.report.kills >= self.options.kills


async def soak(options: argparse.Namespace, console: Console) -> Report:
    """Run it in a folder of its own, of which nothing may be left."""
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="avmm-soak-") as name:
        folder = Path(name)
        os.environ["XDG_RUNTIME_DIR"] = name
        with fork_server() as server:
            before = Counters.of().descriptors
            async with Peers(server, deadline=100 * 3600) as peers:
                report = await Soak(peers, folder, options, console).run()
            after = Counters.of().descriptors
        names = os.listdir(folder / "asyncvmm") if (folder / "asyncvmm").exists() else []
    if names:
        report.problems.append(f"names were left in the socket folder: {names}")
    if left := [n for n in set(os.listdir("/dev/shm")) - shared if "asyncvmm" in n]:
        report.problems.append(f"names were left in shared memory: {left}")
    if after - before:
        report.problems.append(f"the soak itself had {before} and has {after}")
    return report


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="least time (default 5)")
    parser.add_argument("--kills", type=int, default=0, help="least number of kills")
    parser.add_argument("--owners", type=int, default=0, help="least number of streamed owners")
    parser.add_argument("--only", choices=LANES, action="append", help="this lane; may be repeated")
    parser.add_argument("--loop", choices=LOOPS, default="asyncio")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--report", type=Path, help="where to write all numbers as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, report; return the exit status."""
    chosen, console = options(arguments), Console()
    with asyncio.Runner(loop_factory=LOOPS[chosen.loop]) as runner:
        report = runner.run(soak(chosen, console))
    report.show(console)
    if chosen.report:
        report.write(chosen.report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
