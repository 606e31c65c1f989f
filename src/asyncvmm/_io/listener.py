"""The socket an exporter listens on, and how a consumer reaches it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from asyncvmm._errors import (
    AccessDeniedError,
    DescriptorLimitError,
    ExporterNotFoundError,
    HandshakeError,
)
from asyncvmm._fds import OwnedFd, close_after_fork
from asyncvmm._io.binding import Node, bind, new_socket, node_at
from asyncvmm._io.fitting import fitting
from asyncvmm._io.liveness import PeerIdentity, identify, peer_has_ended
from asyncvmm._io.names import Address
from asyncvmm._io.packets import descriptor_limit

ACCEPT_PAUSE = 0.1
"""Seconds without accepting once the open-file limit is met."""

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1
"""Seconds between two tries to connect."""

_LIMITS = frozenset({errno.EMFILE, errno.ENFILE})
_NO_ROOM = _LIMITS | {errno.ENOBUFS, errno.ENOMEM}
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED})

_logger = logging.getLogger("asyncvmm.io")


class Listener:
    """A socket that listens under a name.

    The node of the name is unlinked only by the process that made it, and only while it is
    still the same node.
    """

    def __init__(self, sock: socket.socket, address: Address, node: Node | None) -> None:
        self.address = address
        self._sock = sock
        self._node = node
        self._made_in = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_connection: Callable[[socket.socket, PeerIdentity], None] | None = None
        self._warned = False
        self._refusal: Callable[[DescriptorLimitError], bytes] | None = None
        # At the open-file limit it is closed, and makes room for one that is told of the limit.
        self._spare: OwnedFd | None = None

    @classmethod
    def bind(cls, address: Address, *, shared: bool = False) -> Self:
        """Take the name and listen.  Blocking: call it in a worker thread.

        Others than this user can reach a node only if it is ``shared``.
        Raises NameInUseError if a live exporter has the name, AccessDeniedError if another user
        has it or its folder, ArgumentError if the folder is not there or no socket is in the way.
        """
        sock, node = bind(address, shared=shared)
        listener = cls(sock, address, node)
        listener._take_spare()
        return listener

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_connection: Callable[[socket.socket, PeerIdentity], None],
        refusal: Callable[[DescriptorLimitError], bytes] | None = None,
    ) -> None:
        """Accept from now on; ``on_connection`` takes the socket and the pidfd.

        At the open-file limit who comes is sent ``refusal`` instead, and the end.
        """
        self._loop = loop
        self._refusal = refusal
        self._on_connection = on_connection
        loop.add_reader(self._sock.fileno(), self._accept)

    def stop(self) -> None:
        """Accept no more.  On the loop's thread; never blocks; again is a no-op."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed() and self._sock.fileno() >= 0:
            loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        """Stop, unlink the node if it is still ours, close; again is a no-op.

        It makes two quick file calls: after :meth:`stop` a worker thread may call it.
        """
        self.stop()
        node, self._node = self._node, None
        path = self.address.sockaddr
        # While the socket still listens nobody else takes the name, so nothing comes between
        # the look and the unlink.  A forked child must leave its parent's node alone.
        try:
            if node is not None and os.getpid() == self._made_in and node_at(path) == node:
                os.unlink(path)
        except OSError as error:  # the folder may be another by now, or closed to this user
            _logger.warning("the name %s stays behind: %s", self.address.display, str(error))
        finally:
            self._sock.close()
            if self._spare is not None:
                self._spare.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno in _LIMITS and self._spare is not None:
                return self._turn_away(self._spare)
            if error.errno not in _NO_ROOM:
                self.stop()  # else the loop would call again at once, for ever
                raise
            self._pause(error)
            return
        close_after_fork(sock).setblocking(False)
        try:
            peer = identify(sock)
        except DescriptorLimitError as error:
            self._refuse(sock, error)
            return
        self._warned = False
        try:
            if self._on_connection is not None:
                self._on_connection(sock, peer)
        except BaseException:
            sock.close()
            if peer.pidfd is not None:
                peer.pidfd.close()
            raise

    def _turn_away(self, spare: OwnedFd) -> None:
        """Accept one with the spare descriptor, to say that there is none for it."""
        error = descriptor_limit()
        spare.close()
        self._spare = None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as taken:  # by another thread, in between
            self._pause(taken)
        else:
            sock.setblocking(False)
            self._refuse(sock, error)
        self._take_spare()

    def _refuse(self, sock: socket.socket, error: DescriptorLimitError) -> None:
        self._warn(error)
        with sock, suppress(OSError):  # it has gone, or does not read
            if self._refusal is not None:
                sock.send(self._refusal(error), socket.MSG_NOSIGNAL)
            sock.recv(1)  # its first word, if it is here: to close with unread input is a reset

    def _take_spare(self) -> None:
        try:
            self._spare = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC))
        except OSError as error:  # they wait in the backlog then
            _logger.debug("%s has no spare descriptor: %s", self.address.display, error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning("%s accepts nobody for now: %s", self.address.display, error)

    def _pause(self, error: OSError) -> None:
        """Leave connections in the backlog for a while: the loop would call again at once."""
        if self._loop is None:
            return
        self._warn(descriptor_limit() if error.errno in _LIMITS else error)
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(ACCEPT_PAUSE, self._resume)

    def _resume(self) -> None:
        if self._loop is not None:  # not stopped meanwhile
            if self._spare is None:
                self._take_spare()
            self._loop.add_reader(self._sock.fileno(), self._accept)


async def connect(address: Address, *, wait: bool) -> socket.socket:
    """Return a non-blocking socket that is connected to the exporter of that name.

    ``wait`` waits until there is one; else ExporterNotFoundError is raised at once.  A full
    backlog is waited for in both cases: the exporter is there, it is only busy.  Raises
    AccessDeniedError if another user has the name.
    """
    sock = new_socket()
    pause = FIRST_PAUSE
    try:
        while True:
            try:
                with fitting(address) as sockaddr:
                    sock.connect(sockaddr)
            except OSError as error:
                if error.errno in _NOT_THERE:
                    if not wait:
                        raise _not_found(address) from error
                elif error.errno not in {errno.EAGAIN, errno.EINTR}:
                    raise _refused(address, error) from error
            else:
                if not peer_has_ended(sock):
                    return sock
                if not wait:
                    raise _not_found(address)
                sock.close()  # a child of the dead one has its socket, and nobody answers
                sock = new_socket()
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
    except BaseException:
        sock.close()
        raise


def _not_found(address: Address) -> ExporterNotFoundError:
    shown = address.sockaddr.replace("\0", "@")
    return ExporterNotFoundError(
        f"no exporter listens as {address.display!r} (looked at {shown}); start it first, or "
        f"wait for it",
        name=address.display,
    )


def _refused(address: Address, error: OSError) -> HandshakeError:
    if error.errno in {errno.EACCES, errno.EPERM}:
        return AccessDeniedError(
            f"user {os.geteuid()} may not connect to {address.display!r}, which another user "
            f"made; run both processes as one user"
        )
    if error.errno == errno.EPROTOTYPE:
        return HandshakeError(
            f"{address.display!r} is a socket of another kind, not an exporter's; check the name",
            reason="not_an_exporter",
        )
    return HandshakeError(f"{address.display!r} cannot be connected to: {error}", reason="connect")
