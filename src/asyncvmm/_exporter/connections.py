"""The exporter's side of its sockets: who may come in, what they are told, when they are gone.

Everything here runs in callbacks on the loop's thread.  A connection is checked by the kernel's
word for who the peer is before it is sent a byte of the pool (inv. 12), it has a deadline for its
greeting, and its end is told to the core in one of two ways: *died* when its process is gone (the
pidfd says so, or end-of-file where the kernel has no pidfds), else *vanished*.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import Awaitable, Callable

from asyncvmm._backends.base import ExporterRegion
from asyncvmm._core import wire
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.ledger import Peer, PeerState
from asyncvmm._errors import (
    AccessDeniedError,
    AsyncVMMError,
    HandshakeError,
    RankError,
    RemoteProtocolError,
    VersionMismatchError,
)
from asyncvmm._exporter.access import Access
from asyncvmm._fds import OwnedFd
from asyncvmm._io.link import Link
from asyncvmm._io.liveness import DeathWatch, PeerIdentity
from asyncvmm._types import SegmentInfo

logger = logging.getLogger("asyncvmm.exporter")

GREETING_SECONDS = 10.0
"""How long a connection may take to say hello.  It holds nothing until then, so this only bounds
how many idle sockets a stranger can keep here."""

HANG_UP_SECONDS = 1.0
"""How long a peer may take to hang up after the last word was sent to it."""


class Connection:
    """One consumer's socket."""

    __slots__ = ("attaching", "deadline", "identity", "link", "peer", "segments", "watch")

    def __init__(self, identity: PeerIdentity) -> None:
        self.identity = identity
        self.link: Link
        self.peer: Peer | None = None
        self.watch: DeathWatch | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.attaching = False
        self.segments: set[int] = set()  # those it was sent

    def __repr__(self) -> str:
        return f"Connection(pid={self.identity.pid}, {self.peer!r})"


