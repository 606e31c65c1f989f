"""From "everybody let go" to "free": the fences of one exporter.

A slot leaves DRAINING only when everything that touched its bytes is done (inv. 4): the copy into
it, also one that still runs in a worker thread, and the reads of every consumer that released it.
Where memory has no fences (host memory) that is at once and no watcher is ever made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from asyncvmm._backends.base import ExporterRegion, Fence
from asyncvmm._core.ledger import Record
from asyncvmm._errors import RemoteProtocolError
from asyncvmm._io.fences import FenceWatcher

logger = logging.getLogger("asyncvmm.exporter")


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
        self._region = region
        self._freed = freed
        self._failed = failed
        self._watcher: FenceWatcher | None = None
        self._open: dict[Record, int] = {}  # how many fences each record still waits for
        self._broken: set[Record] = set()

    def begin(self, record: Record) -> None:
        """Wait for everything that touched the record's bytes."""
        copy = self.copying.get(record.slot)
        if copy is not None:
            # Given up while its copy runs: the copy's end is the fence.
            copy.add_done_callback(lambda _: self._copied(record))
            return
        fences: list[tuple[object, Fence]] = []
        ready = self._region.ready_fence(record.slot)
        if ready is not None:
            fences.append((("ready", record.slot), ready))
        for peer, lane in record.released_by:
            fence = self._release_fence(peer, record.slot) if lane else None
            if fence is not None:
                fences.append(((peer, lane), fence))
        if not fences:
            self._freed(record)
            return
        self._open[record] = len(fences)
        watcher = self._watch()
        for where, fence in fences:
            watcher.watch(where, fence, record)

    def _release_fence(self, peer: int, slot: int) -> Fence | None:
        try:
            return self._region.release_fence(peer, slot)
        except RemoteProtocolError as error:
            # It says that it read on a stream and never gave the event: its reads are its risk.
            logger.warning("consumer %d broke the rules: %s", peer, error)
            return None

    def _copied(self, record: Record) -> None:
        self.copying.pop(record.slot, None)
        self.begin(record)

    def _watch(self) -> FenceWatcher:
        if self._watcher is None:
            self._watcher = FenceWatcher(
                asyncio.get_running_loop(), self._region.watching, self._on_done
            )
        return self._watcher

    def _on_done(self, done: list[tuple[object, Exception | None]]) -> None:
        for record, error in done:
            assert isinstance(record, Record)
            if error is not None:
                logger.error("the fence of %r cannot be asked any more: %s", record, error)
                self._broken.add(record)
            self._open[record] -= 1
            if not self._open[record]:
                del self._open[record]
                if record in self._broken:
                    self._broken.discard(record)
                    self._failed(record)
                else:
                    self._freed(record)

    def close(self) -> None:
        """Stop watching; what is pending stays unanswered."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
