"""What a soak found: a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.process import fuzz


@dataclass
class Look:
    """The stream at the end of one tenth, everything sent being back."""

    owners: int
    seconds: float
    per_second: float
    """Owners, in this tenth."""
    alone_p10: float
    """From ``send`` to the acknowledgement with nothing else in flight, in seconds."""
    alone_p50: float
    alone_p99: float
    in_flight_p50: float
    """The same with as many in flight as there are slots, over this tenth."""
    in_flight_p99: float
    cpu_us: dict[str, float]
    """Processor time per owner in this tenth, in microseconds, by process."""
    load: float
    """The machine's load average at its end: how many wanted a processor."""
    descriptors: dict[str, dict[str, int]]
    mappings: dict[str, int]
    threads: dict[str, int]
    rss: dict[str, int]
    """Private bytes that are present."""
    blocks: dict[str, int]
    """What the interpreter's allocator has given out and not got back."""


@dataclass
class Report:
    """All that a run found."""

    seed: int
    loop: str
    minutes: float
    about: dict[str, Any] = field(default_factory=lambda: about())
    seconds: float = 0.0
    owners: int = 0
    stream: list[Look] = field(default_factory=list)
    chaos: dict[str, int] = field(default_factory=dict)
    slowest: float = 0.0
    """The longest that it took until everything of a dead consumer was back, in seconds."""
    pools: dict[str, int] = field(default_factory=dict)
    """What the exporters of chaos did that ended in order, added up."""
    fuzz: dict[str, fuzz.Result] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How often something was killed on purpose; both ends at once count once."""
        return sum(count for what, count in self.chaos.items() if what.startswith("kill"))

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        numbers = asdict(self) | {"kills": self.kills}
        path.write_text(json.dumps(numbers, indent=1) + "\n")

    def show(self, console: Console) -> None:
        """Print it."""
        console.print(f"soak: seed {self.seed}, {self.loop}, {self.seconds:,.0f} s")
        if self.stream:
            console.print(latency_table(self.stream))
            for who in self.stream[0].rss:
                console.print(counters_table(self.stream, who))
        if self.chaos:
            what = ", ".join(f"{count} {name}" for name, count in sorted(self.chaos.items()))
            console.print(f"chaos: {self.kills} kills ({what})")
            what = ", ".join(f"{count:,} {name}" for name, count in self.pools.items())
            console.print(
                f"everything of a dead one was back in {self.slowest * 1e3:.0f} ms or less"
            )
            console.print(f"pools that ended in order: {what}")
        for victim, result in self.fuzz.items():
            rate = result.packets / max(result.seconds, 0.001) * 60
            console.print(
                f"fuzz of the {victim}: {result.packets:,} packets in {result.connections:,} "
                f"connections, {rate:,.0f} a minute"
            )
        for problem in self.problems:
            console.print(f"PROBLEM {problem}", markup=False, style="red")
        console.print("FAILED" if self.problems else "all counters are flat")


def latency_table(looks: list[Look]) -> Table:
    """Return how quick the stream's tenths were, one a row."""
    table = Table(title=f"{looks[-1].owners:,} owners from one process to another")
    names = ("owners", "per s", "alone p10", "p50", "p99 us", "many p50", "p99 us", "CPU us")
    for name in (*names, "load"):
        table.add_column(name, justify="right")
    for look in looks:
        seconds = (
            look.alone_p10,
            look.alone_p50,
            look.alone_p99,
            look.in_flight_p50,
            look.in_flight_p99,
        )
        table.add_row(
            f"{look.owners:,}",
            f"{look.per_second:,.0f}",
            *(f"{each * 1e6:,.0f}" for each in seconds),
            "+".join(f"{each:.0f}" for each in look.cpu_us.values()),
            f"{look.load:.0f}",
        )
    return table


def counters_table(looks: list[Look], who: str) -> Table:
    """Return what one end had after each tenth."""
    table = Table(title=who)
    for name in ("owners", "KiB private", "blocks", "descriptors", "threads", "mappings"):
        table.add_column(name, justify="right")
    for look in looks:
        table.add_row(
            f"{look.owners:,}",
            f"{look.rss[who] >> 10:,}",
            f"{look.blocks[who]:,}",
            str(sum(look.descriptors[who].values())),
            str(look.threads[who]),
            str(look.mappings[who]),
        )
    return table


def about() -> dict[str, Any]:
    """Return what was run, on what."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
        return found.stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processors": os.cpu_count(),
        "nice": os.nice(0),
        "command": " ".join(["python -m tests.soak", *(Path(a).name for a in sys.argv[1:])]),
    }
