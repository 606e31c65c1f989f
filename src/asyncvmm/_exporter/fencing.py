"""Which fences stand for the end of what touched a slot's bytes.

A consumer's release event was recorded behind its wait for the owner's ready event, so it stands
for both, and the ready event is not asked again: asking two events instead of one costs more than
everything else here.  It is asked where no such release came, and where the exporter writes from
more than one stream, because then nothing else keeps a later copy behind an earlier one.

An event of a killed process answers "done" at once, whatever it was recorded behind.  From the
moment its death is known nothing of it stands for anything, and the ready event is asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from asyncvmm._backends.base import ExporterRegion, Fence
from asyncvmm._core.ledger import Record
from asyncvmm._core.wire import NO_LANE
from asyncvmm._errors import BackendError, DeviceLostError
from asyncvmm._exporter.late import LateFence
from asyncvmm._logs import Once, kind_of

logger = logging.getLogger("asyncvmm.exporter")

READY = -1
"""Stands where a peer's id stands, for the exporter's own ready events."""

Lane: TypeAlias = tuple[int, int]
"""(peer, lane): fences of one lane finish in the order in which they were released.

Of our own, which are recorded in one order and released in another, each slot is its own lane; so
is each event of those that read what others had, too."""


def ready_slot(record: Record) -> int:
    """Return the slot whose ready event stands for the end of the writes to a record's bytes."""
    return record.slot if record.ready_slot < 0 else record.ready_slot


def _one_by_one(record: Record, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
    """Make each event its own lane.

    An owner that others had, too, drains when the last of them lets go: so several drain in
    another order than each of their readers gave them back in.
    """
    shared = record.release_slots or {}
    return tuple([(peer, -1 - shared.get(peer, record.slot)) for peer, _ in lanes])


class Fencing:
    """The events of one exporter's slots: its own, and those of its consumers.

    ``lost`` is told of an error after which no event of this process can be made or asked, where
    no fence is there that would raise it again.
    """

    def __init__(self, region: ExporterRegion, lost: Callable[[DeviceLostError], None]) -> None:
        self._region = region
        self._lost = lost
        self._once = Once(logger)
        self._written: dict[int, int] = {}  # slot -> the stream that wrote it last
        self._streams: set[int] = set()  # every stream that ever wrote
        self._given: set[tuple[int, int]] = set()  # (peer, slot) of the events that peers gave
        self._late: dict[tuple[int, int], LateFence] = {}  # by (peer, slot); READY for ours
        self._dead: set[int] = set()  # peers whose last words are being read

    def prepare(self, slot: int) -> None:
        """Have a slot's ready event made before its bytes are written."""
        if slot not in self._written:
            try:
                self._region.ready_handle(slot)
            except DeviceLostError as error:
                self._lost(error)
                raise

    def prepare_all(self, records: Sequence[Record]) -> None:
        """Have one event made for records that are written together: that of the first's slot.

        The slot may be free, and its event recorded again, before another of them is: whoever
        then waits for that waits longer than it must, and never too short, because the slot is
        free only once what was written with it is.
        """
        first = records[0].slot
        for record in records:
            record.ready_slot = first
        self.prepare(first)

    def record(self, slot: int, stream: int) -> bytes:
        """Record a slot's ready event on the stream that writes it; return its handle."""
        handle = self._region.record_ready(slot, stream)
        if self._written.get(slot) != stream:
            self._written[slot] = stream
            self._streams.add(stream)
        return handle

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
            self._once.warning(
                kind_of(error), "slot %d drains until its event can be recorded: %s", slot, error
            )

            def recorded() -> Fence | None:
                self._region.record_ready(slot, stream)
                return self._region.ready_fence(slot)

            self._late[READY, slot] = LateFence(recorded)

    def open_release(self, peer: int, slot: int, handle: bytes) -> None:
        """Open a consumer's event; if the driver refuses, its slot drains until it does not."""
        if peer in self._dead:
            return
        try:
            self._region.open_release(peer, slot, handle)
        except BackendError as error:
            self._once.warning(
                kind_of(error),
                "slot %d drains until the event of consumer %d can be opened: %s",
                slot,
                peer,
                error,
            )

            def opened() -> Fence | None:
                self._region.open_release(peer, slot, handle)
                return self._region.release_fence(peer, slot)

            self._late[peer, slot] = LateFence(opened)
        self._given.add((peer, slot))

    def lanes(self, record: Record) -> Sequence[Lane]:
        """Return the lanes in which something has to be done before the bytes are nobody's."""
        slot, given = record.slot, self._given
        lanes, shared = record.released_by, record.release_slots
        for peer, lane in lanes:
            at = slot if shared is None else shared.get(peer, slot)
            if not 0 < lane < NO_LANE or (peer, at) not in given:
                lanes = self._with_events(record)
                break
        if len(record.released) > 1 or record.refused or record.lost:
            lanes = _one_by_one(record, lanes)
        if not lanes or len(self._streams) > 1:
            slot = ready_slot(record)
            late = self._late_fence(READY, slot) if self._late else None
            if late or self._region.ready_fence(slot) is not None:
                return (*lanes, (READY, slot))
        return lanes

    def _with_events(self, record: Record) -> tuple[Lane, ...]:
        """Leave out the releases of those who read nothing, and of those who gave no event.

        An event in no lane is its own.
        """
        found = []
        shared = record.release_slots or {}
        for peer, lane in record.released_by:
            slot = shared.get(peer, record.slot)
            if (peer, slot) in self._given:
                if lane:
                    found.append((peer, lane if lane != NO_LANE else -1 - slot))
            elif lane and peer not in self._dead:
                # It says that it read on a stream: its reads are its risk.
                self._once.warning(
                    peer, "consumer %d broke the rules: no event came for slot %d", peer, slot
                )
        return tuple(found)

    def fence(self, lane: Lane, record: Record) -> Fence | None:
        """Return what a record waits for in one of its lanes; None if that is surely done."""
        peer, slot = lane[0], record.slot
        if peer == READY:
            slot = ready_slot(record)
        elif record.release_slots is not None:
            slot = record.release_slots.get(peer, slot)
        late = self._late_fence(peer, slot) if self._late else None
        if late is not None:
            return late
        if peer == READY:
            return self._region.ready_fence(slot)
        return self._region.release_fence(peer, slot)

    def _late_fence(self, peer: int, slot: int) -> Fence | None:
        late = self._late.get((peer, slot))
        if late is not None and late.made:
            del self._late[peer, slot]
            return None
        return late

    def ask(self, fences: Sequence[Fence]) -> list[bool]:
        """Say of each fence whether it is known to be done; never raises."""
        try:
            return self._region.ask(fences)
        except BackendError as error:
            self._once.warning(kind_of(error), "fences are left to the watcher: %s", error)
            return [False] * len(fences)

    def distrust(self, peer: int) -> None:
        """Let no event of a dead peer stand for anything, also not for what it said last."""
        self._dead.add(peer)
        self._given = {event for event in self._given if event[0] != peer}

    def forget(self, peer: int) -> None:
        """Give back the events of a peer that comes no more."""
        self._dead.discard(peer)
        self._given = {event for event in self._given if event[0] != peer}
        for key in [key for key in self._late if key[0] == peer]:
            self._late.pop(key).give_up()
        try:
            self._region.forget_peer(peer)
        except BackendError as error:
            # The region keeps what it could not give back, for its close.
            logger.warning("events of consumer %d stay for now: %s", peer, error)
