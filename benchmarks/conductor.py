"""Runs the workloads: opens the lanes, gives each its turn in every round, collects rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import turns
from benchmarks.allocation import allocate_and_free
from benchmarks.lane import PATIENCE, Lane, LaneError, context
from benchmarks.machine import available_bytes
from benchmarks.progress import Progress
from benchmarks.rows import Row, row
from benchmarks.setting import Loop, Setting
from benchmarks.transports import UnavailableError, load
from benchmarks.transports.base import Transport
from benchmarks.workloads import Workload

MEMORY_SHARE = 0.5
"""How much of the memory that is available now all lanes of a workload may take together."""

LEAST_DEPTH = 4


@dataclass
class Options:
    """What to run."""

    transports: list[str]
    workloads: list[Workload]
    loops: list[Loop]
    device: str = "cpu"
    consumer_device: str = ""
    rounds: int = 3
    seconds: float = 0.2
    patience: float = PATIENCE
    cores: tuple[frozenset[int], ...] = ()
    folder: Path | None = None
    """Where lanes make their folders, if not where temporary files go.  Sockets need it short."""


@dataclass
class Entrant:
    """One lane in one workload: its rounds so far, or why it is out."""

    name: str
    loop: Loop
    transport: type[Transport]
    setting: Setting
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""
    lane: Lane | None = None


class Conductor:
    """Runs every workload of some options and keeps what came of it."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.skipped: list[dict[str, str]] = []
        self._progress = progress
        self._context = context(options.device)
        self._transports: dict[str, type[Transport]] = {}
        for name in options.transports:
            try:
                self._transports[name] = load(name)
            except UnavailableError as error:
                self._skip(name, "", str(error))

    def run(self) -> Iterator[Workload]:
        """Run everything; come back after each workload."""
        for workload in self.options.workloads:
            if workload.kind == "allocator":
                self._allocators()
            else:
                self._workload(workload)
            self._progress.done()
            yield workload

    def _skip(self, name: str, workload: str, reason: str) -> None:
        self.skipped.append({"transport": name, "workload": workload, "reason": reason})
        self._progress.note(f"{name} {workload}: skipped, {reason}".replace(" :", ":"))

    def _allocators(self) -> None:
        """Take all numbers of chunks in turns, once: a busy moment is not one number's alone."""
        if "asyncvmm" not in self._transports or self.options.device != "cpu":
            return
        workloads = [each for each in self.options.workloads if each.kind == "allocator"]
        if any(done["workload"] == workloads[0].name for done in self.rows):
            return
        turns = [
            [allocate_and_free(each.live, self.options.seconds) for each in workloads]
            for _ in range(self.options.rounds)
        ]
        for workload, rounds in zip(workloads, zip(*turns, strict=True), strict=True):
            self.rows.append(row("asyncvmm", workload.name, "cpu", "none", list(rounds)))

    def _entrants(self, workload: Workload) -> list[Entrant]:
        """Return who takes part in a workload, with memory shared out among them."""
        found = []
        for name, transport in self._transports.items():
            if workload.kind not in transport.kinds:
                continue
            loops: list[Loop] = self.options.loops if transport.uses_loop else ["none"]
            for loop in loops:
                setting = self._setting(workload, loop)
                reason = transport.unusable(setting)
                if reason:
                    self._skip(name, workload.name, reason)
                    break
                found.append(Entrant(name, loop, transport, setting))
        if self.options.device == "cpu" and found:
            budget = available_bytes() * MEMORY_SHARE / len(found)
            most = max(LEAST_DEPTH, int(budget / workload.payload.total))
            for entrant in found:
                if entrant.setting.depth > most:
                    entrant.setting = replace(entrant.setting, depth=most)
        return found

    def _setting(self, workload: Workload, loop: Loop) -> Setting:
        device = self.options.device
        return Setting(
            folder=Path(),
            payload=workload.payload,
            depth=workload.depth,
            consumers=workload.consumers,
            compete=workload.compete,
            loop=loop,
            device=device,
            consumer_device=self.options.consumer_device or device,
            work=workload.work,
            cores=self.options.cores,
        )

    def _workload(self, workload: Workload) -> None:
        entrants = self._entrants(workload)
        with ExitStack() as stack:
            if workload.kind != "connect":
                self._start_all(workload, entrants, stack)
            for turn in range(self.options.rounds):
                # Nobody is always first after a pause, or always behind the same one.
                at = turn % len(entrants) if entrants else 0
                for entrant in entrants[at:] + entrants[:at]:
                    self._guarded(workload, entrant, lambda e: self._turn(workload, e))
            for entrant in entrants:
                if entrant.lane is not None:
                    self._guarded(workload, entrant, _close)
        for entrant in entrants:
            self.rows.append(self._row(workload, entrant))

    def _start_all(self, workload: Workload, entrants: list[Entrant], stack: ExitStack) -> None:
        """Start as many lanes at once as there are cores for their two sides.

        Starting takes a GPU's context a second, and a large pool as long as its pages do.
        """
        width = max(1, len(os.sched_getaffinity(0)) // 2)
        for at in range(0, len(entrants), width):
            for step in (lambda e: self._start(e, stack), _start_consumers, _connected):
                for entrant in entrants[at : at + width]:
                    self._guarded(workload, entrant, step)

    def _guarded(self, workload: Workload, entrant: Entrant, do: Callable[[Entrant], None]) -> None:
        """Do a step unless the lane is out; if it fails it is, and the others go on."""
        if entrant.failed:
            return
        try:
            do(entrant)
        except Exception as error:  # whatever a transport raises in this process
            text = (
                str(error) if isinstance(error, LaneError) else f"{type(error).__name__}: {error}"
            )
            entrant.failed = text
            self._progress.note(f"{entrant.name} {workload.name} {entrant.loop}: failed, {text}")
            if entrant.lane is not None:
                entrant.lane.__exit__()
                entrant.lane = None

    def _lane(self, entrant: Entrant) -> Lane:
        folder = tempfile.mkdtemp(prefix="bench-", dir=self.options.folder)
        setting = replace(entrant.setting, folder=Path(folder))
        lane = Lane(entrant.name, entrant.transport, setting, self._context)
        lane.patience = self.options.patience
        return lane

    def _start(self, entrant: Entrant, stack: ExitStack) -> None:
        entrant.lane = stack.enter_context(self._lane(entrant))
        entrant.lane.start()

    def _turn(self, workload: Workload, entrant: Entrant) -> None:
        seconds = self.options.seconds
        if workload.kind == "connect":
            found = turns.connect(lambda: self._lane(entrant))
        else:
            assert entrant.lane is not None
            found = turns.TURNS[workload.kind](entrant.lane, workload, seconds)
        entrant.rounds.append(found)
        self._progress.step(f"{workload.name}: {entrant.name}, round {len(entrant.rounds)}")

    def _row(self, workload: Workload, entrant: Entrant) -> Row:
        setting = entrant.setting
        more: dict[str, Any] = {
            "consumer_device": setting.consumer_device,
            "consumers": setting.consumers,
            "depth": setting.depth,
            "nbytes": setting.payload.total,
        }
        if entrant.failed:
            more["failed"] = entrant.failed
        name = entrant.transport.name
        return row(name, workload.name, setting.device, entrant.loop, entrant.rounds, **more)


def _start_consumers(entrant: Entrant) -> None:
    assert entrant.lane is not None
    entrant.lane.start_consumers()


def _connected(entrant: Entrant) -> None:
    assert entrant.lane is not None
    entrant.lane.connected()


def _close(entrant: Entrant) -> None:
    assert entrant.lane is not None
    entrant.lane.close()
