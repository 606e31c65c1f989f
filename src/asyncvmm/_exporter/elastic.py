"""A pool that grows when somebody would otherwise wait, and shrinks when it is idle.

Growing maps one more segment in a worker thread, sends it to every consumer, and only then lets
the core use it, so a consumer always has a segment before an owner in it.  Shrinking goes the
other way round: the core lets go of the range, consumers unmap, then the memory is given back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from asyncvmm._backends.base import ExporterRegion
from asyncvmm._core import wire
from asyncvmm._core.allocator import Allocator
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.layout import aligned
from asyncvmm._errors import ArgumentError, AsyncVMMError, BackendError
from asyncvmm._exporter.connections import Connections
from asyncvmm._io.threads import in_thread
from asyncvmm._types import SegmentInfo

logger = logging.getLogger("asyncvmm.exporter")

_COMING_SECONDS = 0.01
"""Between two looks whether newcomers have what they were promised, which takes milliseconds."""


class Elastic:
    """The segments of one exporter's pool.

    ``needed`` says which sizes somebody waits for, if anybody does.
    ``room_made`` is called after each growth.  ``no_room`` is called when growing failed, with
    what says whether the pool can hold chunks of some sizes as it is, and why it got no larger.
    """

    def __init__(
        self,
        core: ExporterCore,
        region: ExporterRegion,
        connections: Connections,
        *,
        pool_bytes: int,
        max_pool_bytes: int,
        shrink_after: float,
        needed: Callable[[], Sequence[int]],
        room_made: Callable[[], None],
        no_room: Callable[[Callable[[Sequence[int]], bool], AsyncVMMError], None],
    ) -> None:
        self.grown = 0
        self.shrunk = 0
        self.pool_bytes = aligned(pool_bytes)
        self.max_pool_bytes = aligned(max_pool_bytes)
        """The largest chunk the pool can ever hold, in bytes."""
        self._core = core
        self._region = region
        self._connections = connections
        self._shrink_after = shrink_after
        self._needed = needed
        self._room_made = room_made
        self._no_room = no_room
        self._busy: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since: dict[int, float] = {}
        self._usable: dict[int, int] = {}
        self._closed = False
        self._failed = False
        self._add(region.segments()[0])

    def want(self, sizes: Sequence[int]) -> None:
        """Somebody waits for chunks of these sizes: begin to grow if the pool may."""
        if (
            self._busy is None
            and not self._closed
            and self._lacks_bytes(sizes)
            and self._core.bytes.capacity < self.max_pool_bytes
            and (not self._failed or not self._holds(sizes))
        ):
            self._busy = asyncio.get_running_loop().create_task(self._grow(sum(sizes)))

    def _lacks_bytes(self, sizes: Sequence[int]) -> bool:
        """Say whether it is bytes that a waiter lacks; slots come back with what they hold."""
        return self._core.slots.free >= len(sizes)

    async def _grow(self, nbytes: int) -> None:
        segment = None
        try:
            await self._give_back_stuck()
            # After shrinking, free addresses may lie in several pieces: fill one after the other.
            size = min(max(nbytes, self.pool_bytes), self._largest_unmapped())
            segment = await in_thread(self._region.grow, size)
            await self._connections.share(segment)
            self._add(segment)
            self.grown += 1
            logger.info("the pool grew by %d bytes to %d", size, self._core.bytes.capacity)
        except (BackendError, ArgumentError) as error:
            # What fits the pool as it is waits on; told once, not at every wait.
            logger.warning("the pool cannot grow and stays at its size: %s", str(error))
            self._failed = True
            if segment is not None:
                await self._withdraw(segment)
            self._no_room(self._holds, error)
        finally:
            self._busy = None
        if not self._closed:
            self._schedule()
            self._room_made()

    async def _withdraw(self, segment: SegmentInfo) -> None:
        """Take back a segment that some consumer could not be given: nobody has used it yet."""
        try:
            await self._unpromise(segment.index)
        except BackendError as error:
            logger.warning("a segment stays mapped, and is not used: %s", str(error))

    async def _give_back_stuck(self) -> None:
        """Give back what could not be before: its addresses may be all that are left to grow at.

        Raises BackendError if one still cannot be and there are no others.
        """
        refused: BackendError | None = None
        for segment in self._region.segments():
            if segment.index in self._usable:
                continue
            try:
                await self._unpromise(segment.index)
            except BackendError as error:
                logger.warning("a segment could still not be given back: %s", str(error))
                refused = error
            else:
                self.shrunk += 1
                self._failed = False
        if refused is not None and not self._largest_unmapped():
            raise refused

    async def _unpromise(self, index: int) -> None:
        """Give a segment back once no newcomer is on its way that was promised it."""
        while self._connections.coming() and not self._closed:  # noqa: ASYNC110 - rare and short
            await asyncio.sleep(_COMING_SECONDS)
        await self._unmap(index)

    async def _unmap(self, index: int) -> None:
        """Give a segment back that nothing is in: every consumer's mapping, then our own."""
        leaving = self._connections.handshake.leaving
        leaving.add(index)
        try:
            for conn in self._connections.open.values():
                if index in conn.segments:
                    conn.segments.discard(index)
                    conn.link.post(wire.encode(wire.Unmap(index)))
            await in_thread(self._region.shrink, index)
        finally:
            leaving.discard(index)

    def _add(self, segment: SegmentInfo) -> None:
        # All of the segment is used, also what the memory rounded up, so that the next one lies
        # right behind it; but nothing past the limit.
        usable = min(segment.nbytes, self.max_pool_bytes - segment.start)
        self._usable[segment.index] = usable
        self._core.add_segment(segment, usable)

    def _holds(self, sizes: Sequence[int]) -> bool:
        """Say whether chunks of these sizes fit what is mapped, if nothing else is in it."""
        empty = Allocator()
        for segment in self._region.segments():
            # One that could not be given back is mapped, and nothing may be in it any more.
            if segment.index in self._usable:
                empty.add_range(segment.start, self._usable[segment.index])
        return empty.fits(sizes)

    def _largest_unmapped(self) -> int:
        """Return the longest piece of addresses at which nothing is mapped, in bytes."""
        largest = at = 0
        for segment in sorted(self._region.segments(), key=lambda segment: segment.start):
            largest = max(largest, segment.start - at)
            at = segment.start + self._usable.get(segment.index, segment.nbytes)
        return max(largest, self.max_pool_bytes - at)

    # -- shrinking ---------------------------------------------------------------------------

    def _schedule(self) -> None:
        if (
            self._timer is None
            and len(self._region.segments()) > 1
            and not self._closed
            and self._shrink_after != math.inf
        ):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(self._shrink_after / 4, 0.01), self._look)

    def _look(self) -> None:
        """Give back a segment that no owner has touched for long enough; one at a time."""
        self._timer = None
        needed = self._needed()
        # A newcomer waits for every segment that it was promised; and what did not suffice for
        # who waits now would only be grown again at once.
        if self._connections.coming() or (needed and self._lacks_bytes(needed)):
            self._schedule()
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        for segment in self._region.segments():
            index = segment.index
            usable = self._usable.get(index)  # None if giving it back failed before
            if index == 0 or usable is None or not self._core.bytes.is_free(segment.start, usable):
                self._idle_since.pop(index, None)
                continue
            since = self._idle_since.setdefault(index, now)
            if now - since >= self._shrink_after and self._busy is None:
                self._busy = loop.create_task(self._shrink(segment))
                return
        self._schedule()

    async def _shrink(self, segment: SegmentInfo) -> None:
        index = segment.index
        try:
            if self._core.bytes.remove_range(segment.start, self._usable[index]):
                del self._usable[index]
                self._idle_since.pop(index, None)
                await self._unmap(index)
                self.shrunk += 1
                self._failed = False
        except BackendError as error:
            logger.warning("a segment could not be given back: %s", str(error))
        finally:
            self._busy = None
        self._schedule()
        self._room_made()

    async def close(self) -> None:
        """Stop growing and shrinking; a step under way is finished."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._busy is not None:
            await asyncio.wait((self._busy,))
