"""What a process has of the kernel and of the driver."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from asyncvmm._backends.events import budget

_KINDS = {
    "socket:": "socket",
    "/memfd:": "memfd",
    "anon_inode:[eventfd]": "eventfd",
    "anon_inode:[pidfd]": "pidfd",
    "pidfd:": "pidfd",  # since Linux 6.9 they have a file system of their own
}


@dataclass(frozen=True)
class Counters:
    """What one process has of the kernel."""

    descriptors: Counter[str]
    """By what they are: socket, memfd, eventfd, pidfd, other."""
    mappings: int
    """Parts of host pools that are mapped."""
    threads: int
    rss: int
    """Bytes of private memory that are present: shared pages are counted by their pools."""

    @classmethod
    def of(cls, pid: int | str = "self") -> Counters:
        """Count what a process has now; this one unless told otherwise."""
        statm = Path(f"/proc/{pid}/statm").read_text().split()
        return cls(
            descriptors=descriptors(pid),
            mappings=len(pool_mappings(pid)),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            rss=(int(statm[1]) - int(statm[2])) * os.sysconf("SC_PAGE_SIZE"),
        )


def descriptors(pid: int | str = "self") -> Counter[str]:
    """Count a process's descriptors by what they are."""
    found = Counter[str]()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:  # the one that listdir itself had open
            continue
        kinds = (kind for start, kind in _KINDS.items() if target.startswith(start))
        found[next(kinds, "other")] += 1
    return found


def pool_mappings(pid: int | str = "self") -> list[str]:
    """Return the lines of a process's memory map that are parts of host pools."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:asyncvmm-pool" in line]


def live_events() -> int:
    """Return how many interprocess CUDA events this process has, its own and opened ones.

    It can hold 4,096; a steady stream makes none.
    """
    return budget.live
