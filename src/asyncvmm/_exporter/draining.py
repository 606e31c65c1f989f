"""From "everybody let go" to "free": the fences of one exporter.

A slot leaves DRAINING only when everything that touched its bytes is done (inv. 4): the copy into
it, also one that still runs in a worker thread, and the reads of every consumer that released it.
Where memory has no fences (host memory) that is at once and no watcher is ever made.

A consumer's release event was recorded behind its wait for the owner's ready event, so it stands
for both, and the ready event is not asked again: asking two events instead of one costs more than
everything else here.  It is asked where no such release came, and where the exporter writes from
more than one stream, because then nothing else keeps a later copy behind an earlier one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import cast

from asyncvmm._backends.base import ExporterRegion, Fence
from asyncvmm._core.ledger import Record
from asyncvmm._errors import RemoteProtocolError
from asyncvmm._io.fences import FenceWatcher

logger = logging.getLogger("asyncvmm.exporter")

READY = -1
"""Stands where a peer's id stands, for the exporter's own ready events."""


class Draining:
    """Waits for fences without blocking the loop, and says when a record is free.

    ``freed`` is called once per record, ``failed`` instead if a fence can no longer be asked.
    """

    def __init__(
        self,
        region: ExporterRegion,
        freed: Callable[[Record], None],
        failed: Callable[[Record], None],
    ) -> None:
        self.copying: dict[int, asyncio.Future[None]] = {}  # slot -> copy in a worker thread
        self._written: dict[int, int] = {}  # slot -> the stream that wrote it last
        self._streams: set[int] = set()  # every stream that ever wrote
        self._region = region
        self._freed = freed
        self._failed = failed
        self._watcher: FenceWatcher | None = None
        self._open: dict[Record, set[tuple[int, int]]] = {}  # the lanes each still waits for
        self._lanes: dict[tuple[int, int], int] = {}  # fences that the watcher has, by lane
        self._broken: set[Record] = set()
        self._leaving: set[int] = set()  # peers whose events are to be given back

    def record(self, slot: int, stream: int) -> None:
        """Record a slot's ready event on the stream that writes it."""
        self._region.record_ready(slot, stream)
        self._written[slot] = stream
        self._streams.add(stream)

    def begin(self, records: Sequence[Record]) -> None:
        """Wait for everything that touched the bytes of each record.

        An event is asked here first, in the mode that leaves others' graph captures alone: where
        the GPUs run at the same time it is mostly done when the release comes, and a thread that
        has to be woken, and to wake the loop, costs ten times the question.  Not if an earlier
        one of its lane is pending: then it cannot be done.
        """
        found = []
        for record in records:
            copy = self.copying.get(record.slot)
            if copy is None:
                found.append((record, self._fences(record)))
            else:
                # Given up while its copy runs: the copy's end is the fence.
                copy.add_done_callback(partial(self._copied, record))
        asked = [
            (fences, lane_of, fence)
            for _, fences in found
            for lane_of, fence in fences.items()
            if lane_of not in self._lanes
        ]
        if asked:
            answers = self._region.ask([fence for *_, fence in asked])
            for (fences, lane_of, _), done in zip(asked, answers, strict=True):
                if done:
                    del fences[lane_of]
        for record, fences in found:
            if fences:
                self._wait(record, fences)
            else:
                self._freed(record)

    def _wait(self, record: Record, fences: dict[tuple[int, int], Fence]) -> None:
        self._open[record] = set(fences)
        watcher = self._watch()
        for lane_of, fence in fences.items():
            self._lanes[lane_of] = self._lanes.get(lane_of, 0) + 1
            watcher.watch(lane_of, fence, (record, lane_of))

    def _fences(self, record: Record) -> dict[tuple[int, int], Fence]:
        fences: dict[tuple[int, int], Fence] = {}
        for peer, lane in record.released_by:
            fence = self._release_fence(peer, record.slot) if lane else None
            if fence is not None:
                fences[peer, lane] = fence
        if not fences or len(self._streams) > 1:
            ready = self._region.ready_fence(record.slot)
            if ready is not None:
                fences[READY, self._written.get(record.slot, 0)] = ready
        return fences

    def _release_fence(self, peer: int, slot: int) -> Fence | None:
        try:
            return self._region.release_fence(peer, slot)
        except RemoteProtocolError as error:
            # It says that it read on a stream and never gave the event: its reads are its risk.
            logger.warning("consumer %d broke the rules: %s", peer, error)
            return None

    def _copied(self, record: Record, _: object) -> None:
        self.copying.pop(record.slot, None)
        self.begin((record,))

    def _watch(self) -> FenceWatcher:
        if self._watcher is None:
            self._watcher = FenceWatcher(
                asyncio.get_running_loop(), self._region.watching, self._on_done
            )
        return self._watcher

    def _on_done(self, done: list[tuple[object, Exception | None]]) -> None:
        for token, error in done:
            record, lane_of = cast("tuple[Record, tuple[int, int]]", token)
            self._lanes[lane_of] -= 1
            if not self._lanes[lane_of]:
                del self._lanes[lane_of]
            waits = self._open.get(record)
            if waits is None or lane_of not in waits:
                continue  # its peer died meanwhile
            if error is not None:
                logger.error("the fence of %r cannot be asked any more: %s", record, error)
                self._broken.add(record)
            waits.discard(lane_of)
            if not waits:
                self._finish(record)
        if self._leaving:
            self._forget_idle()

    def _finish(self, record: Record) -> None:
        del self._open[record]
        if record in self._broken:
            self._broken.discard(record)
            self._failed(record)
        else:
            self._freed(record)

    # -- peers that go -----------------------------------------------------------------------

    def gone(self, peer: int, *, died: bool) -> None:
        """Give back the events of a peer that comes no more.

        A dead peer's fences count as done: its process is gone, so its reads are over.  Those of
        a peer that left in order are waited for first.
        """
        if not died:
            self._leaving.add(peer)
            self._forget_idle()
            return
        for record, waits in list(self._open.items()):
            gone = {lane_of for lane_of in waits if lane_of[0] == peer}
            waits -= gone
            if gone and not waits:
                self._finish(record)
        self._region.forget_peer(peer)

    def _forget_idle(self) -> None:
        busy: set[Hashable] = {peer for waits in self._open.values() for peer, _ in waits}
        for peer in self._leaving - busy:
            self._leaving.discard(peer)
            self._region.forget_peer(peer)

    async def close(self) -> None:
        """Stop watching; what is pending stays unanswered."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()
            await asyncio.to_thread(watcher.close)
