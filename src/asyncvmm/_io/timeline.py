"""The timeline of one end: what happened to each owner, noted in memory and written at the end.

A :class:`Timeline` only appends to memory while the program runs, at most ``MOST_LIVES`` lives
(then the oldest go, and are counted).  It is written once, in a worker thread, by
:mod:`asyncvmm._io.chrome`.

It knows no rules: the names of phases are given by who notes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Literal, TypeAlias

from asyncvmm._errors import ArgumentError
from asyncvmm._fds import OwnedFd

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
        if not isinstance(path, str | os.PathLike) or not (given := os.fspath(path)):
            raise ArgumentError(f"trace={path!r} is no path; give the path of a file or folder")
        if not isinstance(given, str) or "\0" in given:
            raise ArgumentError(f"trace={path!r} is no path: it is text without NUL")
        self.path = Path(given)
        self._given = given
        self._file: OwnedFd | None = None  # open and locked for as long as it is ours
        self._made = False  # by us, under a name of its own
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

    def prepare(self, who: str) -> None:
        """Claim the file until :meth:`release`; blocks, so call it in a thread.

        If a folder was given it is a new file there, named after ``who`` and this process.  Raises
        ArgumentError if it cannot be written, or if another end that is open has it.
        """
        try:
            file = self._in_folder(who) if self.path.is_dir() else self._open(self._given)
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                self._lock(file)
            else:
                file.close()  # a pipe, a device: whoever reads it waits for its end
        except OSError as error:
            raise ArgumentError(
                f"trace={self._given!r} cannot be written: {error.strerror}; name a file in a "
                f"folder that exists, or such a folder"
            ) from None

    def _in_folder(self, who: str) -> OwnedFd:
        stem = re.sub(r"[^A-Za-z0-9._]+", "-", f"{who}-{os.getpid()}")[-200:].lstrip("-.")
        folder, number = self.path, 1
        while True:  # another end in this process, or an earlier one, may have the name
            self.path = folder / (f"{stem}.json" if number == 1 else f"{stem}_{number}.json")
            with suppress(FileExistsError):
                file = self._open(self.path, os.O_EXCL)
                self._made = True
                return file
            number += 1

    @staticmethod
    def _open(path: str | os.PathLike[str], how: int = 0) -> OwnedFd:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | how
        return OwnedFd(os.open(path, flags, 0o666))

    def _lock(self, file: OwnedFd) -> None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ArgumentError(
                f"trace={self._given!r} is the file of another exporter or consumer that is open, "
                f"and each writes a file of its own; give a folder to all of them, in which each "
                f"names its own"
            ) from None
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP}:  # a file system without locks
                file.close()
                raise
        self._file = file

    def release(self) -> None:
        """End the claim, written or not; again is a no-op."""
        file, self._file = self._file, None
        if file is not None:
            with file, suppress(FileNotFoundError):  # removed by somebody else
                if self._made and not self.path.stat().st_size:
                    self.path.unlink()

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
