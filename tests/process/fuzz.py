"""Fuzz both ends over live sockets for as long as asked: ``python -m tests.process.fuzz``.

The victims are an exporter with an honest consumer, and a consumer; the attackers are processes
of their own, killed and replaced all the time, so that what they hold comes back.  The run fails
if a victim ends, raises what is no typed error, prints a traceback, serves the honest consumer
wrongly, or has more descriptors, threads or memory at the end than after the first rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from asyncvmm.testing import Counters, Process
from tests.process import steps
from tests.process.harness import Peers, fork_server

CONNECTIONS = 200
"""Per attacker; a fresh process takes over then, which takes about as long as twenty of them."""

MOST_THREADS = 12
"""The loop's own pool of threads grows as it likes, up to a few more than there are cores."""

MOST_GROWTH = 16 << 20
"""Bytes that a victim's memory may grow by after the first rounds."""

MOST_BLOCKS = 2_000
"""Blocks that its interpreter may have given out more, of some hundred thousand."""


FOREVER = 1e6
"""Seconds that a victim may serve: until it is told to stop."""


@dataclass
class Result:
    """What came of fuzz in one direction."""

    packets: int = 0
    connections: int = 0
    seconds: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Watch:
    """Looks at a victim at the beginning and at the end."""

    def __init__(self, victim: Process, result: Result) -> None:
        self.victim = victim
        self.result = result
        self.before: Counters | None = None
        self.blocks = 0

    async def round(self, number: int) -> None:
        """Look at it once it is warm.

        Failed connections leave cycles of exceptions and frames, and a process with as much in it
        as torch brings looks for cycles so seldom that they would be taken for a leak.
        """
        blocks = await self.victim.call(steps.blocks)
        if number == 3 or self.before is None:
            self.before, self.blocks = self.victim.counters(), blocks

    async def finish(self) -> None:
        """Note what is not as it was."""
        blocks = await self.victim.call(steps.blocks)
        after, problems = self.victim.counters(), self.result.problems
        assert self.before is not None
        if blocks - self.blocks > MOST_BLOCKS:
            problems.append(f"blocks: {self.blocks:,} became {blocks:,}")
        if after.descriptors != self.before.descriptors:
            problems.append(f"descriptors: {self.before.descriptors} became {after.descriptors}")
        if after.threads > MOST_THREADS:
            problems.append(f"{after.threads} threads")
        if after.rss - self.before.rss > MOST_GROWTH:
            problems.append(f"memory: {self.before.rss:,} became {after.rss:,} bytes")
        self.look_at_output()

    def look_at_output(self) -> None:
        """Note tracebacks, and bugs that the library itself reports."""
        bad = ("Traceback", "met a bug", "never retrieved", "Exception ignored")
        lines = self.victim.printed
        self.result.problems += [line for line in lines if any(each in line for each in bad)][:5]


async def fuzz_exporter(
    peers: Peers, folder: Path, seconds: float, seed: int, packets: int = 0
) -> Result:
    """Attack an exporter for so long, and with so many packets."""
    result, chance, began = Result(), random.Random(seed), time.monotonic()
    address = str(folder / "victim")
    victim, honest = peers.start(), peers.start()
    watch = Watch(victim, result)
    await victim.call(steps.open_exporter, address, 2)
    await honest.call(steps.connect, address, 0)
    feeds = [victim.begin_long(FOREVER, steps.feed, rank) for rank in range(2)]
    serving = honest.begin_long(FOREVER, steps.serve)
    number = 0
    while time.monotonic() - began < seconds or result.packets < packets or number < 4:
        attacker = peers.start()
        result.packets += await attacker.call(
            steps.attack, address, chance.randrange(1 << 30), CONNECTIONS
        )
        result.connections += CONNECTIONS
        await peers.end(attacker)
        await victim.call(steps.free_of, attacker.pid)
        await watch.round(number)
        number += 1
    result.seconds = time.monotonic() - began
    await watch.finish()
    await victim.call(steps.stop)
    fed = [await each for each in feeds]
    last = peers.start()  # takes what waits for the attackers' rank, so that all comes back
    await last.call(steps.connect, address, 1)
    finishing = last.begin(steps.serve)
    await victim.call(steps.leave)
    await finishing
    served = await serving
    result.ends = {"fed": fed[0], "served": served, "fed to attackers": fed[1]}
    if served != fed[0]:
        result.problems.append(f"{fed[0]} owners were sent to the honest one and {served} came")
    for peer in (victim, honest, last):
        await peers.end(peer)
    return result


async def fuzz_consumer(
    peers: Peers, folder: Path, seconds: float, seed: int, packets: int = 0
) -> Result:
    """Attack a consumer for so long, and with so many packets."""
    result, chance, began = Result(), random.Random(seed), time.monotonic()
    victim = peers.start()
    watch = Watch(victim, result)
    number = 0
    while time.monotonic() - began < seconds or result.packets < packets or number < 4:
        attacker = peers.start()
        address = str(folder / f"liar-{number}")
        posing = attacker.begin(steps.pose, address, chance.randrange(1 << 30), CONNECTIONS)
        ends = await victim.call(steps.suffer, address, CONNECTIONS)
        result.packets += await posing
        result.connections += CONNECTIONS
        for end, count in ends.items():
            result.ends[end] = result.ends.get(end, 0) + count
        await peers.end(attacker)
        await watch.round(number)
        number += 1
    result.seconds = time.monotonic() - began
    await watch.finish()
    if victim.counters().mappings:
        result.problems.append(f"{victim.counters().mappings} parts of pools are still mapped")
    await peers.end(victim)
    return result


async def both(seconds: float, seed: int) -> dict[str, Result]:
    """Attack both at once."""
    with tempfile.TemporaryDirectory(prefix="avmm-fuzz-") as name:
        folder = Path(name)
        with fork_server() as server:
            async with Peers(server, deadline=int(seconds) + 120) as peers:
                exporter, consumer = await asyncio.gather(
                    fuzz_exporter(peers, folder, seconds, seed),
                    fuzz_consumer(peers, folder, seconds, seed + 1),
                )
    return {"exporter": exporter, "consumer": consumer}


def report(results: dict[str, Result]) -> int:
    """Write what came of it; return the exit status."""
    status = 0
    for victim, result in results.items():
        rate = result.packets / result.seconds * 60
        ends = ", ".join(f"{count:,} {end}" for end, count in sorted(result.ends.items()))
        sys.stdout.write(
            f"{victim}: {result.packets:,} packets in {result.connections:,} connections, "
            f"{rate:,.0f} a minute; {ends}\n"
        )
        for problem in result.problems:
            sys.stdout.write(f"  PROBLEM {problem}\n")
            status = 1
    return status


def main() -> int:
    """Read the options and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    return report(asyncio.run(both(options.seconds, options.seed)))


if __name__ == "__main__":
    sys.exit(main())
