"""Views that outlive their consumer, and maybe its event loop.

The socket is kept without a loop.  When the last view of an owner dies, the thread in which that
happens records the release event and sends the release itself, without blocking; with the last
owner the socket is closed.  Where the exporter stands still and the kernel takes no more, a thread
waits to say the rest.  It also waits where releases have events, for the exporter cannot open one
that is gone.  If that cannot be done, the end of the process will tell.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from asyncvmm._backends.base import ConsumerRegion
from asyncvmm._consumer.lease import Lease
from asyncvmm._core import wire
from asyncvmm._errors import AsyncVMMError
from asyncvmm._fds import close_after_fork
from asyncvmm._io.link import Link

MOST_AT_ONCE = 128
"""Messages of one packet: releases with their events, which are the longest, fit twice."""

GOODBYE_THREAD = "asyncvmm-goodbye"

_alive: set[Lingering] = set()
"""A view keeps its bytes and nothing else: the leases that wait for its end are kept here, also
when the program has let go of the consumer, the batch and the owner."""


class Lingering:
    """Settles what is left of a closed consumer."""

    def __init__(
        self,
        link: Link,
        region: ConsumerRegion,
        leases: Iterable[Lease],
        lane: Callable[[tuple[int, ...]], int],
        *,
        fenced: bool,
    ) -> None:
        self._sock: socket.socket | None = None
        self._unsent: list[bytes] = []
        if not link.closed:
            self._sock, self._unsent = link.detach()
            close_after_fork(self._sock)
        self._lane = lane
        self._fenced = fenced
        self._region = region
        self._left = set(leases)
        _alive.add(self)
        # Re-entrant: a finaliser may run inside another one's critical section.
        self._lock = threading.RLock()
        if not self._left:
            self._end()

    def settle(self, lease: Lease) -> None:
        """Release one owner; called from any thread, also from a finaliser."""
        with self._lock:
            if lease.done:
                return
            lease.done = True
            self._left.discard(lease)
            if self._sock is not None:
                self._say(lease)
            if not self._left:
                self._end()

    def _say(self, lease: Lease) -> None:
        frame = lease.frame
        handle = b""
        try:
            if lease.streams:
                handle = self._region.record_release(frame.slot, lease.streams)
            lane = self._lane(lease.streams) if lease.streams else 0
            release = wire.Release(frame.slot, frame.generation, handle, lane)
            self._unsent.append(wire.encode(release))
            assert self._sock is not None
            _send(self._sock, self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # goes with the next one, or at the end
        except (OSError, AsyncVMMError):
            self._close()

    def _end(self) -> None:
        """Close with the last owner; what is not heard yet is left to a thread, which may wait."""
        _alive.discard(self)
        sock = self._sock
        if sock is not None and (self._unsent or self._fenced):
            saying = threading.Thread(
                target=_say_rest,
                args=(sock, self._unsent, self._region),
                name=GOODBYE_THREAD,
                daemon=True,
            )
            with suppress(RuntimeError):  # the interpreter is ending, and that will tell
                saying.start()
                self._sock = None
                return
        self._close()

    def _close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        self._region.close()


def _say_rest(sock: socket.socket, unsent: list[bytes], region: ConsumerRegion) -> None:
    """Wait until the exporter has heard it all, and so hangs up, or is gone; then let go."""
    try:
        with sock, suppress(OSError):
            sock.setblocking(True)
            _send(sock, unsent)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1):
                pass
    finally:
        region.close()


def _send(sock: socket.socket, unsent: list[bytes], flags: int = 0) -> None:
    """Send messages and take them from the list; on an error those that were not sent stay."""
    while unsent:
        some = unsent[:MOST_AT_ONCE]
        sock.send(wire.frame(some), flags | socket.MSG_NOSIGNAL)
        del unsent[: len(some)]
