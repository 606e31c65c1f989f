"""Take a name, or find out who has it.  Blocking file calls: for a worker thread.

A name belongs to whoever answers on it.  A node that nobody answers on is stale and is taken
over; a live one never is.  Deciding and binding happen under a lock on the folder, because a
socket that is bound but does not listen yet looks stale.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

from asyncvmm._errors import (
    AccessDeniedError,
    ArgumentError,
    AsyncVMMError,
    HandshakeError,
    NameInUseError,
)
from asyncvmm._fds import OwnedFd, close_after_fork
from asyncvmm._io.fitting import fitting
from asyncvmm._io.liveness import peer_credentials, peer_has_ended
from asyncvmm._io.names import Address
from asyncvmm._io.packets import descriptor_limit

Node: TypeAlias = tuple[int, int]
"""Device and inode of a socket's node: what tells ours from a later one of the same name."""

_BACKLOG = 128
_LOCK_PATIENCE = 5.0
"""Seconds.  Others of us hold the lock for the time of a bind, but anybody may lock a shared
folder such as /tmp, and for ever."""
_LOCK_PAUSE = 0.005


def new_socket() -> socket.socket:
    """Return a non-blocking SEQPACKET socket that no forked child keeps.

    Raises DescriptorLimitError if this process may not have another descriptor.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise descriptor_limit() from error
        raise
    sock.setblocking(False)
    return close_after_fork(sock)


def bind(address: Address, *, shared: bool = False) -> tuple[socket.socket, Node | None]:
    """Take the name; return the listening socket, and its node unless the name is abstract.

    Others than this user may open the node only if it is ``shared``.
    Raises NameInUseError if a live exporter has the name, AccessDeniedError if another user
    has it or the folder, ArgumentError if the folder is not there or no socket is in the way.
    """
    sock = new_socket()
    try:
        if address.kind == "abstract":
            _bind_abstract(sock, address)
            return sock, None
        with _folder_locked(address):
            _clear_the_way(address)
            return sock, _bind_node(sock, address, 0o666 if shared else 0o600)
    except OSError as error:
        sock.close()
        raise _translated(error, address) from error
    except BaseException:
        sock.close()
        raise


def node_at(path: str) -> Node | None:
    """Return what is there now, links not followed; None if nothing is."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _bind_abstract(sock: socket.socket, address: Address) -> None:
    try:
        sock.bind(address.sockaddr)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # The kernel drops an abstract name with its last socket, so it cannot be taken over.
        answered, holder = _who_answers(address)
        raise _in_use(address, holder, inherited=not answered) from None
    sock.listen(_BACKLOG)


def _bind_node(sock: socket.socket, address: Address, mode: int) -> Node:
    # On the socket, before there is a node: it is never open to more than it should be.
    os.fchmod(sock.fileno(), mode)
    with fitting(address) as sockaddr:
        sock.bind(sockaddr)
    # Held by a descriptor, because in a shared folder the path may be turned elsewhere meanwhile.
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    with OwnedFd(os.open(address.sockaddr, flags)) as node:
        found = os.fstat(node.fileno())
        ours = stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
        if ours and stat.S_IMODE(found.st_mode) != mode:  # an umask took rights away
            os.chmod(f"/proc/self/fd/{node.fileno()}", mode)
    sock.listen(_BACKLOG)
    return found.st_dev, found.st_ino


@contextmanager
def _folder_locked(address: Address) -> Iterator[None]:
    folder = os.path.dirname(address.sockaddr)
    with OwnedFd(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HandshakeError(
                        f"another process held the lock on {folder!r} for {_LOCK_PATIENCE:g} s; "
                        f"find it (lslocks), or use a bare name, whose folder is private",
                        reason="folder_locked",
                    ) from None
                time.sleep(_LOCK_PAUSE)
        yield


def _clear_the_way(address: Address) -> None:
    """Remove a stale node; raise if somebody answers or if it is no socket of ours."""
    try:
        found = os.lstat(address.sockaddr)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ArgumentError(
            f"{address.display!r} cannot be an exporter's name: {address.sockaddr!r} exists and "
            f"is no socket; remove it or choose another name"
        )
    answered, holder = _who_answers(address)
    if answered:
        raise _in_use(address, holder)
    os.unlink(address.sockaddr)


def _who_answers(address: Address) -> tuple[bool, int]:
    """Say whether a live process has the address, and its pid, 0 if that cannot be known."""
    with new_socket() as probe:
        try:
            with fitting(address) as sockaddr:
                probe.connect(sockaddr)
        except ConnectionRefusedError:
            return False, 0
        except BlockingIOError:  # its backlog is full
            return True, 0
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:  # it listens with another kind of socket
                return True, 0
            raise
        return not peer_has_ended(probe), peer_credentials(probe)[0]


def _in_use(address: Address, pid: int, *, inherited: bool = False) -> NameInUseError:
    who = f"process {pid}" if pid else "a process that cannot be named from here"
    if inherited:
        said = (
            f"is kept by a child of {who}, which has ended: a process that was forked past Python "
            f"has its socket; find it (ss -xlp) and end it, or choose another name"
        )
    else:
        said = f"is taken by {who}, which is alive; close that exporter or choose another name"
    return NameInUseError(f"{address.display!r} {said}", name=address.display, pid=pid)


def _translated(error: OSError, address: Address) -> AsyncVMMError:
    folder = os.path.dirname(address.sockaddr)
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return ArgumentError(
            f"{address.display!r} cannot be an exporter's name: {folder!r} is no folder; make it"
        )
    if error.errno in {errno.EACCES, errno.EPERM}:
        return _denied(address)
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return descriptor_limit()
    return HandshakeError(
        f"{address.display!r} cannot be taken as a name: {error}; choose another",
        reason="bind",
    )


def _denied(address: Address) -> AccessDeniedError:
    owner = -1
    for path in (address.sockaddr, os.path.dirname(address.sockaddr)):
        with suppress(OSError):
            owner = os.lstat(path).st_uid
            break
    return AccessDeniedError(
        f"user {os.geteuid()} may not take {address.display!r}, which belongs to user {owner}; "
        f"run as that user or choose another name",
        uid=owner,
        allowed=(owner,),
    )
