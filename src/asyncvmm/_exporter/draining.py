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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

from asyncvmm._backends.base import ExporterRegion, Fence
from asyncvmm._core.ledger import Record
from asyncvmm._errors import BackendError, RemoteProtocolError
from asyncvmm._exporter.late import LateFence
from asyncvmm._io.fences import FenceWatcher

logger = logging.getLogger("asyncvmm.exporter")

READY = -1
"""Stands where a peer's id stands, for the exporter's own ready events."""

TRIES = 3
"""How often something that the driver refuses is tried before a slot is quarantined for it."""


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
        self._refused: dict[tuple[Record, tuple[int, int]], int] = {}  # fences: errors so far
        self._late: dict[tuple[int, int], LateFence] = {}  # by (peer, slot); READY for ours
        self._leaving: set[int] = set()  # peers whose events are to be given back

    def record(self, slot: int, stream: int) -> None:
        """Record a slot's ready event on the stream that writes it."""
        self._region.record_ready(slot, stream)
        self._written[slot] = stream
        self._streams.add(stream)

    def record_end(self, slot: int, stream: int) -> None:
        """Record the end of the writes to a slot that is given up unpublished.

        Never raises: if the driver refuses, it is asked again, and the slot drains until then.
        A slot without an event was never written, for that is made before the first write.
        """
        if self._region.ready_fence(slot) is None:
            return
        try:
            self.record(slot, stream)
        except BackendError as error:
            logger.error("slot %d drains until its event can be recorded: %s", slot, error)

            def recorded() -> Fence | None:
                self._region.record_ready(slot, stream)
                return self._region.ready_fence(slot)

            self._late[READY, slot] = LateFence(recorded)

    def open_release(self, peer: int, slot: int, handle: bytes) -> None:
        """Open a consumer's event; if the driver refuses, its slot drains until it does not."""
        try:
            self._region.open_release(peer, slot, handle)
        except BackendError as error:
            logger.error(
                "slot %d drains until the event of consumer %d can be opened: %s", slot, peer, error
            )

            def opened() -> Fence | None:
                self._region.open_release(peer, slot, handle)
                return self._region.release_fence(peer, slot)

            self._late[peer, slot] = LateFence(opened)

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
        self._ask_newest(found)
        for record, fences in found:
            if fences:
                self._wait(record, fences)
            else:
                self._freed(record)

    def _ask_newest(self, found: list[tuple[Record, dict[tuple[int, int], Fence]]]) -> None:
        """Drop the fences that are done: the newest of a lane stands for all of it."""
        newest = {
            lane_of: fence
            for _, fences in found
            for lane_of, fence in fences.items()
            if lane_of not in self._lanes
        }
        if newest:
            answers = self._answers(list(newest.values()))
            done = {lane_of for lane_of, yes in zip(newest, answers, strict=True) if yes}
            for _, fences in found:
                for lane_of in done & fences.keys():
                    del fences[lane_of]

    def _answers(self, fences: list[Fence]) -> list[bool]:
        try:
            return self._region.ask(fences)
        except BackendError as error:
            logger.warning("fences are left to the watcher: %s", error)
            return [False] * len(fences)

    def pending(self, record: Record) -> set[int]:
        """Return the peers whose fences a draining record waits for; READY stands for ours."""
        return {peer for peer, _ in self._open.get(record, ())}

    def _late_fence(self, peer: int, slot: int) -> Fence | None:
        late = self._late.get((peer, slot))
        if late is not None and late.made:
            del self._late[peer, slot]
            return None
        return late

    def _wait(self, record: Record, fences: dict[tuple[int, int], Fence]) -> None:
        self._open[record] = set(fences)
        watcher = self._watch()
        for lane_of, fence in fences.items():
            self._lanes[lane_of] = self._lanes.get(lane_of, 0) + 1
            watcher.watch(lane_of, fence, (record, lane_of, fence))

    def _fences(self, record: Record) -> dict[tuple[int, int], Fence]:
        fences: dict[tuple[int, int], Fence] = {}
        for peer, lane in record.released_by:
            fence = self._release_fence(peer, record.slot) if lane else None
            if fence is not None:
                fences[peer, lane] = fence
        if not fences or len(self._streams) > 1:
            ready = self._late_fence(READY, record.slot) if self._late else None
            ready = ready or self._region.ready_fence(record.slot)
            if ready is not None:
                fences[READY, self._written.get(record.slot, 0)] = ready
        return fences

    def _release_fence(self, peer: int, slot: int) -> Fence | None:
        late = self._late_fence(peer, slot) if self._late else None
        if late is not None:
            return late
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
                    logger.warning("the fence watcher begins again: %s", error)
            try:
                yield
            finally:
                try:
                    stack.close()
                except BackendError as error:
                    logger.warning("the fence watcher's end: %s", error)

    def _on_done(self, done: list[tuple[object, Exception | None]]) -> None:
        for token, error in done:
            record, lane_of, fence = cast("tuple[Record, tuple[int, int], Fence]", token)
            self._lanes[lane_of] -= 1
            if not self._lanes[lane_of]:
                del self._lanes[lane_of]
            waits = self._open.get(record)
            if waits is None or lane_of not in waits:
                continue  # its peer died meanwhile
            if error is not None and self._ask_again(record, lane_of, fence, error):
                continue
            if error is not None:
                logger.error("the fence of %r cannot be asked any more: %s", record, error)
                self._broken.add(record)
            waits.discard(lane_of)
            if not waits:
                self._finish(record)
        if self._leaving:
            self._forget_idle()

    def _ask_again(
        self, record: Record, lane_of: tuple[int, int], fence: Fence, error: Exception
    ) -> bool:
        """Have a fence that raised asked again; say whether that was not too often."""
        count = self._refused.pop((record, lane_of), 0) + 1
        if count >= TRIES:
            return False
        logger.warning("the fence of %r is asked again: %s", record, error)
        self._refused[record, lane_of] = count
        self._lanes[lane_of] = self._lanes.get(lane_of, 0) + 1
        self._watch().watch(lane_of, fence, (record, lane_of, fence))
        return True

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
        self._forget(peer)

    def _forget_idle(self) -> None:
        busy: set[Hashable] = {peer for waits in self._open.values() for peer, _ in waits}
        for peer in self._leaving - busy:
            self._leaving.discard(peer)
            self._forget(peer)

    def _forget(self, peer: int) -> None:
        for key in [key for key in self._late if key[0] == peer]:
            self._late.pop(key).give_up()
        try:
            self._region.forget_peer(peer)
        except BackendError as error:
            # The region keeps what it could not give back, for its close.
            logger.warning("events of consumer %d stay for now: %s", peer, error)

    async def close(self) -> None:
        """Stop watching; what is pending stays unanswered."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()
            await asyncio.to_thread(watcher.close)
