"""The exporter as its user sees it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING

from asyncvmm._backends.base import ExporterRegion
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.ledger import Record
from asyncvmm._errors import (
    ArgumentError,
    AsyncVMMError,
    ClosedError,
    ForkError,
    OwnerTooLargeError,
    WouldBlock,
)
from asyncvmm._exporter.acknowledgement import Acknowledgement, Require
from asyncvmm._exporter.connections import Connections
from asyncvmm._exporter.copier import Copier
from asyncvmm._exporter.draining import Draining
from asyncvmm._exporter.elastic import Elastic
from asyncvmm._exporter.reporting import Counters, report
from asyncvmm._exporter.reservation import Reservation, Terms, pack_metadata
from asyncvmm._exporter.room import Room
from asyncvmm._exporter.statistics import PoolStatistics
from asyncvmm._fds import close_after_fork
from asyncvmm._tensors import DevicePort
from asyncvmm._types import Group, Key, TensorSpec, is_int

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Plan, Tensor

To = Group | Iterable[int] | int | None


class Exporter:
    """Owns a bounded pool and hands out chunks of it; open one with ``open_exporter``.

    Every method is to be called on the event loop it was opened on.  Everything awaited here may
    be cancelled at any point: a cancelled call loses neither a slot nor a byte (inv. 9).
    """

    def __init__(
        self,
        name: str,
        port: DevicePort,
        region: ExporterRegion,
        core: ExporterCore,
        connections: Connections,
        *,
        debug: bool,
    ) -> None:
        self.name = name
        self._port = port
        self._region = region
        self._core = core
        self._connections = connections
        self._debug = debug
        self._elastic: Elastic
        self._room = Room(core.fits, lambda nbytes: self._elastic.want(nbytes))
        self._draining = Draining(region, self._freed, core.fence_failed)
        self._copier = Copier(port, self._draining)
        self._next_key = 0
        self._made_in = os.getpid()
        self._forked = False
        self._closing = False
        self._idle: list[asyncio.Future[None]] = []
        self._plan_tensors, self._plan_specs = port.plan_tensors, port.plan_specs
        self._copies_slowly, self._copy_in = port.copies_slowly, port.copy_in
        self._address = region.address
        self._counters = Counters()
        close_after_fork(self)

    # -- sending -----------------------------------------------------------------------------

    async def send(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
    ) -> Acknowledgement:
        """Copy features into one chunk and publish them as one owner.

        Waits for a slot and for room (first come, first served); returns once the copy is queued
        on the current stream, and the sources may be freed then.  ``metadata`` is any value of
        plain data (None, bool, numbers, text, bytes, lists, mappings).  ``to`` narrows a
        Broadcast to some ranks.  ``require`` is what awaiting the acknowledgement asks of the
        consumers: "all" of them, "any", or "none".

        Raises InvalidTensorError (it names the feature), OwnerTooLargeError, ArgumentError and
        RankError before anything is taken; ClosedError if the exporter closes while it waits.
        Cancelled, it publishes nothing, and the chunk returns once no copy touches it any more.
        """
        plan, terms = self._terms(self._plan_tensors(features), key, metadata, to, require)
        return await self._fill(await self._acquire(plan.nbytes), plan, terms)

    async def send_nowait(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
    ) -> Acknowledgement:
        """Do as ``send``, but raise WouldBlock instead of waiting for room.

        It is still awaited, because a large copy leaves the event loop.
        """
        plan, terms = self._terms(self._plan_tensors(features), key, metadata, to, require)
        return await self._fill(self._acquire_nowait(plan.nbytes), plan, terms)

    def reserve(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
    ) -> Reservation:
        """Make room for features that the caller writes in place; use it with ``async with``.

        Entering waits for room, as ``send`` does, and gives a :class:`WritableOwner`.
        """
        plan, terms = self._terms(self._plan_specs(specs), key, metadata, to, require)
        return Reservation(self, plan, terms, wait=True)

    def reserve_nowait(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
    ) -> Reservation:
        """Do as ``reserve``, but entering raises WouldBlock instead of waiting."""
        plan, terms = self._terms(self._plan_specs(specs), key, metadata, to, require)
        return Reservation(self, plan, terms, wait=False)

    # -- looking and waiting -----------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Return what the pool, its owners and its consumers look like now."""
        return report(self)

    async def drain(self) -> None:
        """Wait until nothing is out: every published owner's memory is back."""
        self._guard()
        await self._until_idle()

    async def wait_attached(self, count: int) -> None:
        """Wait until ``count`` consumers are attached at once.  Sending need not wait for it."""
        self._guard()
        await self._connections.wait_attached(count)

    async def _until_idle(self) -> None:
        while any(record.published for record in self._core.records.values()):
            future = asyncio.get_running_loop().create_future()
            self._idle.append(future)
            await future

    # -- what reservations use (Lender) ------------------------------------------------------

    def _guard(self) -> None:
        if self._forked:
            raise ForkError("exporter", self._made_in, os.getpid())
        if self._closing:
            raise ClosedError(f"the exporter {self.name!r} is closed")

    def _terms(
        self, plan: Plan, key: Key | None, metadata: object, to: To, require: Require
    ) -> tuple[Plan, Terms]:
        """Check everything that can be checked before a slot is taken."""
        self._guard()
        if plan.nbytes > self._elastic.limit:
            raise OwnerTooLargeError(plan.nbytes, self._elastic.limit)
        if key is not None and not (is_int(key) or isinstance(key, str)):
            raise ArgumentError(f"an owner's key is text or an int, got {key!r:.80}")
        if to is not None:
            to = to if isinstance(to, int | Group) else tuple(to)
            self._core.check_narrowing(to)
        if require not in ("all", "any", "none"):
            raise ArgumentError(f"require={require!r} is unknown; give 'all', 'any' or 'none'")
        return plan, Terms(key, pack_metadata(metadata), to, require)

    async def _acquire(self, nbytes: int) -> Record:
        if not len(self._room):
            record = self._core.reserve(nbytes)
            if record is not None:
                return record
        await self._room.turn(nbytes)
        return self._acquired(nbytes)

    def _acquire_nowait(self, nbytes: int) -> Record:
        self._guard()
        record = None if len(self._room) else self._core.reserve(nbytes)
        if record is None:
            gap, slots = self._core.bytes.largest_gap, self._core.slots.free
            raise WouldBlock(
                f"no room for {nbytes:,} bytes now: the largest gap is {gap:,} bytes, {slots} "
                f"slots are free, {len(self._room)} calls wait already"
            )
        return record

    def _acquired(self, nbytes: int) -> Record:
        record = self._core.reserve(nbytes)
        assert record is not None, "room.turn() promised it and nothing ran in between"
        return record

    async def _fill(self, record: Record, plan: Plan, terms: Terms) -> Acknowledgement:
        stream = self._port.current_stream()
        try:
            if self._copies_slowly(plan):
                await self._copier.copy(record.slot, self._address + record.start, plan, stream)
                self._guard()
            else:
                self._copy_in(self._address + record.start, plan, stream)
            ack = self._publish(record, plan, terms, stream)
        except BaseException:
            self._abandon(record, stream)
            raise
        self._counters.copies += 1
        self._counters.copied_bytes += plan.nbytes
        return ack

    def _publish(self, record: Record, plan: Plan, terms: Terms, stream: int) -> Acknowledgement:
        if self._forked or self._closing:
            self._guard()
        key = terms.key
        if key is None:
            key, self._next_key = self._next_key, self._next_key + 1
        region, slot = self._region, record.slot
        region.record_ready(slot, stream)
        self._core.publish(
            record,
            key=key,
            features=plan.features,
            metadata=terms.metadata,
            to=terms.to,
            ready=region.ready_handle(slot),
        )
        ack = Acknowledgement(key, terms.require)
        record.acknowledgement = ack
        record.stamp = monotonic()
        self._counters.published += 1
        self._pump()
        return ack

    def _abandon(self, record: Record, stream: int) -> None:
        """Give a chunk back unpublished, once nothing writes to it any more (inv. 3, 4)."""
        if self._forked:
            return
        self._region.record_ready(record.slot, stream)
        self._core.abandon(record)
        self._pump()

    def _writable(self, record: Record, nbytes: int) -> object:
        return self._port.holder(self._address + record.start, nbytes, self._region.keepalive())

    def _view(self, holder: object, plan: Plan, index: int) -> Tensor:
        return self._port.view(holder, plan.offsets[index], plan.features[index])

    def _stream(self, stream: object) -> int:
        return self._port.stream_of(stream)

    # -- the core's outputs ------------------------------------------------------------------

    def _pump(self) -> None:
        """Drain the core's outputs; call it after every input."""
        core = self._core
        if core.outgoing:
            outgoing, core.outgoing = core.outgoing, []
            connections = self._connections.open
            for peer_id, data in outgoing:
                connection = connections.get(peer_id)
                if connection is not None:
                    connection.link.post(data)
        while core.draining:
            draining, core.draining = core.draining, []
            for record in draining:
                self._draining.begin(record)

    def _freed(self, record: Record) -> None:
        """Every fence is done: the bytes are nobody's now."""
        if self._debug:
            self._region.poison(record.start, record.nbytes)
        used = self._core.bytes.capacity - self._core.bytes.free_bytes
        counters = self._counters
        counters.high_water = max(counters.high_water, used)
        self._core.drained(record)
        ack = record.acknowledgement
        if isinstance(ack, Acknowledgement):
            counters.acknowledged += 1
            counters.refused += len(record.refused)
            counters.lost += len(record.lost)
            ack._settle(record.outcome)
        self._room.wake()
        if self._idle and not any(r.published for r in self._core.records.values()):
            idle, self._idle = self._idle, []
            for future in idle:
                if not future.done():
                    future.set_result(None)

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Mark a forked child's copy as unusable; not for users: leave the ``async with``."""
        self._forked = True

    def _fail_acknowledgements(self, error: AsyncVMMError) -> None:
        for record in self._core.records.values():
            if isinstance(record.acknowledgement, Acknowledgement):
                record.acknowledgement._settle(None, error)
