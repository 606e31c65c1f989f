"""Descriptors that are closed exactly once, and that a forked child never keeps.

Rules: a descriptor belongs to an :class:`OwnedFd` before anything can raise (inv. 12), it is
close-on-exec, and a child made by ``os.fork`` closes every one of them at once, so that the end
of this process is seen by its peers even while such a child lives.
"""

from __future__ import annotations

import os
import weakref
from typing import ClassVar, NoReturn, Protocol, Self, TypeVar

from asyncvmm._errors import CopyError


class Closable(Protocol):
    """Anything with a ``close`` that may be called twice."""

    def close(self) -> None:
        """Close it; again is a no-op."""


ClosableT = TypeVar("ClosableT", bound=Closable)

_close_in_child: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_after_fork(resource: ClosableT) -> ClosableT:
    """Have ``resource`` closed at once in every child that ``os.fork`` makes."""
    _close_in_child.add(resource)
    return resource


def _after_fork_in_child() -> None:
    for resource in list(_close_in_child):
        resource.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Single:
    """One of a kind: a copy, even half of one, would give back what the original still has."""

    __slots__ = ()

    _instead: ClassVar[str] = "hand on a reference to it, within this process"

    def __reduce__(self) -> NoReturn:
        """Refuse: ``copy``, ``deepcopy`` and ``pickle`` all begin here."""
        raise CopyError(type(self).__name__, self._instead)


class OwnedFd(Single):
    """One file descriptor with one owner."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _close_in_child.add(self)

    @property
    def number(self) -> int:
        """The descriptor's number; -1 once closed or given away."""
        return self._fd

    def fileno(self) -> int:
        """Return the number, for the calls that take anything with ``fileno``."""
        if self._fd < 0:
            raise ValueError("the descriptor is closed")
        return self._fd

    def detach(self) -> int:
        """Give the number away; this object no longer closes it."""
        fd, self._fd = self.fileno(), -1
        return fd

    def close(self) -> None:
        """Close it; again is a no-op."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OwnedFd({self._fd})"
