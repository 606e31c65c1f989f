"""Sending several owners that become ready together: one batch, one event, one launch.

A batch is ready as a whole, so one ready event stands for all of it: that of its first owner's
slot.  Its owners are otherwise each their own: released, acknowledged and freed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from asyncvmm._core.describing import check_owners
from asyncvmm._core.ledger import Record
from asyncvmm._core.routing import To
from asyncvmm._errors import ArgumentError
from asyncvmm._exporter.acknowledgement import Acknowledgement, Require
from asyncvmm._exporter.lending import Lending
from asyncvmm._exporter.terms import Terms
from asyncvmm._types import Key

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Plan, Tensor

PIECE = 64
"""Features whose copies are queued before the loop turns: a third of a millisecond at 5 us each,
most of it for what is checked of their sources."""

T = TypeVar("T")

Parcels: TypeAlias = "Sequence[tuple[Plan, Terms]]"


class Several(Lending):
    """The part of an exporter that sends batches of owners; see :class:`asyncvmm.Exporter`."""

    async def send_all(
        self,
        owners: Sequence[Mapping[str, Tensor]],
        *,
        keys: Sequence[Key | None] = (),
        metadata: Sequence[object] = (),
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> list[Acknowledgement]:
        """Send several owners that become ready together, or none of them, as one batch.

        Each owner has its own chunk, acknowledgement and release, as if it came from
        :meth:`send`; consumers receive them as one ``Batch`` (under Compete one of them does).
        What is saved is the cost of each: the copies are queued in one launch where they can be
        (several features of one dtype on the pool's GPU), and one event is recorded for all.

        It waits until all fit at once (first come, first served), and holds nothing while it
        waits.  ``keys`` and ``metadata`` name the owners and go with them, one for each, if
        given.  Raises what :meth:`send` does, and ArgumentError if the pool can never hold them
        all or if one message cannot describe them.  Cancelled, it publishes nothing, and the
        chunks return once no copy touches them any more.
        """
        number = self._current_stream() if stream is None else self._stream(stream)
        parcels = self._parcels(owners, keys, metadata, to, require)
        loans = await self._acquire_all([plan.nbytes for plan, _ in parcels])
        return await self._send_loans(loans, parcels, number)

    async def send_all_nowait(
        self,
        owners: Sequence[Mapping[str, Tensor]],
        *,
        keys: Sequence[Key | None] = (),
        metadata: Sequence[object] = (),
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> list[Acknowledgement]:
        """Do as ``send_all``, but raise WouldBlock instead of waiting until all fit.

        It is still awaited, because large copies leave the event loop.
        """
        number = self._current_stream() if stream is None else self._stream(stream)
        parcels = self._parcels(owners, keys, metadata, to, require)
        sizes = self._possible([plan.nbytes for plan, _ in parcels])
        loans = None if self._queue else self._core.reserve_all(sizes)
        if loans is None:
            raise self._would_block(f"{len(sizes)} owners of {sum(sizes):,} bytes")
        return await self._send_loans(loans, parcels, number)

    def _parcels(
        self,
        owners: Sequence[Mapping[str, Tensor]],
        keys: Sequence[Key | None],
        metadata: Sequence[object],
        to: To,
        require: Require,
    ) -> Parcels:
        """Check and lay out everything before anything is taken."""
        count = count_of(owners)
        names = one_each("keys", keys, count)
        notes = one_each("metadata", metadata, count)
        parcels = []
        described = 0
        for features, key, note in zip(owners, names, notes, strict=True):
            plan = self._plan_tensors(features)
            terms = self._terms(plan, key, note, to, require)
            to = terms.to  # which can be read once more, whatever was given
            parcels.append((plan, terms))
            described += plan.layout.described + terms.described
        check_owners(described)
        return parcels

    def _possible(self, sizes: list[int]) -> list[int]:
        """Refuse sizes that the pool can never hold together."""
        self._guard()
        total, most, slots = sum(sizes), self._elastic.max_pool_bytes, len(self._core.slots.states)
        if total > most or len(sizes) > slots:
            raise ArgumentError(
                f"{len(sizes)} owners of {total:,} bytes can never be out together: the pool has "
                f"{slots} slots and at most {most:,} bytes; hand over fewer at a time"
            )
        return sizes

    async def _acquire_all(self, sizes: list[int]) -> list[Record]:
        self._possible(sizes)
        if not sizes:
            return []  # a request of nothing but text waits for nobody
        if self._turn.over:
            await self._breathe()
        loans = None if self._queue else self._core.reserve_all(sizes)
        if loans is None:
            with self._connections.busy:
                await self._room.turn(*sizes)
            loans = self._core.reserve_all(sizes)
            assert loans is not None, "room.turn() promised it and nothing ran in between"
        return loans

    async def _send_loans(
        self, loans: Sequence[Record], parcels: Parcels, stream: int
    ) -> list[Acknowledgement]:
        if not loans:
            return []
        first = self._address
        plans = [plan for plan, _ in parcels]
        places = [(first + record.start, plan) for record, plan in zip(loans, plans, strict=True)]
        try:
            if self._fenced:
                self._fencing.prepare_all(loans)
            if self._port.copy_all_slowly(plans):
                now = monotonic()
                for record in loans:
                    record.stamp = now
                await self._copier.copy([record.slot for record in loans], places, stream)
            else:
                for number, piece in enumerate(_pieces(places)):
                    if number:
                        await self._breathe()
                    self._port.copy_all(piece, stream)
            acks = self._publish_all(loans, parcels, stream)
        except BaseException:
            for record in loans:
                self._abandon(record, stream)
            raise
        self._counters.copies += len(loans)
        self._counters.copied_bytes += sum(plan.nbytes for plan in plans)
        return acks

    def _publish_all(
        self, loans: Sequence[Record], parcels: Parcels, stream: int
    ) -> list[Acknowledgement]:
        if self._forked or self._shut:
            self._guard()
        ready = self._fencing.record(loans[0].slot, stream) if self._fenced else b""
        acks, described = [], []
        for record, (plan, terms) in zip(loans, parcels, strict=True):
            key = next(self._keys) if terms.key is None else terms.key
            described.append((record, key, plan.layout.features, terms.metadata, ready))
            acks.append(Acknowledgement(key, terms.require, self._connections.busy))
            ready = b""  # one event for all
        self._core.publish_batch(described, to=parcels[0][1].to)
        now = monotonic()
        for record, ack in zip(loans, acks, strict=True):
            record.acknowledgement, record.stamp = ack, now
        self._turn.count(sum([len(plan.layout.features) for plan, _ in parcels]))
        self._counters.published += len(acks)
        self._pump(whole=self._turn.over)
        return acks


def _pieces(places: list[tuple[int, Plan]]) -> Iterator[list[tuple[int, Plan]]]:
    """Yield so many owners at a time that the loop is not kept for long; at least one."""
    first = features = 0
    for number, (_, plan) in enumerate(places):
        features += len(plan.tensors)
        if features > PIECE and number > first:
            yield places[first:number]
            first, features = number, len(plan.tensors)
    yield places[first:]


def count_of(owners: Sequence[Mapping[str, Tensor]]) -> int:
    """Return how many owners were given; refuse what is no sequence of them."""
    if not isinstance(owners, Sequence):
        raise ArgumentError(f"owners are a sequence of mappings, got {owners!r:.80}")
    return len(owners)


def one_each(what: str, given: Sequence[T], count: int) -> Sequence[T | None]:
    """Return one for each of ``count`` owners: what was given, or None if nothing was."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ArgumentError(f"{what} are a sequence with one for each owner, got {given!r:.80}")
    if not given:
        return (None,) * count
    if len(given) != count:
        raise ArgumentError(f"{len(given)} {what} were given for {count} owners")
    return given
