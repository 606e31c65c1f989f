"""The timeline of one end: what happened to each owner, noted in memory and written at the end.

A :class:`Timeline` only appends to memory while the program runs, at most ``MOST_LIVES`` lives
(then the oldest go, and are counted).  It is written once, in a worker thread, by
:mod:`asyncvmm._io.chrome`.

It knows no rules: the names of phases are given by who notes them.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from time import monotonic_ns
from typing import Literal, TypeAlias

from asyncvmm._errors import ArgumentError

MOST_LIVES = 20_000
"""Owners kept, and waits kept.  A life takes about 1.5 kilobytes, so this bounds the memory of a
timeline to some 30 MB; the file has about a kilobyte for each."""

Way: TypeAlias = Literal["leaves", "arrives"]


class Life:
    """One owner in one slot, as one end saw it.  Times are nanoseconds of CLOCK_MONOTONIC."""

    __slots__ = ("arrows", "facts", "generation", "name", "over", "phases", "slot")

    def __init__(self, slot: int, generation: int, phase: str) -> None:
        self.slot = slot
        self.generation = generation
        self.name = ""
        self.phases = [(monotonic_ns(), phase)]
        self.over = 0
        """When it ended; 0 while it goes on."""
        self.facts: dict[str, object] = {}
        self.arrows: list[tuple[Way, int, str]] = []
        """Which way, when, and what for: the other end has one with the same words."""

    def since(self, phase: str) -> int:
        """Return when it last went into a phase; 0 if it never did."""
        return next((at for at, name in reversed(self.phases) if name == phase), 0)


class Timeline:
    """What one end notes.  Nothing here waits, and nothing grows without bound."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.title = ""
        self.made_in = os.getpid()
        self.identity = b""
        """Names the exporter, so that the arrows of two exporters never meet."""
        self.lives: deque[Life] = deque(maxlen=MOST_LIVES)
        self.waits: deque[tuple[int, int, int]] = deque(maxlen=MOST_LIVES)
        """(began, ended, bytes wanted)"""
        self.open: dict[int, Life] = {}  # by slot
        self.ended = 0
        self.waited = 0

    def prepare(self) -> None:
        """Make sure that the file can be written; blocks, so call it in a thread."""
        try:
            with open(self.path, "ab"):
                pass
        except OSError as error:
            raise ArgumentError(
                f"trace={str(self.path)!r} cannot be written: {error.strerror}; name a file in a "
                f"folder that exists"
            ) from None

    def begin(self, slot: int, generation: int, phase: str) -> Life:
        """Note that a life begins."""
        life = self.open[slot] = Life(slot, generation, phase)
        return life

    def mark(self, slot: int, phase: str) -> None:
        """Note that the life in a slot goes into another phase."""
        life = self.open.get(slot)
        if life is not None:
            life.phases.append((monotonic_ns(), phase))

    def end(self, slot: int, name: object, **facts: object) -> Life | None:
        """Note that the life in a slot is over, and return it."""
        life = self.open.pop(slot, None)
        if life is not None:
            life.over = monotonic_ns()
            life.name = str(name)
            life.facts = facts
            self.ended += 1
            self.lives.append(life)
        return life

    def wait(self, since: float, nbytes: int) -> None:
        """Note a wait for room that began at ``since`` (``time.monotonic()``) and ends now."""
        self.waited += 1
        self.waits.append((int(since * 1e9), monotonic_ns(), nbytes))
