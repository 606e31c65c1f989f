"""The consumer as its user sees it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from anyio.abc import ObjectReceiveStream

from asyncvmm._backends.base import ConsumerRegion
from asyncvmm._consumer.leases import Leases
from asyncvmm._consumer.lingering import Lingering
from asyncvmm._consumer.loss import anew, loss, rejected
from asyncvmm._consumer.owner import Batch
from asyncvmm._consumer.redeeming import Redeeming
from asyncvmm._consumer.segments import Segments
from asyncvmm._consumer.statistics import ConsumerState, report
from asyncvmm._core import wire
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import (
    AsyncVMMError,
    BackendError,
    ClosedError,
    EndOfStream,
    ForkError,
    PeerLostError,
    WouldBlock,
)
from asyncvmm._fds import OwnedFd, Single, close_after_fork
from asyncvmm._io.link import Link
from asyncvmm._io.liveness import DeathWatch
from asyncvmm._io.turn import Turn
from asyncvmm._tensors import DevicePort
from asyncvmm._types import Key

if TYPE_CHECKING:
    from asyncvmm._consumer.resuming import Resuming

logger = logging.getLogger("asyncvmm.consumer")

GOODBYE_SECONDS = 2.0
"""How long a leaving consumer waits for the exporter's goodbye, and then for it to hang up."""