class Connections:
    """All sockets of one exporter."""

    def __init__(
        self,
        core: ExporterCore,
        region: ExporterRegion,
        *,
        access: Access,
        pump: Callable[[], None],
        debug: bool,
        consumer_count: int,
    ) -> None:
        self.identity = os.urandom(16)
        self.open: dict[int, Connection] = {}  # by peer id; the process may be all that is left
        self._core = core
        self._region = region
        self._access = access
        self._pump = pump
        self._debug = debug
        self._consumer_count = consumer_count
        self._loop = asyncio.get_running_loop()
        self._greeting: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: list[asyncio.Future[None]] = []
        self.leaving: set[int] = set()  # segments that are being given back

    # -- coming in ---------------------------------------------------------------------------

    def accept(self, sock: socket.socket, identity: PeerIdentity) -> None:
        """Take a connection that the listener accepted."""
        conn = Connection(identity)
        conn.link = Link(
            sock,
            loop=self._loop,
            frame=wire.frame,
            on_packet=lambda packet, fds: self._on_packet(conn, packet),
            on_end=lambda error: self._on_end(conn, error),
        )
        self._greeting.add(conn)
        conn.link.start()
        if not self._access.allows(identity.uid, identity.gid):
            self._reject(
                conn,
                AccessDeniedError(
                    f"user {identity.uid} may not connect: this exporter belongs to user "
                    f"{os.getuid()}; open it with allow_uids or allow_gids to share it",
                    uid=identity.uid,
                ),
                [identity.uid],
            )
            return
        conn.deadline = self._loop.call_later(GREETING_SECONDS, self._drop, conn)

    def _on_packet(self, conn: Connection, packet: memoryview) -> None:
        if conn.peer is None:
            self._greet(conn, packet)
            return
        if conn.peer.state is PeerState.CONNECTING:
            self._attach(conn, packet)
            return
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
                self._region.open_release(conn.peer.id, message.slot, message.handle)
        return messages

    def _greet(self, conn: Connection, packet: memoryview) -> None:
        try:
            hello = wire.decode_greeting(packet)
            if not isinstance(hello, wire.Hello):
                raise RemoteProtocolError(f"a consumer began with a {type(hello).__name__}")
            self._check(hello)
            conn.peer = self._core.admit(hello.rank, hello.name, hello.window)
        except VersionMismatchError as error:
            self._reject(conn, error, [error.ours])
        except RankError as error:
            numbers = [-1 if n is None else n for n in (error.rank, error.consumer_count)]
            self._reject(conn, error, numbers)
        except HandshakeError as error:
            self._reject(conn, error)
        else:
            self._stop_deadline(conn)
            self._greeting.discard(conn)
            self.open[conn.peer.id] = conn
            self._spawn(self._welcome(conn, conn.peer))

    def _check(self, hello: wire.Hello) -> None:
        info = self._region.info
        if hello.kind not in ("any", info.kind):
            raise HandshakeError(
                f"the consumer asked for {hello.kind} memory, but this exporter's pool is "
                f"{info.kind} memory; connect with device='auto' or one of that kind",
                reason="kind",
            )
        if hello.writable != info.writable:
            raise HandshakeError(
                f"writable views need both ends to agree: the exporter has "
                f"writable={info.writable}, the consumer writable={hello.writable}",
                reason="writable",
            )
        if not hmac.compare_digest(hello.secret, self._access.secret):
            raise AccessDeniedError("the consumer's secret is not the exporter's")

    async def _welcome(self, conn: Connection, peer: Peer) -> None:
        """Send the pool, segment by segment; nothing is delivered before they are mapped."""
        segments = self._missing(conn)
        welcome = wire.Welcome(
            self.identity,
            peer.id,
            self._consumer_count,
            self._region.info,
            len(segments),
            self._debug,
        )
        conn.link.post(wire.encode_greeting(welcome))
        conn.link.flush()
        for segment in segments:
            await self.send_segment(conn, segment)

    def _attach(self, conn: Connection, packet: memoryview) -> None:
        message = wire.decode_greeting(packet)
        if not isinstance(message, wire.Attached) or conn.attaching or not conn.segments:
            raise RemoteProtocolError(
                f"a consumer sent a {type(message).__name__} where only one Attached may come"
            )
        conn.attaching = True
        assert conn.peer is not None
        self._spawn(self._open(conn, conn.peer))

    async def _open(self, conn: Connection, peer: Peer) -> None:
        """Begin deliveries, with what waited for this member."""
        while missing := self._missing(conn):  # the pool grew during the handshake
            await self.send_segment(conn, missing[0])
        if peer.state is not PeerState.CONNECTING or conn.link.closed:
            return
        if conn.identity.pidfd is not None:
            conn.watch = DeathWatch(self._loop, conn.identity.pidfd, lambda: self._on_death(conn))
        self._core.open(peer)
        self._pump()
        self.changed()

    def _missing(self, conn: Connection) -> list[SegmentInfo]:
        return [
            segment
            for segment in self._region.segments()
            if segment.index not in conn.segments and segment.index not in self.leaving
        ]

    async def send_segment(self, conn: Connection, segment: SegmentInfo) -> None:
        """Export one segment to one consumer.  Exporting may take a millisecond: off the loop."""
        handle = await asyncio.to_thread(self._region.export, segment.index)
        fds = [handle] if isinstance(handle, OwnedFd) else []
        conn.segments.add(segment.index)
        if segment.index in self.leaving or conn.link.closed:
            for fd in fds:
                fd.close()
            return
        data = b"" if isinstance(handle, OwnedFd) else handle
        conn.link.post(wire.encode(wire.Segment(segment, data)), fds)

    def _reject(self, conn: Connection, error: HandshakeError, numbers: list[int] = []) -> None:  # noqa: B006 - never changed
        self._stop_deadline(conn)
        logger.info("refused a consumer (pid %s): %s", conn.identity.pid, error)
        rejected = wire.Rejected(error.reason, str(error)[:1024], numbers)
        conn.link.post(wire.encode_greeting(rejected))
        self._spawn(self._hang_up(conn))

    async def _hang_up(self, conn: Connection) -> None:
        await conn.link.finish(HANG_UP_SECONDS)
        self._forget(conn)

    # -- going -------------------------------------------------------------------------------

    def _on_end(self, conn: Connection, error: Exception | None) -> None:
        """The socket is gone; the process may live."""
        if error is not None:
            logger.warning("dropped the link to %r: %s", conn, error)
        self._stop_deadline(conn)
        self._greeting.discard(conn)
        peer = conn.peer
        if peer is None:
            self._forget(conn)
        elif conn.watch is None or conn.watch.dead():
            self._on_death(conn)
        else:
            self._core.vanished(peer.id)
            if peer.holds:
                logger.warning(
                    "consumer %r (pid %s) lost its connection but lives; %d owners it holds are "
                    "quarantined until it releases them or ends",
                    peer.member,
                    conn.identity.pid,
                    len(peer.holds),
                )
            else:
                self._forget(conn)
            self._pump()
            self.changed()

    def _on_death(self, conn: Connection) -> None:
        """The process is gone: what it said last counts, the rest of its debts are lost."""
        peer = conn.peer
        if peer is None or peer.id not in self.open:
            return
        if not conn.link.closed:
            conn.link.read_pending()
            conn.link.abort()
        if peer.holds:
            logger.warning(
                "consumer %r (pid %s) died holding %d owners",
                peer.member,
                conn.identity.pid,
                len(peer.holds),
            )
        self._core.died(peer.id)
        self._forget(conn)
        self._pump()
        self._region.forget_peer(peer.id)
        self.changed()

    def _drop(self, conn: Connection) -> None:
        logger.info("a connection (pid %s) said no hello in time", conn.identity.pid)
        conn.link.abort()
        self._forget(conn)

    def _stop_deadline(self, conn: Connection) -> None:
        if conn.deadline is not None:
            conn.deadline.cancel()
            conn.deadline = None

    def _forget(self, conn: Connection) -> None:
        self._stop_deadline(conn)
        self._greeting.discard(conn)
        if conn.peer is not None:
            self.open.pop(conn.peer.id, None)
        if conn.watch is not None:
            conn.watch.close()
        if conn.identity.pidfd is not None:
            conn.identity.pidfd.close()

    def _spawn(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except AsyncVMMError as error:
                logger.warning("a handshake failed: %s", error)

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- for the exporter --------------------------------------------------------------------

    def attached(self) -> int:
        """Return how many consumers are open now."""
        return sum(
            conn.peer is not None and conn.peer.state is PeerState.OPEN
            for conn in self.open.values()
        )

    async def wait_attached(self, count: int) -> None:
        """Wait until at least ``count`` consumers are open at once."""
        while self.attached() < count:
            future = self._loop.create_future()
            self._changed.append(future)
            await future

    def changed(self) -> None:
        """Wake whoever waits for consumers to come."""
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    async def finish(self) -> None:
        """Send every last word, let peers hang up, close every socket."""
        conns = [*self.open.values(), *self._greeting]
        await asyncio.gather(*(self._hang_up(conn) for conn in conns))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def abort(self) -> None:
        """Close every socket at once."""
        for conn in [*self.open.values(), *self._greeting]:
            conn.link.abort()
            self._forget(conn)
        for task in self._tasks:
            task.cancel()
