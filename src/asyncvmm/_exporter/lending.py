"""Lending chunks: from room to loan to publication to free, behind the exporter's public face."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from asyncvmm._backends.base import ExporterRegion
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.ledger import Record
from asyncvmm._core.routing import To
from asyncvmm._errors import BackendError, OwnerTooLargeError, WouldBlock
from asyncvmm._exporter.acknowledgement import Acknowledgement, Require
from asyncvmm._exporter.connections import Connections
from asyncvmm._exporter.copier import Copier
from asyncvmm._exporter.draining import Draining
from asyncvmm._exporter.elastic import Elastic
from asyncvmm._exporter.ending import Ending
from asyncvmm._exporter.explaining import Telling, explain
from asyncvmm._exporter.fencing import Fencing, ready_slot
from asyncvmm._exporter.reporting import Counters
from asyncvmm._exporter.room import Room
from asyncvmm._exporter.terms import PLAIN, Terms, make_terms
from asyncvmm._fds import close_after_fork
from asyncvmm._io.turn import Turn
from asyncvmm._io.waiting import wake
from asyncvmm._logs import Once, kind_of
from asyncvmm._tensors import DevicePort
from asyncvmm._types import Key

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Layout, Plan, Tensor


class Lending(Ending):
    """Joins the core with the pool, the sockets and torch; see :class:`asyncvmm.Exporter`."""

    def __init__(
        self,
        name: str,
        port: DevicePort,
        region: ExporterRegion,
        core: ExporterCore,
        connections: Connections,
        *,
        debug: bool,
        explain_after: float,
    ) -> None:
        super().__init__()
        self.name = name
        self._port = port
        self._region = region
        self._once = Once(logging.getLogger("asyncvmm.exporter"))
        self._core = core
        self._connections = connections
        self._debug = debug
        self._elastic: Elastic
        late = Telling(name, partial(explain, self)).tell
        self._room = Room(core.fit, lambda sizes: self._elastic.want(sizes), late, explain_after)
        self._queue = self._room.queue  # of those who wait; empty most of the time
        self._fencing = Fencing(region, self._lose_device)
        self._draining = Draining(
            region, self._fencing, core, self._freed, connections.left, self._lose_device
        )
        self._copier = Copier(port, self._draining)
        self._keys = itertools.count()  # of owners to whom none was given
        self._turn = Turn()
        self._plan_tensors, self._plan_specs = port.plan_tensors, port.plan_specs
        self._copies_slowly, self._copy_in = port.copies_slowly, port.copy_in
        self._current_stream = port.current_stream
        self._address, self._fenced = region.address, region.fenced
        self._counters = Counters()
        close_after_fork(self)

    # -- what sending and reservations use ---------------------------------------------------

    def _terms(
        self, plan: Plan, key: Key | None, metadata: object, to: To, require: Require
    ) -> Terms:
        """Check everything that can be checked before a slot is taken."""
        if self._forked or self._shut:
            self._guard()
        limit = self._elastic.max_pool_bytes
        if plan.nbytes > limit:
            raise OwnerTooLargeError(plan.nbytes, limit)
        if metadata is None and to is None and require == "all":
            if key is None:
                return PLAIN
            if type(key) is int and -(1 << 63) <= key < 1 << 64:  # what MessagePack holds
                return Terms(key)
        return make_terms(self._core, plan.layout.described, key, metadata, to, require)

    async def _breathe(self) -> None:
        """Let the loop turn: who sends in a loop and never has to wait would keep it."""
        self._turn.begin()
        for connection in self._connections.open.values():
            connection.link.due.linger()
        await asyncio.sleep(0)
        self._guard()

    async def _acquire(self, nbytes: int) -> Record:
        if self._turn.over:
            await self._breathe()
        self._guard()  # a reservation may be entered long after it was asked for
        record = None if self._queue else self._core.reserve(nbytes)
        if record is None:
            with self._connections.busy:
                await self._room.turn(nbytes)
            record = self._core.reserve(nbytes)
            assert record is not None, "room.turn() promised it and nothing ran in between"
        return record

    def _acquire_nowait(self, nbytes: int) -> Record:
        self._guard()
        record = None if self._queue else self._core.reserve(nbytes)
        if record is None:
            raise self._would_block(f"{nbytes:,} bytes")
        return record

    def _would_block(self, what: str) -> WouldBlock:
        gap, slots = self._core.bytes.largest_gap, self._core.slots.free
        return WouldBlock(
            f"no room for {what} now: the largest gap is {gap:,} bytes, {slots} slots are free, "
            f"{len(self._room)} calls wait already"
        )

    def _fill(self, record: Record, plan: Plan, terms: Terms, stream: int) -> Acknowledgement:
        try:
            if self._fenced:
                self._fencing.prepare(record.slot)
            self._copy_in(self._address + record.start, plan, stream)
            ack = self._publish(record, plan.layout, terms, stream)
        except BaseException:
            self._abandon(record, stream)
            raise
        counters = self._counters
        counters.copies += 1
        counters.copied_bytes += plan.nbytes
        return ack

    async def _fill_elsewhere(
        self, record: Record, plan: Plan, terms: Terms, stream: int
    ) -> Acknowledgement:
        try:
            self._prepare(record)
            place = (self._address + record.start, plan)
            await self._copier.copy((record.slot,), (place,), stream)
            ack = self._publish(record, plan.layout, terms, stream)
        except BaseException:
            self._abandon(record, stream)
            raise
        self._counters.copies += 1
        self._counters.copied_bytes += plan.nbytes
        return ack

    def _prepare(self, record: Record) -> None:
        """Begin a loan that takes a while.

        The slot's event is there before its bytes are written: there is a fence for the end then.
        """
        record.stamp = monotonic()
        if self._fenced:
            self._fencing.prepare(record.slot)

    def _publish(
        self, record: Record, layout: Layout, terms: Terms, stream: int
    ) -> Acknowledgement:
        if self._forked or self._shut:
            self._guard()
        key = next(self._keys) if terms.key is None else terms.key
        ready = self._fencing.record(record.slot, stream) if self._fenced else b""
        self._core.publish(
            record, key, layout.features, terms.metadata, terms.to, ready, terms.proof
        )
        ack = record.acknowledgement = Acknowledgement(key, terms.require, self._connections.busy)
        record.stamp = monotonic()
        self._turn.count(len(layout.features))
        self._counters.published += 1
        self._pump()
        return ack

    def _abandon(self, record: Record, stream: int) -> None:
        """Give a chunk back unpublished, once nothing writes to it any more (inv. 3, 4)."""
        if self._forked or self._ended:
            return  # the pool is gone, and the loan with it
        if self._fenced:
            self._draining.after_copy(record.slot, partial(self._record_end, record, stream))
        self._core.abandon(record)
        self._pump()

    def _record_end(self, record: Record, stream: int) -> None:
        if not self._ended:
            self._fencing.record_end(ready_slot(record), stream)

    def _writable(self, record: Record) -> object:
        keepalive = self._region.keepalive()
        return self._port.holder(self._address + record.start, record.nbytes, keepalive)

    def _view(self, holder: object, layout: Layout, number: int) -> Tensor:
        return self._port.view(holder, layout.offsets[number], layout.features[number])

    def _stream(self, stream: object) -> int:
        return self._port.stream_of(stream)

    # -- the core's outputs ------------------------------------------------------------------

    def _told(self) -> None:
        """Drain the core's outputs after what a callback of the loop has brought."""
        self._turn.begin()
        self._pump()

    def _pump(self, *, whole: bool = False) -> None:
        """Drain the core's outputs; call it after every input, ``whole`` if that fills a packet."""
        core = self._core
        outgoing = core.outgoing
        if outgoing:
            connections = self._connections.open
            # With one owner out somebody waits for just this; with more, what is posted in one
            # loop turn leaves together.
            now = whole or len(core.records) <= 1
            for peer_id, data in outgoing:
                connection = connections.get(peer_id)
                if connection is None:
                    continue
                if now:
                    connection.link.post_now((data,))
                else:
                    connection.link.post(data)
            outgoing.clear()
        while core.draining:
            draining, core.draining = core.draining, []
            if self._fenced or self._draining.copying:
                self._counters.let_go(draining)
                self._draining.begin(draining)
            else:
                self._freed(draining)

    def _freed(self, records: Sequence[Record]) -> None:
        """Every fence is done: the bytes are nobody's now."""
        if self._debug:
            for record in records:
                self._poison(record)
        self._core.drained(*records)
        self._counters.freed(records)
        for record in records:
            ack = record.acknowledgement
            # Whoever keeps the acknowledgement keeps the outcome, not the packet; and no circle
            # is left for the garbage collector.
            record.acknowledgement = record.batch = None
            if isinstance(ack, Acknowledgement):
                ack._settle(record)
        if self._queue:
            self._room.wake()
        if self._idle and not any(r.published for r in self._core.records.values()):
            wake(self._idle)

    def _poison(self, record: Record) -> None:
        try:
            self._region.poison(record.start, record.nbytes)
        except BackendError as error:
            self._once.warning(kind_of(error), "slot %d is not poisoned: %s", record.slot, error)
