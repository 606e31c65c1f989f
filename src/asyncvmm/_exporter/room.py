"""Waiting for room: first come, first served, and nothing of value in a future (inv. 9).

A waiter's future carries a wake-up and nothing else.  Whoever is woken looks again and takes the
room itself, synchronously; a waiter that is cancelled between the wake-up and its next step has
nothing to lose and wakes the one behind it.  Only the head of the queue is ever woken, so a large
request is not overtaken for ever by small ones: small ones wait behind it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from time import monotonic
from typing import TypeAlias

from asyncvmm._errors import AsyncVMMError
from asyncvmm._exporter.latencies import Histogram

Sizes: TypeAlias = Sequence[int]
"""Bytes of each chunk that is to be taken, all at once."""

SHORTEST_LOOK = 0.01
"""Seconds between two looks at a head that is late, however little patience there is."""


class Waiter:
    """One call that waits."""

    __slots__ = ("error", "future", "since", "sizes")

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.error: AsyncVMMError | None = None
        self.since = monotonic()
        self.future: asyncio.Future[None] | None = None


class Room:
    """The queue of those who wait for slots and chunks.

    ``fits`` says whether chunks of some sizes, and a slot for each, could be taken now; ``wanted``
    is called whenever the head of the queue has to wait, so that an elastic pool can grow.
    ``late`` is called when the head has waited for ``patience`` seconds, and again as often while
    it does.
    """

    def __init__(
        self,
        fits: Callable[[Sizes], bool],
        wanted: Callable[[Sizes], None],
        late: Callable[[], None],
        patience: float,
    ) -> None:
        self._fits = fits
        self._wanted = wanted
        self._late = late
        self._patience = patience
        self._timer: asyncio.TimerHandle | None = None  # only while somebody waits, or just did
        self.queue: deque[Waiter] = deque()
        self._closed: AsyncVMMError | None = None  # what everybody is told
        self.waits = 0
        self.longest_wait = 0.0
        self.latencies = Histogram()

    def __len__(self) -> int:
        return len(self.queue)

    @property
    def oldest_wait(self) -> float:
        """Seconds that the head of the queue has waited; 0.0 if nobody waits."""
        return monotonic() - self.queue[0].since if self.queue else 0.0

    @property
    def needed(self) -> Sizes:
        """The sizes that the head of the queue waits for; none if nobody waits."""
        return self.queue[0].sizes if self.queue else ()

    async def turn(self, *sizes: int) -> None:
        """Wait until it is the caller's turn and all of these fit; take them before any await.

        Raises what :meth:`close` or :meth:`refuse` was given.
        Cancellation loses nothing.
        """
        waiter = Waiter(sizes)
        queue = self.queue
        queue.append(waiter)
        waited = False
        try:
            while self._closed is None and (queue[0] is not waiter or not self._fits(sizes)):
                if waiter.error is not None:
                    raise waiter.error
                waited = True
                if queue[0] is waiter:
                    self._wanted(sizes)
                if self._timer is None and self._patience != math.inf:
                    self._timer = asyncio.get_running_loop().call_later(self._patience, self._look)
                waiter.future = asyncio.get_running_loop().create_future()
                await waiter.future
        except BaseException:
            self._forget(waiter, waited)
            raise
        self._forget(waiter, waited)
        if self._closed is not None:
            raise copy(self._closed)

    def _forget(self, waiter: Waiter, waited: bool) -> None:
        self.queue.remove(waiter)
        if waited:
            self.waits += 1
            seconds = monotonic() - waiter.since
            self.latencies.add(seconds)
            self.longest_wait = max(self.longest_wait, seconds)
        # The next in the queue may have its turn now, whether this one took the room or not;
        # it looks for itself, after the caller's synchronous part.
        self.wake()

    def wake(self) -> None:
        """Wake the head of the queue if it fits now; call it whenever room may have appeared."""
        if self.queue:
            head = self.queue[0]
            future = head.future
            if future is not None and not future.done():
                if self._fits(head.sizes):
                    future.set_result(None)
                else:
                    self._wanted(head.sizes)

    def _look(self) -> None:
        """Tell of a head that waits too long, and look again while anybody waits."""
        self._timer = None
        if not self.queue or self._closed is not None:
            return
        left = self.queue[0].since + self._patience - monotonic()
        if left <= 0:
            left = max(self._patience, SHORTEST_LOOK)
            self._late()
        self._timer = asyncio.get_running_loop().call_later(left, self._look)

    def refuse(self, holds: Callable[[Sizes], bool], error: AsyncVMMError) -> None:
        """Send the head of the queue away with ``error`` unless the pool ``holds`` its sizes."""
        if self.queue and not holds(self.queue[0].sizes):
            head = self.queue[0]
            head.error = error
            if head.future is not None and not head.future.done():
                head.future.set_result(None)

    def close(self, error: AsyncVMMError) -> None:
        """Send everybody away with ``error``; what came first stays the reason."""
        self._closed = self._closed or error
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self.queue:
            if waiter.future is not None and not waiter.future.done():
                waiter.future.set_result(None)