class Consumer(Single, Redeeming, ObjectReceiveStream[Batch]):
    """A stream of batches; open one with ``connect``.

    Iterate over it, or call :meth:`receive`.  It is an anyio ``ObjectReceiveStream``.  Several
    tasks may receive at once; each batch goes to one of them.
    """

    def __init__(
        self,
        member: Key | None,
        port: DevicePort,
        region: ConsumerRegion,
        core: ConsumerCore,
        link: Link,
    ) -> None:
        super().__init__()
        self.member = member
        self.device = port.device
        self._core = core
        self._region = region
        self._port = port
        self._link = link
        self._watch: DeathWatch | None = None
        self._attached = False
        self._loop = asyncio.get_running_loop()
        self._segments = Segments(core, region)
        self._leases = Leases(core, region, port, self._pump, self._loop)
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._leases.pinned.waits = lambda: bool(self._waiters)
        self._on_news: Callable[[], None] = lambda: None  # receive_nowait may say something new
        self._resuming: Resuming | None = None
        self._lost: AsyncVMMError | None = None
        self._unread_lost = 0
        self._closed = False
        self._forked = False
        self._turn = Turn()
        self._made_in = os.getpid()
        close_after_fork(self)

    # -- receiving ---------------------------------------------------------------------------

    async def receive(self) -> Batch:
        """Return the next batch, waiting for it.

        Raises EndOfStream after the exporter's goodbye, PeerLostError if it vanished (also for
        batches still unread), ClosedError after ``aclose``.  Cancelled, it loses no batch.
        """
        if self._turn.over:  # who never has to wait would keep the event loop
            self._turn.begin()
            if self._core.inbox:
                self._link.due.linger()
            await asyncio.sleep(0)
        while True:
            if (batch := self._next()) is not None:
                return batch
            self._turn.begin()
            self._link.due.stop()
            self._waiters.append(waiter := self._loop.create_future())
            try:
                with self._link.busy:
                    await waiter
            except BaseException:
                # Only a wake-up was in the future: pass it on if it was meant for us (inv. 9).
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def receive_nowait(self) -> Batch:
        """Return the next batch, or raise WouldBlock if none is here."""
        if (batch := self._next()) is None:
            raise WouldBlock("no batch has arrived")
        return batch

    def _next(self) -> Batch | None:
        if self._forked:
            raise ForkError("consumer", self._made_in, os.getpid())
        core = self._core
        if not self._closed and (frames := core.take()):
            if core.outgoing:
                self._pump()
                self._link.flush()  # told before it is begun: nobody else may begin it
            for frame in frames:
                self._turn.count(len(frame.features))
            return Batch(self._leases.lease(frames))
        if self._closed:
            raise ClosedError("this consumer was closed")
        if core.ended:
            raise EndOfStream(core.reason or "the exporter said goodbye")
        if self._lost is not None:
            raise anew(self._lost)
        return None

    def statistics(self) -> ConsumerState:
        """Return what this consumer has now."""
        return report(self)

    # -- what the link says ------------------------------------------------------------------

    def _on_packet(self, packet: memoryview | bytes, fds: list[OwnedFd]) -> None:
        core = self._core
        delivered = 0
        for message in wire.decode_from_exporter(packet):
            if isinstance(message, wire.Deliver):
                core.deliver(message)
                delivered += 1
            elif isinstance(message, wire.Ready):
                core.check_slot(message.slot)
                self._leases.open_ready(message.slot, message.handle)
            elif isinstance(message, wire.Segment):
                self._map(message, fds)
            elif isinstance(message, wire.Unmap):
                self._segments.unmap(message.index)
            elif isinstance(message, wire.Redeemed):
                core.redeemed(message)
            elif isinstance(message, wire.Denied):
                core.denied(message)
            elif isinstance(message, wire.Rejected):
                self._link.abort()
                return self._on_end(rejected(message))
            else:
                core.goodbye(message)
                self._tell()
                self._wake_all()
        if core.answers:
            self._take_answers()
        if core.outgoing:
            self._pump()
        if delivered:
            self._wake(delivered)

    def _map(self, message: wire.Segment, fds: list[OwnedFd]) -> None:
        try:
            self._segments.map(message, fds, attached=self._attached)
        except BackendError as error:
            self._lose(error)
        self._tell()

    def _on_end(self, error: Exception | None) -> None:
        """The socket is gone: after a goodbye that is the end, otherwise the exporter is lost."""
        resuming = self._resuming
        self._core.resumable = resuming is not None and resuming.may_be(error)
        self._lose(loss(error, "the exporter hung up without a goodbye"))
        if resuming is not None and self._core.resumable:
            return resuming.begin()
        self._stop_watching()

    def _on_death(self) -> None:
        if not self._link.closed:
            self._link.read_pending()
        self._link.abort()
        self._stop_watching()
        self._lose(PeerLostError("the exporter's process died", peer="exporter"))
        if self._resuming is not None:
            self._resuming.stop()

    def _lose(self, error: AsyncVMMError) -> None:
        """Note the end of the link, which is no loss if the exporter had said goodbye."""
        orderly = self._core.ended and isinstance(error, PeerLostError)
        if not orderly and self._lost is None:
            if not self._closed:
                unread = self._unread_lost = self._core.lose()
                if isinstance(error, PeerLostError):
                    error.lost = unread
                if unread:
                    error.add_note(f"{unread} batches had been delivered and not received")
            self._lost = error
        self._core.state = PeerState.CLOSED
        self._pump()
        self._tell()
        self._wake_all()

    # -- waking ------------------------------------------------------------------------------

    def _wake(self, count: int = 1) -> None:
        """Wake so many receivers: there is something to see."""
        self._on_news()
        waiters = self._waiters
        while waiters and count:
            waiter = waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _wake_all(self) -> None:
        self._wake(len(self._waiters))
        self._wake_redeemers()

    def _pump(self, *, whole: bool = False) -> None:
        core, outgoing = self._core, self._core.outgoing
        if outgoing:
            if whole or (not core.held and not self._link.due.lingers):
                self._link.post_now(outgoing)  # it is enough, or nothing more can join it
            else:
                for data in outgoing:
                    self._link.post(data)
            outgoing.clear()
        if core.state is not PeerState.OPEN and not core.inbox and not self._leases.live:
            if core.state is PeerState.CLOSED and self._attached and not core.resumable:
                self._region.close()  # the last owner is back (inv. 15)
            self._tell()

    def close(self) -> None:
        """Mark a forked child's copy as unusable; not for users: leave the ``async with``."""
        self._forked = True

    # -- the end -----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Leave: what is unread is refused (under Compete it goes to another), the rest released.

        Owners whose views are alive are given back when the views are gone, also after the event
        loop has ended.  Cancelled, it hangs up at once; nothing is lost by that.
        """
        if self._closed or self._forked:
            return
        self._closed = True
        self._wake_all()
        self._leases.finish()
        self._core.leave()
        self._pump()
        hurried = fenced = self._port.kind != "host"
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._until()  # also where the link is closed, and that was not told yet
                if self._resuming is not None:
                    await self._resuming.looked()
            hurried = False
        except TimeoutError:
            logger.warning("the exporter did not answer a goodbye within %s s", GOODBYE_SECONDS)
        finally:
            if self._resuming is not None:
                self._resuming.stop()
            self._stop_watching()
            left = self._leases.finish()
            self._pump()
            self._link.flush()
            # The kernel takes no more, or nobody waited until our events were opened.
            if left or self._link.queued or hurried:
                lane = self._leases.lane
                lingering = Lingering(self._link, self._region, left, lane, fenced=fenced)
                self._leases.linger(lingering.settle)
            else:
                try:
                    await self._link.finish(GOODBYE_SECONDS)
                finally:
                    self._link.abort()
                    self._region.close()
