"""The consumer's side of coming in: hello, and the exporter's answer to it."""

from __future__ import annotations

import asyncio
import os
from typing import TypeVar

from asyncvmm._consumer.consumer import Consumer
from asyncvmm._consumer.loss import loss, rejected
from asyncvmm._core import wire
from asyncvmm._errors import AccessDeniedError, RemoteProtocolError, VersionMismatchError
from asyncvmm._fds import OwnedFd
from asyncvmm._io.link import Link
from asyncvmm._io.listener import connect as connect_socket
from asyncvmm._io.liveness import DeathWatch, PeerIdentity, identify
from asyncvmm._io.names import Address

AnswerT = TypeVar("AnswerT", wire.Welcome, wire.Resumed)

FDS_PER_PACKET = 1
"""Each segment travels in a packet of its own (inv. 12)."""


async def reach(
    address: Address, greeting: bytes, users: frozenset[int], *, wait: bool
) -> Handshake:
    """Connect to the exporter that listens there, look who it is, and say the first word.

    Raises AccessDeniedError if it runs as none of ``users``; it is told nothing then.
    """
    loop = asyncio.get_running_loop()
    sock = await connect_socket(address, wait=wait)
    handshake = Handshake(address.display)
    handshake.link = link = Link(
        sock,
        loop=loop,
        frame=wire.frame,
        on_packet=handshake.on_packet,
        on_end=handshake.on_end,
        accept_fds=FDS_PER_PACKET,
    )
    try:
        identity = identify(sock)
        if identity.pidfd is not None:
            handshake.watch = DeathWatch(loop, identity.pidfd, handshake.on_death)
        _check_user(identity, users, address)
        link.start()
        link.post(greeting)
        link.flush()
    except BaseException:
        handshake.give_up()
        raise
    return handshake


def _check_user(identity: PeerIdentity, users: frozenset[int], address: Address) -> None:
    if identity.uid not in users:
        raise AccessDeniedError(
            f"{address.display!r} is served by user {identity.uid}, not by user {os.geteuid()} or "
            f"root; connect with allow_uids=[{identity.uid}] if you trust that user",
            uid=identity.uid,
            allowed=tuple(sorted(users)),
        )


class Handshake:
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
        """Take the greeting.

        What follows is read once there is a consumer to take it; before that only of a link that
        is lost, and what that says is of no use.
        """
        if self._answer is None and self._error is None:
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

    async def answer(self, kind: type[AnswerT]) -> AnswerT:
        """Wait for the exporter's answer; a refusal raises the error that it names."""
        await self._told
        if isinstance(self._answer, kind):
            return self._answer
        if isinstance(self._answer, wire.Rejected):
            raise rejected(self._answer)
        if self._answer is not None:
            raise RemoteProtocolError(
                f"the exporter {self.name!r} answered a hello with a {type(self._answer).__name__}"
            )
        raise loss(self._error, f"the exporter {self.name!r} hung up during the handshake")

    def hand_over(self, consumer: Consumer) -> None:
        """Give the link to the consumer, and read on."""
        consumer._stop_watching()
        consumer._watch, self.watch = self.watch, None
        self._consumer = consumer
        self.link.on_packet = consumer._on_packet
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
