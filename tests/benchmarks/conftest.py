"""Runs of the harness that are over in a moment."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.conductor import Conductor, Options
from benchmarks.rows import Row
from benchmarks.setting import KIB, Payload
from benchmarks.workloads import Workload


@dataclass
class Run:
    """What came of a run."""

    rows: list[Row]
    notes: list[str]
    skipped: list[dict[str, str]]

    def row(self, transport: str) -> Row:
        """Return the one row of a transport."""
        (row,) = [row for row in self.rows if row["transport"] == transport]
        return row


class Notes:
    """Keeps what a run says; interrupts it after its first turn if asked to."""

    def __init__(self, interrupt: bool) -> None:
        self.notes: list[str] = []
        self._interrupt = interrupt

    def step(self, text: str) -> None:
        if self._interrupt:
            raise KeyboardInterrupt

    def done(self) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


TINY = Workload("tiny", "flow", Payload(2, 4 * KIB), "two features of 4 KiB", depth=4)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where lanes make their folders; nothing may be left in it."""
    # Socket paths are short, so not the test's own folder.
    with tempfile.TemporaryDirectory(prefix="b") as name:
        yield Path(name)
        assert list(Path(name).iterdir()) == []


@pytest.fixture
def run(folder: Path) -> Callable[..., Run]:
    """Run transports through a workload on uvloop, rounds of some milliseconds."""

    def run(*transports: str, workload: Workload = TINY, **options: float) -> Run:
        notes = Notes(bool(options.get("interrupt")))
        asked = Options(
            list(transports),
            [workload],
            ["uvloop"],
            rounds=int(options.get("rounds", 1)),
            seconds=0.02,
            patience=options.get("patience", 60.0),
            folder=folder,
        )
        conductor = Conductor(asked, notes)
        for _ in conductor.run():
            pass
        return Run(conductor.rows, notes.notes, conductor.skipped)

    return run
