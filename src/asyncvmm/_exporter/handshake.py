"""How a consumer comes in: hello, welcome with the pool, attached, open.

Nothing of the pool is sent before the greeting was checked, and nothing is delivered before the
consumer says that it has mapped every segment; one that fails half-way has nothing to give back.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Callable, Coroutine, Sequence

from asyncvmm._backends.base import ExporterRegion
from asyncvmm._core import wire
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.ledger import Peer, PeerState
from asyncvmm._errors import (
    AccessDeniedError,
    AsyncVMMError,
    BackendError,
    DescriptorLimitError,
    ExporterLimitError,
    HandshakeError,
    RankError,
    RemoteProtocolError,
    VersionMismatchError,
)
from asyncvmm._exporter.access import Access
from asyncvmm._exporter.connection import Connection
from asyncvmm._exporter.observing import Observers
from asyncvmm._fds import OwnedFd
from asyncvmm._io.liveness import has_ended
from asyncvmm._io.packets import descriptor_limit
from asyncvmm._io.threads import in_thread
from asyncvmm._types import SegmentInfo

logger = logging.getLogger("asyncvmm.exporter")


class Handshake:
    """Brings consumers in.

    ``spawn`` runs a coroutine for the exporter, ``admitted`` is told of a consumer that got a
    seat, ``opened`` of one to which deliveries have begun, ``rejected`` of one to hang up on.
    ``take_over`` puts a connection in the place of a broken one.
    """

    def __init__(
        self,
        core: ExporterCore,
        region: ExporterRegion,
        access: Access,
        *,
        consumer_count: int,
        debug: bool,
        spawn: Callable[[Connection, Coroutine[object, object, None]], None],
        admitted: Callable[[Connection], None],
        opened: Callable[[Connection], None],
        rejected: Callable[[Connection], None],
        take_over: Callable[[Connection, wire.Resume, bytes], wire.Resumed],
        observers: Observers,
    ) -> None:
        self.identity = os.urandom(16)
        self.leaving: set[int] = set()  # segments that are being given back
        self._core = core
        self._region = region
        self._access = access
        self._consumer_count = consumer_count
        self._debug = debug
        self._spawn = spawn
        self._admitted = admitted
        self._opened = opened
        self._rejected = rejected
        self._take_over = take_over
        self.observers = observers

    def check_user(self, conn: Connection) -> bool:
        """Refuse a process of a user that may not connect; say whether it may."""
        uid, gid = conn.identity.uid, conn.identity.gid
        if self._access.allows(uid, gid):
            return True
        error = AccessDeniedError(
            f"user {uid} may not connect: this exporter belongs to user {os.geteuid()}; open it "
            f"with allow_uids or allow_gids to share it",
            uid=uid,
        )
        self._reject(conn, error, [uid])
        return False

    def greet(self, conn: Connection, packet: memoryview) -> None:
        """Take a hello: give the consumer a seat, tell the observer, or say why not."""
        try:
            hello = wire.decode_greeting(packet)
            if isinstance(hello, wire.Observe):
                self._check_secret(hello.secret)
                return self.observers.answer(conn)
            if conn in self.observers:
                raise RemoteProtocolError(f"an observer sent a {type(hello).__name__}")
            if isinstance(hello, wire.Resume):
                self._check_secret(hello.secret)
                return self._resume(conn, hello)
            if not isinstance(hello, wire.Hello):
                raise RemoteProtocolError(f"a consumer began with a {type(hello).__name__}")
            self._check(hello)
            self._check_alive(conn)
            conn.peer = self._core.admit(hello.rank, hello.name, hello.window)
        except VersionMismatchError as error:
            self._reject(conn, error, [error.ours])
        except RankError as error:
            numbers = [-1 if n is None else n for n in (error.rank, error.consumer_count)]
            self._reject(conn, error, numbers)
        except HandshakeError as error:
            self._reject(conn, error)
        else:
            self._admitted(conn)
            self._spawn(conn, self._welcome(conn, conn.peer))

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
        self._check_secret(hello.secret)

    def _check_alive(self, conn: Connection) -> None:
        """Give no seat to who said hello and died while this exporter was busy."""
        pidfd = conn.identity.pidfd
        if pidfd is not None and has_ended(pidfd):
            raise HandshakeError("its process has ended meanwhile", reason="ended")

    def _check_secret(self, secret: bytes) -> None:
        if not hmac.compare_digest(secret, self._access.secret):
            raise AccessDeniedError("the consumer's secret is not the exporter's")

    def _resume(self, conn: Connection, message: wire.Resume) -> None:
        """Let a consumer whose link broke say what became of what it holds."""
        answer = self._take_over(conn, message, self.identity)
        self._admitted(conn)
        conn.link.post(wire.encode_greeting(answer))
        conn.link.flush()

    async def _welcome(self, conn: Connection, peer: Peer) -> None:
        """Send the pool, segment by segment; nothing is delivered before they are mapped."""
        segments = self._missing(conn)
        # Before the welcome: until then a refusal is an answer like that to any hello.
        first = await in_thread(self._region.export, segments[0].index)
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
        self._send(conn, segments[0], first)
        for segment in segments[1:]:
            await self.send_segment(conn, segment)

    def attach(self, conn: Connection, packet: memoryview) -> None:
        """Take a consumer's word that the pool is mapped."""
        try:
            message = wire.decode_greeting(packet)
        except VersionMismatchError as error:
            raise RemoteProtocolError(f"a consumer changed its version: {error}") from None
        if not isinstance(message, wire.Attached) or conn.attaching or not conn.segments:
            raise RemoteProtocolError(
                f"a consumer sent a {type(message).__name__} where only one Attached may come"
            )
        conn.attaching = True
        assert conn.peer is not None
        self._spawn(conn, self._open(conn, conn.peer))

    async def _open(self, conn: Connection, peer: Peer) -> None:
        """Begin deliveries, with what waited for this member."""
        while missing := self._missing(conn):  # the pool grew during the handshake
            await self.send_segment(conn, missing[0])
        if peer.state is not PeerState.CONNECTING or conn.link.closed:
            return
        self._core.open(peer)
        self._opened(conn)

    def dismiss(self, conn: Connection) -> None:
        """Tell a consumer that was welcomed, and may still be mapping, that nothing comes."""
        peer = conn.peer
        if peer is not None and peer.state is PeerState.CONNECTING and conn.segments:
            if not peer.told:
                conn.link.post(wire.encode(wire.Goodbye()))
            peer.told = True

    def _missing(self, conn: Connection) -> list[SegmentInfo]:
        return [
            segment
            for segment in self._region.segments()
            if segment.index not in conn.segments and segment.index not in self.leaving
        ]

    async def send_segment(self, conn: Connection, segment: SegmentInfo) -> None:
        """Export one segment to one consumer.  Exporting may take a millisecond: off the loop."""
        self._send(conn, segment, await in_thread(self._region.export, segment.index))

    def _send(self, conn: Connection, segment: SegmentInfo, handle: OwnedFd | bytes) -> None:
        fds = [handle] if isinstance(handle, OwnedFd) else []
        conn.segments.add(segment.index)
        if segment.index in self.leaving or conn.link.closed:
            for fd in fds:
                fd.close()
            return
        data = b"" if isinstance(handle, OwnedFd) else handle
        conn.link.post(wire.encode(wire.Segment(segment, data)), fds)

    def _reject(self, conn: Connection, error: HandshakeError, numbers: Sequence[int] = ()) -> None:
        logger.info("refused a consumer (pid %s): %s", conn.identity.pid, str(error))
        conn.link.post(wire.encode_greeting(rejection(error, numbers)))
        self._rejected(conn)

    async def explain(self, conn: Connection, error: AsyncVMMError, seconds: float) -> None:
        """Say what failed to a consumer that has a seat, and is not open; hang up in order."""
        if conn.peer is None or not isinstance(error, BackendError):
            return
        conn.rejected = True
        if error.code in {"EMFILE", "ENFILE"}:
            told = limit_reached(descriptor_limit())
        else:
            failed = HandshakeError(
                f"the exporter could not share its pool: {error}", reason="share"
            )
            told = rejection(failed)
        welcomed = bool(conn.segments)
        conn.link.post(wire.encode(told) if welcomed else wire.encode_greeting(told))
        await conn.link.finish(seconds)


def rejection(error: HandshakeError, numbers: Sequence[int] = ()) -> wire.Rejected:
    """Return the message that has a consumer raise the same error."""
    return wire.Rejected(error.reason, wire.clip(str(error)), [*numbers])


def refusal(error: DescriptorLimitError) -> bytes:
    """Return the packet for a newcomer for whom there is no descriptor here."""
    return wire.encode_greeting(limit_reached(error))


def limit_reached(error: DescriptorLimitError) -> wire.Rejected:
    """Return what a consumer is told for whom there is no descriptor here."""
    told = ExporterLimitError(
        f"the exporter cannot take another consumer: {error.used} of {error.limit} open files of "
        f"its process are in use; raise its limit (ulimit -n) or let it close some, then connect "
        f"again",
        limit=error.limit,
        used=error.used,
    )
    return rejection(told, (told.limit, told.used))
