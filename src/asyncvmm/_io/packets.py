"""One packet with its descriptors, in and out: what Python's own helpers get wrong.

``socket.recv_fds`` and asyncio's and anyio's streams hand out inheritable descriptors and look
at no truncation flag; at the open-file limit the bytes then arrive without their descriptors
and nobody is told.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from array import array
from collections.abc import Iterable, Sequence

from asyncvmm._errors import (
    AsyncVMMError,
    DescriptorLimitError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
)
from asyncvmm._fds import OwnedFd

PACKET_LIMIT = 65_536
"""Most bytes of one packet.  The kernel's own limit at the default SO_SNDBUF is 212,960."""

# Plain ints: with the socket module's enum members one `&` costs as much as the system call.
_TRUNC = int(socket.MSG_TRUNC)
_CTRUNC = int(socket.MSG_CTRUNC)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_NOSIGNAL = int(socket.MSG_NOSIGNAL)

_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED})


def send(sock: socket.socket, packet: bytes, fds: Sequence[OwnedFd]) -> None:
    """Send one packet; the descriptors stay the caller's.  Raises what the kernel says."""
    if not fds:
        sock.send(packet, _NOSIGNAL)
        return
    rights = array("i", [fd.fileno() for fd in fds])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    sock.sendmsg((packet,), ancillary, _NOSIGNAL)


def receive(
    sock: socket.socket, buffer: memoryview, accept: int, fds: list[OwnedFd]
) -> tuple[int, AsyncVMMError | None]:
    """Read one packet; every descriptor is in ``fds`` before anything is judged (inv. 12).

    Returns the size and what is wrong with the packet, which the caller drops then.  ``buffer``
    is one byte longer than a packet may be.
    """
    if not accept:
        # With no room for them the kernel itself closes descriptors that nobody asked for.
        size = sock.recv_into(buffer)
        return size, oversized() if size > PACKET_LIMIT else None
    size, ancillary, flags, _ = sock.recvmsg_into(
        # CMSG_LEN, not CMSG_SPACE: the padding of the latter has room for one more.
        (buffer,),
        socket.CMSG_LEN(4 * accept),
        _CLOEXEC,
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            fds.extend(map(OwnedFd, numbers))
    if flags & _TRUNC or size > PACKET_LIMIT:
        return size, oversized()
    if not flags & _CTRUNC:
        return size, None
    if len(fds) < accept:
        return size, descriptor_limit()
    return size, RemoteProtocolError(
        f"a packet came with more than the {accept} descriptors that it may have here; "
        f"the link is dropped"
    )


def oversized() -> RemoteProtocolError:
    """Return the error for a packet that is longer than any may be."""
    return RemoteProtocolError(
        f"a packet of more than {PACKET_LIMIT:,} bytes came; the link is dropped"
    )


def descriptor_limit() -> DescriptorLimitError:
    """Return the error for a lost descriptor, with the numbers of this process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # Its size is the number of open files from Linux 6.2 on.  Listing the folder would itself
    # need a descriptor; before 6.2 the limit is the best guess, for the kernel says it is reached.
    return DescriptorLimitError(limit, os.stat("/proc/self/fd").st_size or limit)


def socket_error(failure: OSError, unsent: int) -> AsyncVMMError:
    """Translate what a socket call raised; ``unsent`` is the number of messages still queued."""
    error: AsyncVMMError
    if failure.errno in _GONE:
        error = PeerLostError(
            f"the connection broke ({failure.strerror}) with {unsent} messages unsent; "
            f"the other process closed it or is gone"
        )
    elif failure.errno == errno.ETOOMANYREFS:  # descriptors in flight count against the limit too
        error = descriptor_limit()
    else:
        error = LocalProtocolError(f"the socket refused a packet: {failure}")
    # Without its frames: a link keeps its error, and the frames lead back to whoever was sending,
    # whose views would live as long as that.
    error.__cause__ = failure.with_traceback(None)
    return error


def close_all(fds: Iterable[OwnedFd]) -> None:
    """Close each; those given away or closed before are left alone."""
    for fd in fds:
        fd.close()
