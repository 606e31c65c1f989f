"""Fences that are done in a moment: asked in the turns of the loop, before a thread has to.

Where two GPUs run at the same time, or one of them has little to do, an event is done within some
tens of microseconds of the packet that speaks of it.  A thread that has to be woken, and to wake
the loop again, costs more than that.  So a pending fence is asked once in each of the loop's next
turns, and whoever else is due in these turns runs between two questions; only what then is still
pending goes to the watcher's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from time import monotonic
from typing import TypeAlias

from asyncvmm._io.fences import Fence

SOON_SECONDS = 60e-6
"""How long without news a fence is asked from the loop.  It is the time that a thread takes to be
woken, to see that the fence is done, and to wake the loop (design: 73 to 95 us measured)."""

_Waiting: TypeAlias = "deque[tuple[Fence, object]]"


class SoonFences:
    """Pending fences by lane, asked by the loop for a short while.

    ``ask`` answers for several fences at once and never raises.  ``on_done`` is told of tokens,
    those of one lane in order; ``later`` gets what is still pending after a while.
    """

    __slots__ = ("_ask", "_lanes", "_later", "_loop", "_on_done", "_scheduled", "_until")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ask: Callable[[Sequence[Fence]], list[bool]],
        on_done: Callable[[list[object]], None],
        later: Callable[[Hashable, Fence, object], None],
    ) -> None:
        self._loop = loop
        self._ask = ask
        self._on_done = on_done
        self._later = later
        self._lanes: dict[Hashable, _Waiting] = {}
        self._until = 0.0
        self._scheduled = False

    @property
    def idle(self) -> bool:
        """Say whether nothing is being asked."""
        return not self._lanes

    def watch(self, lane: Hashable, fence: Fence, token: object) -> None:
        """Tell of ``token`` once ``fence`` is done; fences of one lane finish in this order."""
        waiting = self._lanes.get(lane)
        if waiting is None:
            waiting = self._lanes[lane] = deque()
        waiting.append((fence, token))
        if not self._scheduled:
            self._scheduled = True
            self._until = monotonic() + SOON_SECONDS
            self._loop.call_soon(self._turn)

    def clear(self) -> None:
        """Forget what is pending."""
        self._lanes.clear()

    def _turn(self) -> None:
        finished: list[object] = []
        for lane, waiting in tuple(self._lanes.items()):
            finished += [waiting.popleft()[1] for _ in range(self._count_done(waiting))]
            if not waiting:
                del self._lanes[lane]
        now = monotonic()
        if finished:
            self._until = now + SOON_SECONDS
            self._on_done(finished)
        if self._lanes and now < self._until:
            self._loop.call_soon(self._turn)
            return
        self._scheduled = False
        lanes, self._lanes = self._lanes, {}
        for lane, waiting in lanes.items():
            for fence, token in waiting:
                self._later(lane, fence, token)

    def _count_done(self, waiting: _Waiting) -> int:
        """Return how many of a lane are done: by halves, since they finish in order."""
        newest, oldest = self._ask((waiting[-1][0], waiting[0][0]))
        if newest:
            return len(waiting)
        low, high = int(oldest), len(waiting) - 1  # so many are done; at most so many can be
        while oldest and low < high:
            middle = (low + high + 1) // 2
            if self._ask((waiting[middle - 1][0],))[0]:
                low = middle
            else:
                high = middle - 1
        return low
