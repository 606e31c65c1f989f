"""From "everybody let go" to "free": waiting for the fences of one exporter.

A slot leaves DRAINING only when everything that touched its bytes is done (inv. 4): the copy into
it, also one that still runs in a worker thread, and the reads of every consumer that released it.
Where memory has no fences (host memory) that is at once and no watcher is ever made.

A fence is asked at once, then for a moment in the turns of the loop, then by the watcher's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias, cast

from asyncvmm._backends.base import ExporterRegion, Fence
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.ledger import Record
from asyncvmm._errors import BackendError, DeviceLostError
from asyncvmm._exporter.fencing import READY, Fencing, Lane, ready_slot
from asyncvmm._exporter.late import AGAIN_SECONDS
from asyncvmm._io.fences import FenceWatcher
from asyncvmm._io.soon import SoonFences
from asyncvmm._io.threads import in_thread
from asyncvmm._logs import Once, kind_of

logger = logging.getLogger("asyncvmm.exporter")

TRIES = 3
"""How often something that the driver refuses is tried before a slot is quarantined for it."""

_Token: TypeAlias = tuple[Record, Lane, Fence]


class Draining:
    """Waits for fences without blocking the loop, and says when a record is free.

    ``freed`` is told of each record once, of many at a time, unless a fence can no longer be asked;
    ``left`` of each peer that came no more, once nothing that it read is waited for; ``lost`` of
    an error after which no fence of this process can be asked.
    """

    def __init__(
        self,
        region: ExporterRegion,
        fencing: Fencing,
        core: ExporterCore,
        freed: Callable[[Sequence[Record]], None],
        left: Callable[[int], None],
        lost: Callable[[DeviceLostError], None],
    ) -> None:
        self.copying: dict[int, asyncio.Future[None]] = {}  # slot -> copy in a worker thread
        self._region = region
        self._once = Once(logger)
        self._fencing = fencing
        self._freed = freed
        self._core = core
        self._left = left
        self._lost = lost
        loop = asyncio.get_running_loop()
        self._soon = SoonFences(loop, fencing.ask, self._on_soon, self._later)
        self._watcher: FenceWatcher | None = None
        self._closed = False
        self._open: dict[Record, set[Lane]] = {}  # the lanes each still waits for
        self._lanes: dict[Lane, int] = {}  # fences that somebody was asked to watch, by lane
        self._watched: dict[Lane, int] = {}  # those of them that the thread has
        self._broken: set[Record] = set()
        self._refused: dict[tuple[Record, Lane], int] = {}  # fences: errors so far
        self._leaving: set[int] = set()  # peers whose events are to be given back

    def begin(self, records: Sequence[Record]) -> None:
        """Wait for everything that touched the bytes of each record.

        An event is asked here first, in the mode that leaves others' graph captures alone: it is
        often done when the release comes.  Not if an earlier one of its lane is pending: then it
        is asked behind that.
        """
        if self.copying:
            records = [record for record in records if not self._still_copied(record)]
        lanes_of = self._fencing.lanes
        found = [(record, lanes_of(record)) for record in records]
        newest = {lane: record for record, lanes in found for lane in lanes}
        done = self._newest_done(newest)
        if len(done) < len(newest):
            records = [record for record, lanes in found if not self._waits(record, lanes, done)]
        self._free(records)

    def after_copy(self, slot: int, act: Callable[[], None]) -> None:
        """Call ``act`` once no thread queues copies into a slot any more: at once if none does."""
        copy = self.copying.get(slot)
        if copy is None:
            act()
        else:
            copy.add_done_callback(lambda _: act())

    def _still_copied(self, record: Record) -> bool:
        """Say whether it was given up while its copy runs: the copy's end is the fence then."""
        copy = self.copying.get(record.slot)
        if copy is None:
            return False
        copy.add_done_callback(partial(self._copied, record))
        return True

    def _copied(self, record: Record, _: object) -> None:
        self.copying.pop(record.slot, None)
        self.begin((record,))

    def _newest_done(self, newest: dict[Lane, Record]) -> set[Lane]:
        """Return the lanes whose newest fence is done: it stands for all of the lane."""
        done: set[Lane] = set()
        asked: dict[Lane, Fence] = {}
        for lane, record in newest.items():
            if lane in self._lanes:
                continue
            fence = self._fencing.fence(lane, record)
            if fence is None:
                done.add(lane)
            else:
                asked[lane] = fence
        if asked:
            answers = self._fencing.ask([*asked.values()])
            done.update(itertools.compress(asked, answers))
        return done

    def pending(self, record: Record) -> set[int]:
        """Return the peers whose fences a draining record waits for; READY stands for ours."""
        return {peer for peer, _ in self._open.get(record, ())}

    def _waits(self, record: Record, lanes: Sequence[Lane], done: Container[Lane]) -> bool:
        """Have what is not done watched; say whether there is anything."""
        fences = {}
        for lane in lanes:
            if lane not in done and (fence := self._fencing.fence(lane, record)) is not None:
                fences[lane] = fence
        if not fences:
            return False
        self._open[record] = set(fences)
        for lane, fence in fences.items():
            self._lanes[lane] = self._lanes.get(lane, 0) + 1
            # Behind those of its lane that the thread has, it cannot be done before the thread
            # is told of them.
            watch = self._later if lane in self._watched else self._soon.watch
            watch(lane, fence, (record, lane, fence))
        return True

    def _later(self, lane: Hashable, fence: Fence, token: object) -> None:
        if self._closed:
            return
        try:
            self._watch().watch(lane, fence, token)
        except (OSError, RuntimeError) as error:
            # No descriptor, or no thread, for the watcher's first fence; there may be one soon.
            self._once.warning("watcher", "fences are watched later: %s", error)
            loop = asyncio.get_running_loop()
            loop.call_later(AGAIN_SECONDS, self._later, lane, fence, token)
            return
        self._watched[cast("Lane", lane)] = self._watched.get(cast("Lane", lane), 0) + 1

    def _watch(self) -> FenceWatcher:
        if self._watcher is None:
            self._watcher = FenceWatcher(asyncio.get_running_loop(), self._watching, self._on_done)
        return self._watcher

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Be in the region's way of watching; a driver that refuses is asked again."""
        with ExitStack() as stack:
            for left in reversed(range(TRIES)):
                try:
                    stack.enter_context(self._region.watching())
                    break
                except BackendError as error:
                    if not left:
                        raise
                    self._once.warning(kind_of(error), "the fence watcher begins again: %s", error)
            try:
                yield
            finally:
                try:
                    stack.close()
                except BackendError as error:
                    self._once.warning(kind_of(error), "the fence watcher's end: %s", error)

    def _on_done(self, done: list[tuple[object, Exception | None]]) -> None:
        for token, error in done:
            record, lane, fence = cast("_Token", token)
            self._watched[lane] -= 1
            if not self._watched[lane]:
                del self._watched[lane]
            self._settle(record, lane, fence, error)

    def _on_soon(self, done: list[object]) -> None:
        for token in done:
            record, lane, fence = cast("_Token", token)
            self._settle(record, lane, fence, None)

    def _settle(self, record: Record, lane: Lane, fence: Fence, error: Exception | None) -> None:
        self._lanes[lane] -= 1
        if not self._lanes[lane]:
            del self._lanes[lane]
        waits = self._open.get(record)
        if waits is None or lane not in waits:
            return  # its peer died meanwhile
        if error is not None and self._ask_again(record, lane, fence, error):
            return
        if error is not None:
            self._broken.add(record)
            if isinstance(error, DeviceLostError):
                self._lost(error)
            else:
                logger.error("the fence of %r cannot be asked any more: %s", record, error)
        waits.discard(lane)
        if not waits:
            self._finish(record)

    def _ask_again(self, record: Record, lane: Lane, fence: Fence, error: Exception) -> bool:
        """Have a fence that raised asked again; say whether that may help."""
        if isinstance(error, DeviceLostError):
            return False
        count = self._refused.pop((record, lane), 0) + 1
        if count >= TRIES:
            return False
        self._once.warning(kind_of(error), "the fence of %r is asked again: %s", record, error)
        self._refused[record, lane] = count
        self._lanes[lane] = self._lanes.get(lane, 0) + 1
        self._later(lane, fence, (record, lane, fence))
        return True

    def _finish(self, record: Record) -> None:
        del self._open[record]
        if record in self._broken:
            self._broken.discard(record)
            self._core.fence_failed(record)
        else:
            self._free((record,))

    def _free(self, records: Sequence[Record]) -> None:
        """Say that records are free; they may be the last that somebody who left has read."""
        leaving = self._leaving
        last = bool(leaving) and any(
            peer in leaving for record in records for peer, _ in record.released_by
        )
        if records:
            self._freed(records)
        if last:
            self._forget_idle()

    # -- peers that go -----------------------------------------------------------------------

    def gone(self, peer: int, *, died: bool) -> None:
        """Give back the events of a peer that comes no more.

        A dead peer's fences count as done: its process is gone, so its reads are over.  What it
        read may still be being copied, so where nothing else is waited for our own fence is.
        Those of a peer that left in order are kept until all that it read is free: another may
        hold it longer, and if a fence can no longer be asked only the end of its process tells.
        """
        if not died:
            self._leaving.add(peer)
            self._forget_idle()
            return
        self._leaving.discard(peer)
        for record, waits in list(self._open.items()):
            gone = {lane for lane in waits if lane[0] == peer}
            waits -= gone
            if gone and not waits and not self._waits(record, ((READY, ready_slot(record)),), ()):
                self._finish(record)
        self._fencing.forget(peer)

    def _forget_idle(self) -> None:
        for peer in [peer for peer in self._leaving if not self._core.reads_of(peer)]:
            self._leaving.discard(peer)
            self._fencing.forget(peer)
            self._left(peer)

    async def close(self) -> None:
        """Stop watching; what is pending stays unanswered."""
        self._closed = True
        self._soon.clear()
        if self._watcher is not None:
            self._watcher.stop()
            await in_thread(self._watcher.close)
            self._watcher = None  # not before: a close that is begun again waits for it, too
