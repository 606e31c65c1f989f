"""A consumer that outlives its exporters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from anyio.abc import ObjectReceiveStream

from asyncvmm._consumer.coming import ComingIn
from asyncvmm._consumer.consumer import Consumer
from asyncvmm._consumer.loss import anew
from asyncvmm._consumer.onward import Onward
from asyncvmm._consumer.owner import Batch
from asyncvmm._consumer.statistics import ConsumerState, together
from asyncvmm._errors import (
    AsyncVMMError,
    ClosedError,
    EndOfStream,
    ForkError,
    PeerLostError,
    WouldBlock,
)
from asyncvmm._fds import Single, close_after_fork


class ReconnectingConsumer(Single, Onward, ObjectReceiveStream[Batch]):
    """A stream of batches from one exporter after another; ``connect(..., reconnect=True)``.

    It has the methods of :class:`Consumer`, and they mean the same while an exporter is there.

    When the exporter is *lost* (killed, crashed, or the connection broke), one call of
    ``receive`` raises PeerLostError, once per loss, with the number of batches that had come and
    were not received in ``.lost``; ``async for`` ends with that error, too.  The calls after it,
    and a new ``async for``, go on with the next exporter under the name.  Nothing is repeated,
    and nothing that comes later is reported before the loss.  After an exporter's *goodbye*
    nothing was lost, so no error is raised: the call waits for the next exporter, and
    ``async for`` goes on.  EndOfStream is never raised; leave the block, or cancel, to end.

    Tickets go on by themselves: see :meth:`reconstruct`.  ``receive`` is told of the loss anyway.

    The next exporter is another one, with memory of its own.  Owners that were received before
    stay readable and are released as always; the old mapping goes with the last of them.
    """

    def __init__(self, first: Consumer, tries: ComingIn) -> None:
        super().__init__(first)
        self.member = first.member
        self.device = first.device
        self._tries = tries
        self._current: Consumer | None = first
        self._on_news: Callable[[], None] = lambda: None  # receive_nowait may say something new
        first._on_news = self._tell_news
        self._past: list[Consumer] = []  # the last one, and those whose owners are still here
        self._coming: asyncio.Task[None] | None = None  # looks for the next exporter
        self._untold: PeerLostError | None = None  # a loss that receive is to tell of
        self._failure: Exception | None = None  # why it found none that takes us
        self._before: list[ConsumerState] = []  # numbers of those that are forgotten
        self._waiting = 0
        self._closed = False
        self._forked = False
        self._loop = asyncio.get_running_loop()
        self._made_in = os.getpid()
        close_after_fork(self)

    # -- receiving ---------------------------------------------------------------------------

    async def receive(self) -> Batch:
        """Return the next batch, waiting for it, and for the next exporter if need be.

        Raises PeerLostError once per loss; what keeps us out of the next exporter (AccessDenied-
        Error, RankError, BackendError, ...) once per try, and the next call tries again;
        ClosedError after ``aclose``.  Cancelled, it loses neither a batch nor an exporter.
        """
        while True:
            consumer = self._look()
            self._tell_loss()
            if consumer is None:
                await self._until_come()
                continue
            try:
                return await consumer.receive()
            except (EndOfStream, AsyncVMMError) as error:
                self._part(consumer, error)

    def receive_nowait(self) -> Batch:
        """Return the next batch; raise WouldBlock if none is here, or no exporter; else as above.

        The first call after a loss was told begins to look for the next exporter.
        """
        while True:
            consumer = self._look()
            self._tell_loss()
            if consumer is None:
                raise WouldBlock("no exporter is there")
            try:
                return consumer.receive_nowait()
            except WouldBlock:
                raise
            except (EndOfStream, AsyncVMMError) as error:
                self._part(consumer, error)

    def _look(self) -> Consumer | None:
        """Return the consumer of the exporter that is there, or None while one is looked for."""
        if self._forked:
            raise ForkError("consumer", self._made_in, os.getpid())
        if self._closed:
            raise ClosedError("this consumer was closed")
        if self._current is None and self._coming is None:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self._coming = self._loop.create_task(self._reconnect())
        return self._current

    async def _until_come(self) -> None:
        assert self._coming is not None
        self._waiting += 1
        try:
            # wait() leaves the task alone when its caller is cancelled.
            await asyncio.wait((self._coming,))
        finally:
            self._waiting -= 1

    def _part(self, consumer: Consumer, error: AsyncVMMError) -> None:
        """Leave an exporter that is gone; raise if the caller is the one to be told of that."""
        over = isinstance(error, EndOfStream)
        if self._closed or (not over and consumer._lost is None):
            raise error  # we were closed, or forked
        if consumer is not self._current:
            return  # another call was told
        self._leave(consumer)
        if not over:
            raise _as_loss(consumer, error)

    def _pass_over(self, consumer: Consumer) -> None:
        """Leave an exporter that is gone for a ticket of another; receive is still to tell."""
        self._leave(consumer)
        if consumer._lost is not None:
            loss = _as_loss(consumer, anew(consumer._lost))
            if self._untold is not None:
                loss.lost += self._untold.lost  # of who never receives, the losses are one
            self._untold = loss

    def _leave(self, consumer: Consumer) -> None:
        self._current = None
        self._past.append(consumer)

    def _tell_loss(self) -> None:
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold

    # -- the next exporter -------------------------------------------------------------------

    async def _reconnect(self) -> None:
        """Come in to the next exporter, or note why not; one such task at a time."""
        try:
            # One that said goodbye still has its name until it has got everything back.
            if self._past:
                await self._past[-1]._until_hung_up()
            self._forget_idle()
            self._come_to(await self._tries.next())
        except Exception as error:
            self._failure = error  # for whoever asks next
        finally:
            self._coming = None
            self._tell_news()

    def _come_to(self, consumer: Consumer) -> None:
        super()._come_to(consumer)
        consumer._on_news = self._tell_news

    def _tell_news(self) -> None:
        self._on_news()

    def _forget_idle(self) -> None:
        """Let go of exporters of which nothing is left here; their numbers go on to count."""
        kept: list[Consumer] = []
        for consumer in self._past:
            if consumer._idle:
                self._before.append(consumer.statistics())
            else:
                kept.append(consumer)
        self._past, self._before = kept, [together(self._before)] if self._before else []

    # -- looking and leaving -----------------------------------------------------------------

    def statistics(self) -> ConsumerState:
        """Return what this consumer has now, and has had, of all its exporters together."""
        consumers = self._past if self._current is None else [*self._past, self._current]
        found = together([*self._before, *(each.statistics() for each in consumers)])
        state = "connecting" if self._current is None else found.state
        state = "closed" if self._closed else state
        return replace(found, state=state, waiting=found.waiting + self._waiting)

    def close(self) -> None:
        """Mark a forked child's copy as unusable; not for users: leave the ``async with``."""
        self._forked = True

    async def aclose(self) -> None:
        """Leave as a Consumer does, and look for no exporter any more; safe at any point."""
        if self._closed or self._forked:
            return
        self._closed = True
        try:
            if self._coming is not None:
                self._coming.cancel()
                await asyncio.wait((self._coming,))
        finally:
            async with AsyncExitStack() as stack:  # each is left, whatever comes of the others
                for consumer in self._past:
                    stack.push_async_callback(consumer.aclose)
                if self._current is not None:
                    stack.push_async_callback(self._current.aclose)


def _as_loss(consumer: Consumer, error: AsyncVMMError) -> PeerLostError:
    """Return what the end of a consumer's exporter means to who goes on with the next."""
    if isinstance(error, PeerLostError):
        return error
    lost = PeerLostError(f"the exporter was dropped: {error}", peer="exporter")
    lost.lost = consumer._unread_lost
    lost.__cause__ = error
    return lost
