"""The exporter's side of its sockets: who may come in, what they are told, when they are gone.

Everything here runs in callbacks on the loop's thread.  A connection is checked by the kernel's
word for who the peer is before it is sent a byte of the pool (inv. 12), it has a deadline for its
greeting, and its end is told to the core in one of two ways: *died* when its process is gone (the
pidfd says so, or end-of-file where the kernel has no pidfds), else *vanished*.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

from asyncvmm._backends.base import ExporterRegion
from asyncvmm._core import wire
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import AsyncVMMError, DeviceLostError, PeerLostError, RemoteProtocolError
from asyncvmm._exporter.access import Access
from asyncvmm._exporter.connection import Connection
from asyncvmm._exporter.handshake import Handshake
from asyncvmm._exporter.observing import Observers
from asyncvmm._exporter.resuming import resume
from asyncvmm._fds import OwnedFd
from asyncvmm._io.busy import Busy
from asyncvmm._io.link import Link
from asyncvmm._io.liveness import DeathWatch, PeerIdentity
from asyncvmm._io.waiting import wake, woken
from asyncvmm._types import SegmentInfo

logger = logging.getLogger("asyncvmm.exporter")

GREETING_SECONDS = 10.0
"""How long a connection may take to say hello; it holds nothing but a socket until then."""

ATTACHING_SECONDS = 300.0
"""How long a consumer, which holds nothing yet, may have its seat before it has mapped the pool."""

MOST_GREETING = 64
"""Connections without a hello at once; of more the oldest is dropped.  An honest one is greeted in
the loop turn after it came, so only who keeps quiet can be among them for long."""

DYING_SECONDS = 1.0
"""How long a consumer may live without its socket before that is worth a word: the kernel closes
a dying process's sockets before it tells of the death.  Its owners are quarantined at once."""

HANG_UP_SECONDS = 1.0
"""How long a peer may take to hang up after the last word was sent to it."""


