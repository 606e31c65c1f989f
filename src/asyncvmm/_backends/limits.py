"""How much memory this process can still get, and from whom it would be taken.

A pool is promised whole or refused whole: what load would meet as a bus error or as the kernel's
out-of-memory killer is found out before the first page is touched (field report 55).  A limit that
cannot be read, because the kernel or the container does not show it, does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from asyncvmm._errors import PoolMemoryError

_PROC = Path("/proc")


class Room(NamedTuple):
    """What one limit leaves: ``available`` bytes, and ``where`` the limit stands."""

    available: int
    where: str


class _Files(NamedTuple):
    """The names that one version of control groups gives to the same three files."""

    limit: str
    usage: str
    inactive: str
    """Line of ``memory.stat``: file pages that were not used lately, the subtree's included."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def check_room(asked: int, proc: Path = _PROC) -> None:
    """Raise :class:`asyncvmm.PoolMemoryError` if ``asked`` bytes are more than any limit leaves."""
    room = tightest(proc)
    if room is not None and asked > room.available:
        raise PoolMemoryError(asked, room.available, room.where)


def tightest(proc: Path = _PROC) -> Room | None:
    """Return the limit that leaves least; None where no limit can be read."""
    return min((*_machine(proc), *_control_groups(proc)), default=None)


def _machine(proc: Path) -> Iterator[Room]:
    info = _table(proc / "meminfo")
    if "MemAvailable" in info:
        yield Room(info["MemAvailable"] * 1024, "this machine (MemAvailable)")
    # Under strict accounting the kernel refuses shared pages past this sum, however many are free.
    if _number(proc / "sys/vm/overcommit_memory") == 2 and "CommitLimit" in info:
        left = max(0, info["CommitLimit"] - info.get("Committed_AS", 0)) * 1024
        yield Room(left, "this machine (CommitLimit, vm.overcommit_memory=2)")


def _control_groups(proc: Path) -> Iterator[Room]:
    """Yield what each control group from this process's up to the mounted root leaves."""
    paths = dict(_memberships(proc / "self/cgroup"))
    for line in _lines(proc / "self/mountinfo"):
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.partition(" ")
        if kind == "cgroup2":
            path, files = paths.get(""), _V2
        elif kind == "cgroup" and "memory" in options.rpartition(" ")[2].split(","):
            path, files = paths.get("memory"), _V1
        else:
            continue
        root, mounted = (_unescape(field) for field in fields.split(" ")[3:5])
        if path is not None:
            yield from _up_the_tree(Path(mounted), _below(path, root), files)


def _memberships(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (controller, path); the controller of version 2 is the empty string."""
    for line in _lines(file):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _below(path: str, root: str) -> Path:
    """Return ``path`` relative to what is mounted; the mount itself where it lies outside."""
    inside = Path(path)
    if ".." in inside.parts or not inside.is_relative_to(root):
        return Path()
    return inside.relative_to(root)


def _up_the_tree(mounted: Path, below: Path, files: _Files) -> Iterator[Room]:
    for level in (below, *below.parents):
        group = mounted / level
        limit, usage = _number(group / files.limit), _number(group / files.usage)
        if limit is None or usage is None:
            continue
        # The page cache counts as usage, and a process that has just read its model's weights has
        # filled its group with it.  What was read once and not again is given up before anything
        # fails, so it counts as free; container managers reckon the working set the same way.
        reclaimable = _table(group / "memory.stat").get(files.inactive, 0)
        left = max(0, limit - max(0, usage - reclaimable))
        yield Room(left, f"the control group {group} ({files.limit} {limit:,})")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        # Not shown to us: by this module's rule it does not count.  Nor can anything be read at
        # the open-file limit, but there no pool can be made either, and that error names it.
        return []


def _number(file: Path) -> int | None:
    """Return the number in ``file``; None if it has none, as in ``max``."""
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _table(file: Path) -> dict[str, int]:
    """Return the ``name number`` and ``name: number kB`` lines of ``file``."""
    rows = (line.replace(":", " ").split() for line in _lines(file))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo, such as ``\\040`` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
