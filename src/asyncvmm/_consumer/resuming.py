"""Coming back to an exporter over another link, to give back what is still held.

A link may break while both processes live.  The program is told that the exporter is lost, and
nothing new comes; but what this process holds is quarantined over there until it lets go, and
only this process can say so.  So another link is looked for once, in the background, and what was
said last and may be lost is said again on it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from asyncvmm._consumer.handshake import Handshake, reach
from asyncvmm._core import wire
from asyncvmm._errors import (
    AsyncVMMError,
    DescriptorLimitError,
    ExporterLimitError,
    HandshakeError,
    PeerLostError,
    RemoteProtocolError,
)
from asyncvmm._io.names import Address

if TYPE_CHECKING:
    from asyncvmm._consumer.consumer import Consumer

logger = logging.getLogger("asyncvmm.consumer")

TRIES = 6
FIRST_PAUSE = 0.02
"""Seconds, doubled after each try: an exporter or we may lack a descriptor for a moment.  After
the last the end of this process tells."""

GOODBYE_SECONDS = 2.0
"""How long the exporter may take to hang up once everything is back."""


class Resuming:
    """The way back for one consumer."""

    def __init__(
        self, consumer: Consumer, address: Address, greeting: bytes, users: frozenset[int]
    ) -> None:
        self._consumer = consumer
        self._address = address
        self._greeting = greeting
        self._users = users
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Look for another link; the core keeps what is said until then."""
        loop = asyncio.get_running_loop()
        self._looking = loop.create_future()
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(self._looked)

    def may_be(self, error: Exception | None) -> bool:
        """Say whether to look for another link: once, and for an exporter that may live.

        Not for one that hung up after its goodbye, one that broke the rules or one that rejects us.
        """
        watch = self._consumer._watch
        if self._task is not None or watch is None:
            return False
        if isinstance(error, RemoteProtocolError | HandshakeError):
            return False
        if error is None and self._consumer._core.ended:
            return False
        return not watch.dead()

    async def looked(self) -> None:
        """Wait until there is another link, or it is certain that there will be none."""
        if self._looking is not None:
            await asyncio.wait((self._looking,))

    def stop(self) -> None:
        """Look no more, for the exporter died or we leave; a link that was found stays."""
        if self._task is not None:
            self._task.cancel()
            self._looked(self._task)

    def _looked(self, _: object) -> None:
        looking, self._looking = self._looking, None
        if looking is not None and not looking.done():
            looking.set_result(None)
            self._consumer._core.resumable = False
            if self._consumer._link.closed:
                self._consumer._stop_watching()
            self._consumer._pump()

    async def _run(self) -> None:
        consumer = self._consumer
        handshake = await self._find()
        if handshake is None:
            return
        consumer._link = handshake.link
        handshake.hand_over(consumer)
        self._looked(None)
        await consumer._until_nothing_held()
        if not consumer._link.closed:
            await consumer._link.finish(GOODBYE_SECONDS)
            consumer._on_end(None)

    async def _find(self) -> Handshake | None:
        pause = FIRST_PAUSE
        # Who leaves with nothing in hand asks once: its last words may be lost, and mostly are not.
        leaves = self._consumer._closed and not self._consumer._leases.live
        for _ in range(TRIES):
            try:
                return await self._ask()
            except (PeerLostError, DescriptorLimitError, ExporterLimitError) as error:
                logger.info("the exporter is not there again yet: %s", error)
            except AsyncVMMError as error:
                logger.info("there is no way back to the exporter: %s", error)
                return None
            if leaves:
                break
            await asyncio.sleep(pause)
            pause *= 2
        return None

    async def _ask(self) -> Handshake:
        handshake = await reach(self._address, self._greeting, self._users, wait=False)
        try:
            if handshake.watch is None:
                raise HandshakeError("nobody can tell whether the exporter lives", reason="eof")
            resumed = await handshake.answer(wire.Resumed)
            self._consumer._core.resume(resumed.holds)
            return handshake
        except BaseException:
            handshake.give_up()
            raise