class Connections:
    """All sockets of one exporter."""

    def __init__(
        self,
        core: ExporterCore,
        region: ExporterRegion,
        *,
        access: Access,
        pump: Callable[[], None],
        gone: Callable[[int, bool], None],
        dying: Callable[[int], None],
        open_release: Callable[[int, int, bytes], None],
        lost: Callable[[DeviceLostError], None],
        observers: Observers,
        debug: bool,
        consumer_count: int,
        busy: Busy,
    ) -> None:
        self.open: dict[int, Connection] = {}  # by peer id; the process may be all that is left
        self.busy = busy  # one for all: whoever waits here waits for them all
        self._core = core
        self._region = region
        self._pump = pump
        self._gone = gone  # of a peer that comes no more: its id, and whether its process died
        self._dying = dying  # of a peer whose process died and whose last words are to be read
        self._open_release = open_release
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._greeting: dict[Connection, None] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: list[asyncio.Future[None]] = []
        self.handshake = Handshake(
            core,
            region,
            access,
            consumer_count=consumer_count,
            debug=debug,
            spawn=self._spawn,
            admitted=self._admit,
            opened=self._on_open,
            rejected=self._on_reject,
            take_over=partial(resume, core=core, known=self.open, ended=self._on_end),
            observers=observers,
        )

    # -- coming in ---------------------------------------------------------------------------

    def accept(self, sock: socket.socket, identity: PeerIdentity) -> None:
        """Take a connection that the listener accepted."""
        conn = Connection(identity)
        conn.link = Link(
            sock,
            loop=self._loop,
            frame=wire.frame,
            on_packet=partial(self._on_packet, conn),
            on_end=lambda error: self._on_end(conn, error),
        )
        conn.link.busy = self.busy
        while len(self._greeting) >= MOST_GREETING:
            self._drop(next(iter(self._greeting)))
        self._greeting[conn] = None
        conn.link.start()
        if self.handshake.check_user(conn):
            conn.deadline = self._loop.call_later(GREETING_SECONDS, self._drop, conn)

    def _on_packet(self, conn: Connection, packet: memoryview, _: list[OwnedFd]) -> None:
        if conn.rejected:
            return
        if conn.peer is None:
            self.handshake.greet(conn, packet)
            if conn in self.handshake.observers:
                self._greeting.pop(conn, None)
            return
        if conn.peer.state is PeerState.CONNECTING:
            return self.handshake.attach(conn, packet)
        self._core.receive(conn.peer.id, self._decoded(conn, packet))
        self._pump()

    def _decoded(self, conn: Connection, packet: memoryview) -> list[wire.FromConsumer]:
        """Decode a packet; a slot's release event is taken before the core sees the release."""
        messages = wire.decode_from_consumer(packet)
        assert conn.peer is not None
        for message in messages:
            if type(message) is wire.Release and message.handle:
                if not 0 <= message.slot < self._region.info.slots:
                    raise RemoteProtocolError(
                        f"a consumer sent an event for slot {message.slot} of a pool with "
                        f"{self._region.info.slots} slots"
                    )
                self._open_release(conn.peer.id, message.slot, message.handle)
        return messages

    def _admit(self, conn: Connection) -> None:
        """It has a seat; from now on the end of its process must be seen."""
        conn.stop_deadline()
        self._greeting.pop(conn, None)
        assert conn.peer is not None
        self.open[conn.peer.id] = conn
        if conn.coming:
            late = RemoteProtocolError("a consumer did not map the pool in time")
            conn.deadline = self._loop.call_later(ATTACHING_SECONDS, self._give_up_on, conn, late)
        if conn.identity.pidfd is not None:
            conn.watch = DeathWatch(self._loop, conn.identity.pidfd, lambda: self._on_death(conn))

    def _on_open(self, conn: Connection) -> None:
        conn.stop_deadline()
        self._pump()
        self.changed()

    def _on_reject(self, conn: Connection) -> None:
        conn.stop_deadline()
        conn.rejected = True  # it may not try again on this connection
        self._spawn(conn, self._hang_up(conn))

    async def _hang_up(self, conn: Connection) -> None:
        self.handshake.dismiss(conn)
        await conn.link.finish(HANG_UP_SECONDS)
        self._forget(conn)

    # -- going -------------------------------------------------------------------------------

    def _on_end(self, conn: Connection, error: Exception | None) -> None:
        """The socket is gone; the process may live."""
        if error is not None and not isinstance(error, PeerLostError):
            # Text, for whoever keeps a log record would keep the link and its memory with it.
            logger.warning("dropped the link to %s: %s", repr(conn), str(error))
        conn.stop_deadline()
        self._greeting.pop(conn, None)
        peer = conn.peer
        if peer is None:
            self._forget(conn)
        elif conn.watch is None or conn.watch.dead():
            self._on_death(conn)
        else:
            self._core.vanished(peer.id)
            if peer.absent:
                conn.deadline = self._loop.call_later(DYING_SECONDS, conn.tell_absent)
            self._pump()
            if not peer.absent:
                self._gone(peer.id, False)  # says when it need not be watched any more
            self.changed()

    def left(self, peer_id: int) -> None:
        """Forget a peer that comes no more and whose end nobody waits for."""
        if peer_id in self.open:
            self._forget(self.open[peer_id])

    def _on_death(self, conn: Connection) -> None:
        """The process is gone: what it said last counts, the rest of its debts are lost."""
        peer = conn.peer
        if peer is None or peer.id not in self.open:
            return
        self._dying(peer.id)
        if not conn.link.closed:
            conn.link.read_pending()
            conn.link.abort()
        before = self._core.tally.lost
        self._core.died(peer.id)
        if lost := self._core.tally.lost - before:  # what goes to another consumer is not
            logger.warning("%s died holding %d owners", conn.who, lost)
        self._forget(conn)
        self._pump()
        self._gone(peer.id, True)
        self.changed()

    def _drop(self, conn: Connection) -> None:
        logger.info("a connection (pid %s) kept quiet for too long", conn.identity.pid)
        conn.link.abort()
        self._forget(conn)

    def _forget(self, conn: Connection) -> None:
        self._greeting.pop(conn, None)
        self.handshake.observers.forget(conn)
        if conn.peer is not None:
            self.open.pop(conn.peer.id, None)
        conn.close()

    def _spawn(self, conn: Connection, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(self._guard(conn, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step has not even begun the work.
        task.add_done_callback(lambda _: work.close())

    async def _guard(self, conn: Connection, work: Awaitable[None]) -> None:
        """Do something for one consumer; where that fails its link ends, and nothing else."""
        try:
            await work
        except AsyncVMMError as error:
            if isinstance(error, DeviceLostError):
                self._lost(error)
            if not conn.link.closed:
                await self.handshake.explain(conn, error, HANG_UP_SECONDS)
                return self._give_up_on(conn, error)
            logger.info("nothing more is done for %s: %s", repr(conn), str(error))

    def _give_up_on(self, conn: Connection, error: AsyncVMMError) -> None:
        conn.link.abort()
        self._on_end(conn, error)

    # -- for the exporter --------------------------------------------------------------------

    async def share(self, segment: SegmentInfo) -> None:
        """Send a new segment to all who are open; the others get it as they open.

        Raises BackendError if it cannot be exported; some may have it then.
        """
        for conn in list(self.open.values()):
            if conn.opened and segment.index not in conn.segments:
                await self.handshake.send_segment(conn, segment)

    def coming(self) -> bool:
        """Say whether some consumer was promised segments and has not said that it has them."""
        return any(conn.coming for conn in self.open.values())

    def attached(self) -> int:
        """Return how many consumers are open now."""
        return sum(conn.opened for conn in self.open.values())

    async def wait_attached(self, count: int, guard: Callable[[], None]) -> None:
        """Wait until ``count`` consumers are open at once; ``guard`` raises if none can come."""
        while self.attached() < count:
            guard()
            await woken(self._changed)

    def changed(self) -> None:
        """Wake whoever waits for consumers to come."""
        wake(self._changed)

    async def finish(self) -> None:
        """Send every last word, let peers hang up, close every socket."""
        self.handshake.observers.close()
        await asyncio.gather(*map(self._hang_up, [*self.open.values(), *self._greeting]))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def abort(self) -> None:
        """Close every socket at once."""
        self.changed()
        self.handshake.observers.close()
        for conn in [*self.open.values(), *self._greeting]:
            conn.link.abort()
            self._forget(conn)
        for task in self._tasks:
            task.cancel()
