"""A lane: the processes of one transport on one loop, and what can go wrong with them."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks import sides
from benchmarks.setting import Setting
from benchmarks.transports.base import Transport

PATIENCE = 30.0
"""Seconds that any single step of a lane may take beyond what was asked of it."""

STARTING = 30.0
"""Seconds beyond its patience that a lane may take to start: the first one imports torch."""


Context = ForkServerContext | SpawnContext


def context(device: str) -> Context:
    """Return where processes come from: a server that has imported what they need.

    Each side is a process of its own, started in milliseconds; nothing in the server has touched
    a GPU, a loop or a thread.  Where an import there did start CUDA, which does not survive a
    fork, every process imports for itself instead.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "asyncvmm", "benchmarks.sides"])
    if not device.startswith("cuda"):
        return server
    trial = server.Process(target=sides.touch, args=(device,), daemon=True)
    trial.start()
    trial.join(PATIENCE)
    if trial.exitcode == 0:
        return server
    trial.kill()
    return multiprocessing.get_context("spawn")


class LaneError(Exception):
    """A transport hung, died or failed; the text says which side and how."""


@dataclass
class Side:
    """One process and the pipe to it."""

    role: str
    process: BaseProcess
    conn: Connection
    heard: list[tuple[str, Any]] = field(default_factory=list)
    over: bool = False
    """It said "closed": its end is no surprise."""


class Lane:
    """Use it as a context manager: leaving kills what is left and removes its folder."""

    def __init__(
        self, name: str, transport: type[Transport], setting: Setting, context: Context
    ) -> None:
        self.name = name
        self.transport = transport
        self.setting = setting
        self._context = context
        self._sides: list[Side] = []
        self._shared: Any = None
        self.patience = PATIENCE

    @property
    def producer(self) -> Side:
        """The producer's process."""
        return self._sides[0]

    @property
    def consumers(self) -> list[Side]:
        """The consumers' processes."""
        return self._sides[1:]

    @property
    def pids(self) -> list[int]:
        """The ids of all its processes."""
        return [side.process.pid for side in self._sides if side.process.pid]

    def start(self) -> None:
        """Start the producer; it opens by itself."""
        self._shared = self.transport.share(self.setting)
        self._start("producer", sides.produce)

    def start_consumers(self, *ahead: tuple[str, dict[str, Any]]) -> None:
        """Wait until the producer is open and start the consumers.

        What it is told ``ahead`` the producer does as soon as all are connected; expect it by
        ``done``.
        """
        self._expect(self.producer, "open", STARTING)
        for told in ahead:
            self.producer.conn.send(told)
        for index in range(self.setting.consumers if self.transport.delivers else 0):
            self._start(f"consumer {index}", sides.consume, index)

    def connected(self) -> None:
        """Wait until all are connected."""
        for side in self.consumers:
            self._expect(side, "open", STARTING)
        self._expect(self.producer, "ready", STARTING)

    def _start(self, role: str, target: Callable[..., None], *index: int) -> None:
        ours, theirs = self._context.Pipe()
        args = (self.name, self.setting, self._shared, theirs, *index)
        process = self._context.Process(target=target, args=args, daemon=True)
        process.start()
        theirs.close()
        self._sides.append(Side(role, process, ours))

    def ask(self, what: str, watch: Callable[[], None] | None = None, **how: Any) -> Any:
        """Have the producer do something and return its report; ``watch`` is called meanwhile."""
        self.producer.conn.send((what, how))
        return self.done(how.get("seconds", 0.0), watch)

    def done(self, seconds: float = 0.0, watch: Callable[[], None] | None = None) -> Any:
        """Wait until the producer has done what it was told, and return its report."""
        return self._expect(self.producer, "done", seconds, watch)

    def begin(self, **how: bool) -> None:
        """Have the consumers count from here: with ``beats`` beside it, with ``stamps``."""
        for side in self.consumers:
            side.conn.send(("begin", {"beats": False, "stamps": False} | how))
        for side in self.consumers:
            self._expect(side, "begun")

    def seen(self) -> list[dict[str, Any]]:
        """Return what each consumer counted."""
        for side in self.consumers:
            side.conn.send(("report", {}))
        return [self._expect(side, "seen") for side in self.consumers]

    def close(self) -> list[float]:
        """End it in order; return how long each consumer took to its first hand-off, in seconds."""
        self.producer.conn.send(("close", {}))
        firsts = [self._expect(side, "closed") for side in self.consumers]
        self._expect(self.producer, "closed")
        for side in self._sides:
            side.process.join(self.patience)
        return firsts

    def _expect(
        self, side: Side, what: str, seconds: float = 0.0, watch: Callable[[], None] | None = None
    ) -> Any:
        patience = self.patience + seconds
        end = time.monotonic() + patience
        while not side.heard:
            left = end - time.monotonic()
            if left <= 0:
                raise LaneError(f'{side.role} did not say "{what}" within {patience:.0f} s')
            self._hear(min(left, 0.02) if watch else left)
            if watch:
                watch()
        said, value = side.heard.pop(0)
        if said != what:
            raise LaneError(f'{side.role} said "{said}" instead of "{what}"')
        return value

    def _hear(self, seconds: float) -> None:
        """Wait for anybody to say something or to die."""
        alive = [side for side in self._sides if not side.over]
        ready = wait(
            [side.conn for side in alive] + [side.process.sentinel for side in alive], seconds
        )
        for side in alive:
            if side.conn not in ready and side.process.sentinel not in ready:
                continue
            try:
                if not side.conn.poll():
                    raise EOFError
                said, value = side.conn.recv()
            except (EOFError, OSError):
                raise LaneError(self._death(side)) from None
            if said == "failed":
                raise LaneError(value)
            side.over = said == "closed"
            side.heard.append((said, value))

    def _death(self, side: Side) -> str:
        side.process.join(1.0)
        errors = self.setting.folder / f"{side.role.replace(' ', '-')}.err"
        lines = errors.read_text().strip().splitlines() if errors.exists() else []
        last = f": {lines[-1]}" if lines else ""
        return f"{side.role} died with exit code {side.process.exitcode}{last}"

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for side in self._sides:
                if side.process.is_alive():
                    side.process.kill()
                side.conn.close()  # who could not be killed is told by this
            for side in self._sides:
                side.process.join(10.0)
        finally:  # also when this is interrupted
            self.transport.clean(self.setting)
            shutil.rmtree(self.setting.folder, ignore_errors=True)
