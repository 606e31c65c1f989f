"""Connecting to an exporter."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import NoReturn

from asyncvmm._consumer.consumer import Consumer
from asyncvmm._consumer.loss import loss
from asyncvmm._consumer.tracing import TracedCore, follow
from asyncvmm._core import wire
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.wire import MAX_TEXT, MAX_WINDOW, check_secret
from asyncvmm._errors import (
    AccessDeniedError,
    ArgumentError,
    HandshakeError,
    LocalProtocolError,
    RankError,
    RemoteProtocolError,
    VersionMismatchError,
)
from asyncvmm._fds import OwnedFd
from asyncvmm._io.chrome import write
from asyncvmm._io.link import Link
from asyncvmm._io.listener import connect as connect_socket
from asyncvmm._io.liveness import DeathWatch, identify
from asyncvmm._io.names import check, resolve
from asyncvmm._io.threads import made_in_thread
from asyncvmm._io.timeline import Timeline
from asyncvmm._tensors import DevicePort, check_device, open_port, preload
from asyncvmm._types import is_int

FDS_PER_PACKET = 1
"""Each segment travels in a packet of its own (inv. 12)."""


class connect:
    """Attach to an exporter: ``async with connect("vision", rank=0) as consumer``.

    ``name`` is the exporter's, as in ``open_exporter``.  ``device`` is where views are to be
    used: "auto" follows the exporter's memory; "cpu" or "cuda:N" insist.  Under Broadcast give
    the ``rank``; under Compete a ``member`` name may be given, and ``prefetch`` is how many
    batches may be delivered ahead of the one in work.  ``wait=True`` waits until the exporter is
    there.  ``writable=True`` asks for writable views; the exporter must have been opened so.
    ``trace`` names a file for the timeline of every owner, written at the end.

    Entering raises ExporterNotFoundError, RankError, VersionMismatchError, AccessDeniedError or
    another HandshakeError, DescriptorLimitError or BackendError, and keeps nothing.  There is no
    timeout argument: wrap it in ``asyncio.timeout``; cancelling it is safe.

    Leaving refuses what is unread and releases the rest; owners whose views are still alive go
    back when the views do.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        device: str = "auto",
        rank: int | None = None,
        member: str | None = None,
        prefetch: int = 2,
        wait: bool = False,
        writable: bool = False,
        secret: bytes | str = b"",
        trace: str | os.PathLike[str] | None = None,
        _port: DevicePort | None = None,
    ) -> None:
        check(name)
        check_device(device)
        self._name = name
        self._device = device
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
        kind = "any" if device == "auto" else "host" if device == "cpu" else "cuda"
        if _port is not None:
            kind = _port.kind
        self._hello = wire.Hello(
            rank=rank,
            name=member,
            kind=kind,
            writable=writable,
            window=prefetch,
            secret=check_secret(secret),
        )
        self._greeting = wire.encode_greeting(self._hello)  # refuses what is out of bounds
        self._wait = wait
        self._timeline = None if trace is None else Timeline(trace)
        self._port = _port
        self._consumer: Consumer | None = None

    async def __aenter__(self) -> Consumer:
        if self._consumer is not None:
            raise LocalProtocolError("connect() can be entered once; call it again")
        if self._timeline is not None:
            await asyncio.to_thread(self._timeline.prepare)
        if self._port is None:
            # Before the handshake, so that an exporter never waits for our imports.
            await asyncio.to_thread(preload, self._device)
        address = await asyncio.to_thread(resolve, self._name)
        sock = await connect_socket(address, wait=self._wait)
        handshake = _Handshake(address.display)
        handshake.link = link = Link(
            sock,
            loop=asyncio.get_running_loop(),
            frame=wire.frame,
            on_packet=handshake.on_packet,
            on_end=handshake.on_end,
            accept_fds=FDS_PER_PACKET,
        )
        try:
            identity = identify(sock)
            if identity.pidfd is not None:
                handshake.watch = DeathWatch(
                    asyncio.get_running_loop(), identity.pidfd, handshake.on_death
                )
            link.start()
            link.post(self._greeting)
            link.flush()
            welcome = await handshake.welcome()
            consumer = await self._attach(handshake, welcome)
        except BaseException:
            handshake.give_up()
            raise
        self._consumer = consumer
        return consumer

    async def _attach(self, handshake: _Handshake, welcome: wire.Welcome) -> Consumer:
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
            port = await asyncio.to_thread(open_port, self._device, kind=info.kind)
        region = await made_in_thread(partial(port.attach, info), lambda region: region.close())
        try:
            member = self._hello.name if core.competes else self._hello.rank
            consumer = Consumer(member, port, region, core, handshake.link)
            if self._timeline is not None:
                follow(consumer._leases, self._timeline)
            consumer.exporter_name = handshake.name
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
                    await asyncio.to_thread(write, self._timeline)


