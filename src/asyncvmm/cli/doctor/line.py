"""What one check says, and what all of them say of a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec

from asyncvmm._errors import AsyncVMMError

State: TypeAlias = Literal["ok", "degraded", "missing"]
Device: TypeAlias = Literal["cpu", "cuda"]

BOTH: tuple[Device, ...] = ("cpu", "cuda")
GPU: tuple[Device, ...] = ("cuda",)
HOST: tuple[Device, ...] = ("cpu",)


class Line(msgspec.Struct, frozen=True):
    """One thing that a machine has, has in part, or has not."""

    name: str
    state: State
    figure: str
    """What was measured or read."""
    advice: str = ""
    """What to do; empty where nothing has to be done."""
    needed: tuple[Device, ...] = ()
    """The kinds of device that cannot work where this is missing."""


class Report(msgspec.Struct, frozen=True):
    """All of it."""

    device: str
    """The one that ``device="auto"`` takes, or that was asked about."""
    works: bool
    lines: list[Line]


def verdict(device: str, lines: Sequence[Line]) -> Report:
    """Say whether the device can work: nothing that it needs is missing."""
    kind = device.partition(":")[0]
    lacks = any(line.state == "missing" and kind in line.needed for line in lines)
    return Report(device, not lacks, list(lines))


def tried(name: str, check: Callable[[], Line], needed: tuple[Device, ...] = ()) -> Line:
    """Return what a check says; one of our errors in it says that the thing is missing."""
    try:
        return check()
    except (AsyncVMMError, OSError) as error:
        kind = type(error).__name__
        return Line(name, "missing", f"{kind}: {error}", "see the error; it names the step", needed)


class Stopwatch:
    """Measures from where it is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since then."""
        return time.perf_counter() - self._began

    def __str__(self) -> str:
        return in_words(self.seconds)


def in_words(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def in_bytes(nbytes: int) -> str:
    """Return a number of bytes in the unit that suits it."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
