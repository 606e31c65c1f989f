"""Counts the system calls that Python code makes, without a tracer of the kernel's."""

from __future__ import annotations

import select
import socket
import sys
from collections import Counter
from types import FrameType
from typing import Any, Self

MODULES = frozenset({"posix", "fcntl", "select", "mmap", "_posixshmem", "_socket", "signal"})
"""Where CPython keeps the functions that are system calls."""


class SystemCalls:
    """Counts calls of this thread while the context lasts: those of sockets, epolls, and others.

    What uvloop does for itself is not seen, for it is no Python call; asyncio's polls are.
    """

    def __init__(self, *sockets: socket.socket) -> None:
        self.sockets: Counter[str] = Counter()
        """Calls on the sockets named, by name."""
        self.polls: Counter[str] = Counter()
        """Calls on epoll objects, by name."""
        self.others: Counter[str] = Counter()
        """Everything else, by name."""
        self._sockets = {id(each) for each in sockets}

    def _on_event(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        if isinstance(owner, socket.socket):
            counts = self.sockets if id(owner) in self._sockets else self.others
        elif isinstance(owner, select.epoll):
            counts = self.polls
        elif getattr(function, "__module__", None) in MODULES:
            counts = self.others
        else:
            return
        counts[function.__name__] += 1

    def __enter__(self) -> Self:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        for name in ("fileno", "CMSG_LEN"):  # answered without the kernel
            del self.others[name]
