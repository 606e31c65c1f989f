"""Views that outlive their consumer, and maybe its event loop.

The socket is kept without a loop.  When the last view of an owner dies, the thread in which that
happens records the release event and sends the release itself, without blocking; with the last
owner the socket is closed.  If that cannot be done, the end of the process will tell.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable

from asyncvmm._backends.base import ConsumerRegion
from asyncvmm._consumer.lease import Lease
from asyncvmm._core import wire
from asyncvmm._errors import AsyncVMMError

_alive: set[Lingering] = set()
"""A view keeps its bytes and nothing else: the leases that wait for its end are kept here, also
when the program has let go of the consumer, the batch and the owner."""


class Lingering:
    """Settles what is left of a closed consumer."""

    def __init__(
        self,
        sock: socket.socket | None,
        region: ConsumerRegion,
        leases: Iterable[Lease],
        lane: Callable[[tuple[int, ...]], int],
    ) -> None:
        self._sock = sock
        self._lane = lane
        self._region = region
        self._left = set(leases)
        self._unsent: list[bytes] = []
        _alive.add(self)
        # Re-entrant: a finaliser may run inside another one's critical section.
        self._lock = threading.RLock()

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
                self._close()
                _alive.discard(self)

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
            self._sock.send(wire.frame(self._unsent), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return  # goes with the next one, or the end of the process says it
        except (OSError, AsyncVMMError):
            self._close()
            return
        self._unsent.clear()

    def _close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        self._region.close()
