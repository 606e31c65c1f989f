"""Connecting to an exporter."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from functools import partial
from typing import Generic, Literal, TypedDict, TypeVar, Unpack, cast, overload

from asyncvmm._consumer.coming import ComingIn
from asyncvmm._consumer.consumer import Consumer
from asyncvmm._consumer.handshake import Handshake, reach
from asyncvmm._consumer.reconnecting import ReconnectingConsumer
from asyncvmm._consumer.resuming import Resuming
from asyncvmm._consumer.tracing import TracedCore, follow
from asyncvmm._core import wire
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.wire import MAX_TEXT, MAX_WINDOW, check_secret
from asyncvmm._errors import ArgumentError, LocalProtocolError, RemoteProtocolError
from asyncvmm._io.busy import BUSY_POLL_SECONDS, Busy, check_busy_poll
from asyncvmm._io.chrome import write
from asyncvmm._io.names import check, resolve
from asyncvmm._io.threads import in_thread, made_in_thread
from asyncvmm._io.timeline import Timeline
from asyncvmm._tensors import DevicePort, check_device, open_port, preload
from asyncvmm._types import check_bool, check_ids, is_int, plain

ConsumerT = TypeVar("ConsumerT", Consumer, ReconnectingConsumer)


class _Options(TypedDict, total=False):
    device: str
    rank: int | None
    member: str | None
    prefetch: int
    wait: bool
    writable: bool
    secret: bytes | str
    allow_uids: Iterable[int]
    busy_poll: float
    trace: str | os.PathLike[str] | None
    _port: DevicePort | None


class connect(Generic[ConsumerT]):
    """Attach to an exporter: ``async with connect("vision", rank=0) as consumer``.

    ``name`` is the exporter's, as in ``open_exporter``.  ``device`` is where views are to be
    used: "auto" follows the exporter's memory; "cpu" or "cuda:N" insist.  Under Broadcast give
    the ``rank``; under Compete a ``member`` name may be given, and ``prefetch`` is how many
    batches may be delivered ahead of the one in work.  ``wait=True`` waits until the exporter is
    there.  ``writable=True`` asks for writable views; the exporter must have been opened so.
    The exporter must run as this user or as root, or as one of ``allow_uids``: whoever takes a
    name in a shared folder, or an abstract one, could else pass for it.

    ``reconnect=True`` gives a :class:`ReconnectingConsumer`, which goes on with the next exporter
    under the name when this one is gone, and says what was lost.  With ``wait=True`` that is so
    from the first one on: an exporter that dies before it has let anybody in is not told of.

    ``busy_poll`` is the most seconds that the loop polls without waiting for a batch, and only
    while batches usually come within half of that; 0 is for never.

    ``trace`` names a file for the timeline of every owner, written at the end; not together with
    ``reconnect``.  Each end writes its own, and one that another has is refused.  A folder may be
    given to all of them: each makes a file there, with its rank or name and its process in it.

    Entering raises ExporterNotFoundError, RankError, VersionMismatchError, AccessDeniedError or
    another HandshakeError, DescriptorLimitError or BackendError, and keeps nothing.  There is no
    timeout argument: wrap it in ``asyncio.timeout``; cancelling it is safe.

    Leaving refuses what is unread and releases the rest; owners whose views are still alive go
    back when the views do.
    """

    @overload
    def __init__(
        self: connect[Consumer],
        name: str | os.PathLike[str],
        *,
        reconnect: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> None: ...

    @overload
    def __init__(
        self: connect[ReconnectingConsumer],
        name: str | os.PathLike[str],
        *,
        reconnect: Literal[True],
        **options: Unpack[_Options],
    ) -> None: ...

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        device: str = "auto",
        rank: int | None = None,
        member: str | None = None,
        prefetch: int = 2,
        wait: bool = False,
        reconnect: bool = False,
        writable: bool = False,
        secret: bytes | str = b"",
        allow_uids: Iterable[int] = (),
        busy_poll: float = BUSY_POLL_SECONDS,
        trace: str | os.PathLike[str] | None = None,
        _port: DevicePort | None = None,
    ) -> None:
        check(name)
        check_device(device)
        self._name = name
        self._device = device
        _check_seat(rank, member, prefetch)
        if reconnect and trace is not None:
            raise ArgumentError("trace= follows the owners of one exporter; leave out reconnect=")
        kind = "any" if device == "auto" else "host" if device == "cpu" else "cuda"
        if _port is not None:
            kind = _port.kind
        self._hello = wire.Hello(
            rank=plain(rank),
            name=plain(member),
            kind=kind,
            writable=check_bool(writable, "writable"),
            window=prefetch,
            secret=check_secret(secret),
        )
        self._greeting = wire.encode_greeting(self._hello)  # refuses what is out of bounds
        self._users = frozenset((os.geteuid(), 0, *check_ids(allow_uids, "allow_uids")))
        self._wait = check_bool(wait, "wait")
        self._busy_poll = check_busy_poll(busy_poll)
        self._reconnect = check_bool(reconnect, "reconnect")
        self._timeline = None if trace is None else Timeline(trace)
        self._port = _port
        self._consumer: Consumer | ReconnectingConsumer | None = None

    async def __aenter__(self) -> ConsumerT:
        if self._consumer is not None:
            raise LocalProtocolError("connect() can be entered once; call it again")
        tries = ComingIn(partial(self._come_in, wait=True)) if self._reconnect else None
        try:
            first = await self._first(tries)
        except BaseException:
            if self._timeline is not None:
                self._timeline.release()
            raise
        self._consumer = first if tries is None else ReconnectingConsumer(first, tries)
        return cast("ConsumerT", self._consumer)

    async def _first(self, tries: ComingIn | None) -> Consumer:
        if self._timeline is not None:
            who = "consumer" if self._hello.rank is None else f"rank-{self._hello.rank}"
            name = "" if self._hello.name is None else f"-{self._hello.name}"
            claim = partial(self._timeline.prepare, f"{who}{name}")
            await made_in_thread(claim, lambda _: None)
        if self._port is None:
            # Before the handshake, so that an exporter never waits for our imports.
            await in_thread(preload, self._device)
        if tries is not None and self._wait:
            return await tries.next(seat_seconds=0.0)  # we have had no seat that may be ours yet
        return await self._come_in(wait=self._wait)

    async def _come_in(self, *, wait: bool) -> Consumer:
        address = await in_thread(resolve, self._name)
        handshake = await reach(address, self._greeting, self._users, wait=wait)
        try:
            welcome = await handshake.answer(wire.Welcome)
            consumer = await self._attach(handshake, welcome)
        except BaseException:
            handshake.give_up()
            raise
        greeting = wire.Resume(welcome.exporter, welcome.peer, self._hello.secret)
        consumer._resuming = Resuming(
            consumer, address, wire.encode_greeting(greeting), self._users
        )
        return consumer

    async def _attach(self, handshake: Handshake, welcome: wire.Welcome) -> Consumer:
        """Map the exporter's segments and say so."""
        info = welcome.region
        if info.writable != self._hello.writable:
            raise RemoteProtocolError(
                f"a pool with writable={info.writable} was offered to a consumer that asked for "
                f"writable={self._hello.writable}"
            )
        core = ConsumerCore(info, competes=not welcome.consumer_count)
        if self._timeline is not None:
            core = TracedCore(welcome, self._hello, self._timeline)
        core.consumer_count, core.exporter = welcome.consumer_count, welcome.exporter
        port = self._port
        if port is None:
            port = await in_thread(open_port, self._device, kind=info.kind)
        region = await made_in_thread(partial(port.attach, info), lambda region: region.close())
        try:
            member = self._hello.name if core.competes else self._hello.rank
            consumer = Consumer(member, port, region, core, handshake.link)
            if self._timeline is not None:
                follow(consumer._leases, self._timeline)
            consumer.exporter_name = handshake.name
            handshake.link.busy = Busy(asyncio.get_running_loop(), self._busy_poll)
            handshake.hand_over(consumer)
            await consumer._until(segments=welcome.segments)
            if consumer._lost is not None:
                raise consumer._lost
            consumer._attached = True
            handshake.link.post(wire.encode_greeting(wire.Attached()))
            handshake.link.flush()
        except BaseException:
            region.close()
            raise
        return consumer

    async def __aexit__(self, *exc: object) -> None:
        if self._consumer is not None:
            try:
                await self._consumer.aclose()
            finally:
                if self._timeline is not None:
                    await in_thread(write, self._timeline)


def _check_seat(rank: object, member: object, prefetch: object) -> None:
    if rank is not None and (not is_int(rank) or rank < 0):
        raise ArgumentError(f"rank={rank!r} is no rank; give an int of 0 or more")
    if member is not None and (not isinstance(member, str) or not 0 < len(member) <= MAX_TEXT):
        raise ArgumentError(
            f"member={member!r:.80} is no name; give text of 1 to {MAX_TEXT:,} characters"
        )
    if not is_int(prefetch) or not 1 <= prefetch <= MAX_WINDOW:
        raise ArgumentError(
            f"prefetch={prefetch!r} must be an int from 1 to {MAX_WINDOW:,}: how many batches "
            f"may be delivered ahead of the one in work"
        )
