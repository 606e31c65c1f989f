"""Putting an exporter's numbers together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from asyncvmm._core.ledger import Peer, Record
from asyncvmm._core.slots import SlotState
from asyncvmm._exporter.latencies import Histogram
from asyncvmm._exporter.statistics import (
    ConsumerStatistics,
    OwnerStatistics,
    PoolStatistics,
    SlotCounts,
)

if TYPE_CHECKING:
    from asyncvmm._exporter.lending import Lending as Exporter


@dataclass(slots=True)
class Counters:
    """What only ever rises."""

    opened: float = field(default_factory=monotonic)
    published: int = 0
    acknowledged: int = 0
    refused: int = 0
    lost: int = 0
    copies: int = 0
    copied_bytes: int = 0
    fallbacks: int = 0
    handoff: Histogram = field(default_factory=Histogram)
    release: Histogram = field(default_factory=Histogram)

    def let_go(self, records: Iterable[Record]) -> None:
        """Note that nobody holds these owners any more."""
        stamps = [record.stamp for record in records if record.batch is not None]
        self.release.add_since(stamps, monotonic())

    def freed(self, records: Iterable[Record]) -> None:
        """Note that the memory of these is back; loans that were given up count for nothing."""
        stamps = []
        for record in records:
            if record.acknowledgement is not None:
                stamps.append(record.stamp)
                if record.refused or record.lost:
                    self.refused += len(record.refused)
                    self.lost += len(record.lost)
        self.acknowledged += len(stamps)
        self.handoff.add_since(stamps, monotonic())


def report(exporter: Exporter, owners: int | None = None) -> PoolStatistics:
    """Return the exporter's numbers, all of one moment; of the oldest ``owners`` if so many."""
    core = exporter._core
    counters = exporter._counters
    room = exporter._room
    elastic = exporter._elastic
    segments = exporter._region.segments()
    capacity, free = core.bytes.capacity, core.bytes.free_bytes
    counts = core.slots.counts
    # Where nothing is fenced the memory is back in the moment in which the last one lets go.
    released = counters.release if exporter._fenced else counters.handoff
    now = monotonic()
    records = sorted(core.records.values(), key=lambda r: r.stamp or now)
    return PoolStatistics(
        device=exporter._port.device,
        pool_bytes=capacity,
        physical_bytes=sum(segment.nbytes for segment in segments),
        max_pool_bytes=elastic.max_pool_bytes,
        used_bytes=capacity - free,
        free_bytes=free,
        largest_gap=core.bytes.largest_gap,
        gaps=core.bytes.gaps,
        high_water=core.bytes.high_water,
        segments=len(segments),
        grown=elastic.grown,
        shrunk=elastic.shrunk,
        slots=SlotCounts(sum(counts), *counts),
        waiting=len(room),
        oldest_wait=room.oldest_wait,
        waits=room.waits,
        longest_wait=room.longest_wait,
        total_wait=room.latencies.total,
        published=counters.published,
        acknowledged=counters.acknowledged,
        refused=counters.refused,
        lost=counters.lost,
        copied_bytes=counters.copied_bytes,
        copies=counters.copies,
        fallbacks=counters.fallbacks,
        exported=core.tally.exported,
        cancelled=core.tally.cancelled,
        handoff=counters.handoff.latencies(),
        release=released.latencies(),
        wait=room.latencies.latencies(),
        owners=tuple(_owner(exporter, record, now) for record in records[:owners]),
        consumers=tuple(_consumer(exporter, peer, now) for peer in core.peers.values()),
    )


def _owner(exporter: Exporter, record: Record, now: float) -> OwnerStatistics:
    core = exporter._core
    return OwnerStatistics(
        key=record.key,
        slot=record.slot,
        generation=record.generation,
        nbytes=record.nbytes,
        state=SlotState(core.slots.states[record.slot]).name.lower(),
        age=now - record.stamp if record.stamp else 0.0,
        held_by=tuple(core.peers[holder].member for holder in sorted(record.holders)),
        waiting_for=tuple(sorted(record.waiting, key=str)),
        exported=record.exported,
    )


def _consumer(exporter: Exporter, peer: Peer, now: float) -> ConsumerStatistics:
    connection = exporter._connections.open.get(peer.id)
    return ConsumerStatistics(
        member=peer.member,
        pid=connection.identity.pid if connection else 0,
        state=peer.state.value,
        quarantined=peer.absent,
        holding=len(peer.holds),
        untaken=len(peer.untaken),
        oldest=max((now - r.stamp for r in peer.holds.values() if r.stamp), default=0.0),
        released=peer.releases,
        stale=peer.stale,
        queued=connection.link.queued if connection else 0,
    )