class _Handshake:
    """Reads the answer to a hello, and then nothing until there is a consumer to read the rest.

    What the exporter sends meanwhile waits in the kernel, with its descriptors: they take none of
    ours until each can be mapped and closed.
    """

    def __init__(self, name: str) -> None:
        self.link: Link
        self.watch: DeathWatch | None = None
        self.name = name
        self._consumer: Consumer | None = None
        self._answer: wire.Greeting | None = None
        self._error: Exception | None = None
        self._ended = False
        self._told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_packet(self, packet: memoryview, fds: list[OwnedFd]) -> None:
        """Take the greeting, or pass the packet on.

        Between the two only a link that is lost is read, and what it says is of no use.
        """
        if self._consumer is not None:
            self._consumer._on_packet(packet, fds)
        elif self._answer is None and self._error is None:
            try:
                self._answer = wire.decode_greeting(packet)
            except (VersionMismatchError, RemoteProtocolError) as error:
                self._error = error
            self.link.pause()
            self._tell()

    def on_end(self, error: Exception | None) -> None:
        """Tell whoever waits that the link is gone."""
        self._ended = True
        self._error = self._error or error
        if self._consumer is not None:
            self._consumer._on_end(error)
        self._tell()

    def on_death(self) -> None:
        """The exporter's process is gone, whatever its socket says: what it said last counts."""
        if self._consumer is not None:
            self._consumer._on_death()
            return
        if not self.link.closed:
            self.link.read_pending()
        self.link.abort()
        self.on_end(None)

    def _tell(self) -> None:
        if not self._told.done():
            self._told.set_result(None)

    async def welcome(self) -> wire.Welcome:
        """Wait for the exporter's answer; a refusal raises the error that it names."""
        await self._told
        if isinstance(self._answer, wire.Welcome):
            return self._answer
        if isinstance(self._answer, wire.Rejected):
            raise_rejection(self._answer)
        if self._answer is not None:
            raise RemoteProtocolError(
                f"the exporter {self.name!r} answered a hello with a {type(self._answer).__name__}"
            )
        raise loss(self._error, f"the exporter {self.name!r} hung up during the handshake")

    def hand_over(self, consumer: Consumer) -> None:
        """Give the link to the consumer, and read on."""
        consumer._watch, self.watch = self.watch, None
        self._consumer = consumer
        if self._ended:
            consumer._on_end(self._error)
        else:
            self.link.start()

    def give_up(self) -> None:
        """Keep nothing."""
        if self._consumer is not None:
            self._consumer._stop_watching()
        self.link.abort()
        if self.watch is not None:
            self.watch.close()


def raise_rejection(message: wire.Rejected) -> NoReturn:
    """Raise the typed error that an exporter's refusal stands for."""
    numbers = [None if n == -1 else n for n in message.numbers]
    if message.reason == "rank" and len(numbers) == 2:
        raise RankError(message.text, rank=numbers[0], consumer_count=numbers[1])
    if message.reason == "access_denied":
        raise AccessDeniedError(message.text, uid=numbers[0] or -1 if numbers else -1)
    if message.reason == "version" and len(message.numbers) == 1:
        raise VersionMismatchError(wire.VERSION, message.numbers[0])
    raise HandshakeError(message.text, reason=message.reason)
