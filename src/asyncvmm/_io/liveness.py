"""Who the peer is, and whether its process is still there.

End-of-file is hidden for as long as a forked child of the peer holds the socket, so the truth is
the peer's pidfd.  The kernel hands one out for a socket (Linux 6.5 and later) without the race
of looking up a number that may have been used again, and also across pid namespaces, where the
peer's number is 0.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncvmm._fds import OwnedFd
from asyncvmm._io.packets import descriptor_limit

_SO_PEERPIDFD = 77  # asm-generic/socket.h; Python's socket module does not name it
_UCRED = struct.Struct("iII")

Source = Literal["peerpidfd", "pidfd_open", "eof"]


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The process at the other end, as it was when the socket was connected.

    ``pid`` is 0 where it lives in another pid namespace.  ``source`` says what tells of its
    death; with ``"eof"`` there is no ``pidfd`` and only the socket's end can.
    """

    pid: int
    uid: int
    gid: int
    pidfd: OwnedFd | None
    source: Source


def identify(sock: socket.socket) -> PeerIdentity:
    """Ask the kernel who is at the other end.

    Raises DescriptorLimitError if this process may not have another descriptor.
    """
    pid, uid, gid = peer_credentials(sock)
    pidfd = _owned(lambda: sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    if pidfd is not None:
        return PeerIdentity(pid, uid, gid, pidfd, "peerpidfd")
    if pid > 0:
        pidfd = _owned(lambda: os.pidfd_open(pid))
        if pidfd is not None:
            return PeerIdentity(pid, uid, gid, pidfd, "pidfd_open")
    return PeerIdentity(pid, uid, gid, None, "eof")


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the peer as they were when the socket was connected."""
    pid, uid, gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid, gid


def peer_has_ended(sock: socket.socket) -> bool:
    """Say whether the process that made the other end is surely gone.

    Its socket may live on in a child that was forked past Python, where nothing answers on it.
    Raises DescriptorLimitError if this process may not have another descriptor.
    """
    peer = identify(sock)
    if peer.pidfd is not None:
        with peer.pidfd:
            return has_ended(peer.pidfd)
    try:
        return peer.pid > 0 and os.getpgid(peer.pid) < 0
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _owned(ask: Callable[[], int]) -> OwnedFd | None:
    """Return the descriptor, or None where the kernel cannot say or the peer is reaped."""
    try:
        return OwnedFd(ask())
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise descriptor_limit() from error
        return None


def same_process(one: PeerIdentity, other: PeerIdentity) -> bool:
    """Say whether both are one process that lives; False also if that cannot be told.

    A pid names one process for as long as that lives.  From another pid namespace it is 0; then
    the pidfd's inode tells, which is the process's own since Linux 6.9.
    """
    if one.pidfd is None or other.pidfd is None or has_ended(one.pidfd):
        return False
    if one.pid > 0 or other.pid > 0:
        return one.pid == other.pid
    first, second = os.fstat(one.pidfd.fileno()), os.fstat(other.pidfd.fileno())
    with OwnedFd(os.eventfd(0, os.EFD_CLOEXEC)) as anonymous:
        if os.fstat(anonymous.fileno()).st_dev == first.st_dev:
            return False  # an inode that all such files share
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def has_ended(pidfd: OwnedFd) -> bool:
    """Say whether a process is gone, at once."""
    poll = select.poll()
    poll.register(pidfd.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class DeathWatch:
    """Tells once, from the loop, that a process is gone.  Takes the pidfd."""

    __slots__ = ("_dead", "_loop", "_number", "_on_death", "_pidfd")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pidfd: OwnedFd, on_death: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._pidfd = pidfd
        self._on_death = on_death
        self._dead = False
        self._number = pidfd.fileno()
        loop.add_reader(self._number, self._on_readable)

    def dead(self) -> bool:
        """Say whether the process is gone, at once; after :meth:`close`, as it was then."""
        if not self._dead and self._number >= 0:
            self._dead = has_ended(self._pidfd)
        return self._dead

    def close(self) -> None:
        """Stop watching and close the pidfd; again is a no-op."""
        self._stop()
        self._pidfd.close()

    def _on_readable(self) -> None:
        self._dead = True
        self._stop()
        self._on_death()

    def _stop(self) -> None:
        number, self._number = self._number, -1
        if number >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(number)
