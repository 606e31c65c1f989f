"""The consumer for code that is not async."""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic
from typing import Self

from asyncvmm._consumer.consumer import Consumer as AsyncConsumer
from asyncvmm._consumer.owner import Batch
from asyncvmm._consumer.statistics import ConsumerState
from asyncvmm._errors import AsyncVMMError, ClosedError, EndOfStream, WouldBlock
from asyncvmm._types import Key
from asyncvmm.blocking._redeeming import AnyConsumer, Redeeming
from asyncvmm.blocking._thread import LoopThread, seconds


class Consumer(Redeeming):
    """A stream of batches; open one with :func:`asyncvmm.blocking.connect`.

    Poll it, receive from it, or iterate over it, in any thread; each batch goes to one caller.

    The loop's thread puts what it hands over into a queue, from which the callers take: a batch
    is in the consumer, in the queue, or with a caller, whenever somebody is interrupted.
    """

    _what = "consumer"

    def __init__(self, consumer: AnyConsumer, thread: LoopThread, user: object) -> None:
        super().__init__(thread, user)
        self.member: Key | None = consumer.member
        """Its rank, or its name under Compete."""
        self.device: str = consumer.device
        """Where its views are."""
        self._consumer = consumer
        first = consumer if isinstance(consumer, AsyncConsumer) else consumer._current
        assert first is not None
        self._port = first._port
        self._handed: deque[Batch | AsyncVMMError] = deque()  # appended to by the loop only
        self._taking = threading.Lock()
        # Written by the loop and read by everybody: asking may find something new.
        self._news = True
        # Written by everybody and read by the loop: somebody polled and found nothing.
        self._wanted = False
        # Under Compete a batch that is handed over counts as begun: none is before it is asked for.
        # Nor is one of an exporter whose successor may compete.
        self._ahead = isinstance(consumer, AsyncConsumer) and not consumer._core.competes
        self._receivers = 0
        consumer._on_news = self._on_news

    # -- receiving ---------------------------------------------------------------------------

    def poll(self) -> Batch | None:
        """Return the next batch, or None if none has arrived.  Never waits for one.

        While nothing arrives it makes no system call and takes no lock, so a loop may poll in
        every step.  The loop's thread needs the interpreter to receive anything: a loop with
        nothing else to do should :meth:`receive`.

        Raises EndOfStream after the exporter's goodbye, PeerLostError if it vanished (once per
        loss with ``reconnect=True``, and goes on with the next exporter), ClosedError after
        :meth:`close`, ForkError in a forked child.
        """
        if not (self._handed or self._news):
            self._wanted = True
            return None
        return self._look()

    def receive(self, timeout: float | None = None) -> Batch:
        """Return the next batch, waiting for it for ``timeout`` seconds; TimeoutError after that.

        Raises what :meth:`poll` raises.  Interrupted or out of time it loses no batch: the next
        call, in whichever thread, gets it.
        """
        limit = seconds(timeout)
        deadline = None if limit is None else monotonic() + limit
        while True:
            self._check()
            batch = self._pop()
            if batch is not None:
                return batch
            left = None if deadline is None else max(deadline - monotonic(), 0.0)
            try:
                self._run(self._fetch, left)
            except TimeoutError:
                if not self._handed:
                    raise TimeoutError(f"no batch arrived within {timeout} s") from None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, waiting for it; the exporter's goodbye ends the iteration."""
        try:
            return self.receive()
        except EndOfStream:
            raise StopIteration from None

    def _look(self) -> Batch | None:
        self._check()
        batch = self._pop()
        if batch is not None:
            return batch
        self._run(self._ask)
        return self._pop()

    def _pop(self) -> Batch | None:
        """Take the oldest of what was handed over, or raise it if it is an error.

        An interruption can come after any call in here, also after the lock was let go of: what
        was taken until then is put back.
        """
        handed = self._handed
        first: Batch | AsyncVMMError | None = None
        try:
            with self._taking:
                if handed:
                    first = handed[0]
                    del handed[0]
            if isinstance(first, AsyncVMMError):
                if isinstance(first, ClosedError):
                    self._thread.leave_quietly()
                raise first
            return first
        except BaseException as error:
            if first is not None and error is not first:
                self._put_back(first)
            raise
        finally:
            del first  # an error that is raised must not hold itself by its frames

    def _put_back(self, first: Batch | AsyncVMMError) -> None:
        with self._taking:
            if not any(each is first for each in self._handed):
                self._handed.appendleft(first)

    # -- on the loop's thread ----------------------------------------------------------------

    def _on_news(self) -> None:
        """Note that asking may find something new; the consumer calls this."""
        self._news = True
        if self._wanted and self._ahead and not self._receivers:
            self._hand()

    def _hand(self) -> None:
        """Hand over what there is: batches, and the error that ends them."""
        self._wanted = False
        try:
            while True:
                self._handed.append(self._consumer.receive_nowait())
                if not self._ahead:
                    return  # there may be more, so the news stay
        except WouldBlock:
            self._news = False
        except AsyncVMMError as error:
            self._handed.append(error)

    async def _ask(self) -> None:
        if not self._handed:
            self._hand()

    async def _fetch(self) -> None:
        if self._handed:
            return
        self._receivers += 1
        try:
            self._handed.append(await self._consumer.receive())
        finally:
            self._receivers -= 1

    # -- looking and leaving -----------------------------------------------------------------

    def statistics(self) -> ConsumerState:
        """Return what this consumer has now."""

        async def look() -> ConsumerState:
            return self._consumer.statistics()

        return self._run(look)

    def close(self) -> None:
        """Leave, as the end of the ``with`` block does; again is a no-op.

        What is unread is refused (under Compete it goes to another), the rest released.  Owners
        whose views are alive go back with the views.  Calls that wait raise ClosedError.
        """
        self._close(self._consumer.aclose)
        self._news = True  # let poll() say so
        self._handed.clear()

    async def leave(self) -> None:
        """Not for users: leave when the interpreter exits."""
        await self._consumer.aclose()

    def forked(self) -> None:
        """Not for users: this is a forked child's copy now."""
        self._news = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<blocking.Consumer {self.member!r} on {self.device}>"
