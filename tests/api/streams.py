"""A fake GPU whose streams do one thing after the other, when a test lets them.

What is queued on a stream is a wait for an event, the record of one, or work on the bytes of a
chunk: a copy into it, or a read of it.  So it can be told whether a read began before its copy was
over, and whether a chunk was free while something still touched it (inv. 4, 8).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncvmm import Owner
from asyncvmm._backends.base import ExporterRegion
from asyncvmm._core.ledger import Record
from asyncvmm._tensors.plan import Plan
from asyncvmm.testing import FakeDevice, FakePort, HandDrivenFence
from asyncvmm.testing.fakes import HandDrivenExporterRegion, Kind


@dataclass(eq=False)
class Work:
    """Something that touches a chunk's bytes; a read is of what ``copy`` put there."""

    what: str
    copy: Work | None = None
    finished: bool = False


class _Waits(list[tuple[int, int]]):
    """Queues each wait that is noted."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def append(self, wait: tuple[int, int]) -> None:
        slot, stream = wait
        self._streams.queue(stream, self._streams.region._ready[slot], waits=True)


class Streams(FakeDevice):
    """The device; ``faults`` is what it has seen go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.region: HandDrivenExporterRegion
        self.waits = _Waits(self)
        self.faults: list[str] = []
        self._queues: dict[int, deque[tuple[bool, HandDrivenFence | Work]]] = defaultdict(deque)
        self._dead: set[int] = set()
        self._copies: dict[int, Work] = {}  # start of a chunk -> the last copy into it
        self._reads: dict[tuple[int, int], list[Work]] = defaultdict(list)
        self._lock = threading.RLock()  # copies and releases come from several threads

    def queue(self, stream: int, item: HandDrivenFence | Work, *, waits: bool = False) -> None:
        """Put something behind what is queued on a stream; on a dead one nothing is waited for."""
        with self._lock:
            if stream not in self._dead:
                self._queues[stream].append((waits, item))
            elif not waits:
                item.finished = True

    def record(self, kind: Kind, slot: int, streams: Sequence[int]) -> HandDrivenFence:
        """Queue an event on the first of the streams, which waits for the others."""
        fence = HandDrivenFence(kind, slot, streams)
        with self._lock:
            for other in set(streams[1:]) - {streams[0]}:
                join = HandDrivenFence(kind, slot, (other,))
                self.queue(other, join)
                self.queue(streams[0], join, waits=True)
            self.queue(streams[0], fence)
        return fence

    def copied(self, start: int, stream: int) -> None:
        """Queue a copy into the chunk that begins there."""
        work = self._copies[start] = Work(f"the copy to {start}")
        self.queue(stream, work)

    def read(self, owner: Owner, stream: int) -> None:
        """Queue a read of an owner."""
        work = Work(f"a read of {owner.key!r}", self._copies[owner._lease.frame.start])
        self._reads[owner.slot, owner.generation].append(work)
        self.queue(stream, work)

    def busy(self) -> list[int]:
        """Return the streams on which something is queued."""
        return [stream for stream, queue in self._queues.items() if queue]

    def advance(self, stream: int, count: int) -> None:
        """Let a stream do that many things, or as many as it can."""
        with self._lock:
            queue = self._queues[stream]
            while queue and count:
                waits, item = queue[0]
                if waits and not item.finished:
                    return
                if isinstance(item, Work) and item.copy is not None and not item.copy.finished:
                    self.faults.append(f"{item.what} began before its copy was over")
                item.finished = True
                queue.popleft()
                count -= 1

    def run_dry(self) -> None:
        """Let all streams do everything."""
        while busy := self.busy():
            for stream in busy:
                self.advance(stream, 1 << 30)

    def kill(self, streams: Iterable[int]) -> None:
        """End the process that has these streams: its events are done, and its reads are over."""
        with self._lock:
            for stream in streams:
                self._dead.add(stream)
                for waits, item in self._queues.pop(stream, ()):
                    item.finished |= not waits

    def freed(self, record: Record) -> None:
        """Look whether anything still touches the bytes of what is free now."""
        works = [*self._reads.pop((record.slot, record.generation), ())]
        if record.start in self._copies:
            works.append(self._copies[record.start])
        self.faults += [f"{record!r} is free during {w.what}" for w in works if not w.finished]


class StreamPort(FakePort):
    """One end's way to the device; ``stream`` is its current one."""

    def __init__(self, gpu: Streams, stream: int) -> None:
        super().__init__(gpu)
        self.streams = gpu
        self.stream = stream

    def create(self, *args: Any, **options: Any) -> ExporterRegion:
        """Make the pool, whose events the device looks up."""
        region = super().create(*args, **options)
        assert isinstance(region, HandDrivenExporterRegion)
        self.streams.region = region
        return region

    def current_stream(self) -> int:
        """Return this end's current stream."""
        return self.stream

    def stream_of(self, stream: object) -> int:
        """Return a stream given as a number, or the current one for None."""
        return self.stream if stream is None else super().stream_of(stream)

    def copy_in(self, address: int, plan: Plan, stream: int) -> None:
        """Copy, and queue that."""
        super().copy_in(address, plan, stream)
        self.streams.copied(address - self.streams.region.address, stream)
