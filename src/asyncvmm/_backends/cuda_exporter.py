"""The exporter's side of a pool in GPU memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from asyncvmm._backends import driver, driver_memory
from asyncvmm._backends.base import Fence, surely_done
from asyncvmm._backends.contexts import PrimaryContext, Teardown, Undo
from asyncvmm._backends.device_range import DeviceRange, Keepalive
from asyncvmm._backends.driver_memory import Allocation, HandleType
from asyncvmm._backends.events import Event, check_event, check_same
from asyncvmm._backends.handle_types import AskedType, choose
from asyncvmm._backends.segments import check_pool, find, first_gap, pieces, round_up
from asyncvmm._errors import (
    ArgumentError,
    BackendError,
    ClosedError,
    RemoteProtocolError,
)
from asyncvmm._fds import OwnedFd
from asyncvmm._types import RegionInfo, SegmentInfo

POISON = 0xDB
"""The byte that fills a freed chunk in debug mode, the same as in host memory."""


class CudaExporterRegion:
    """The exporter's side of a pool in GPU memory (an ``ExporterRegion``).

    ``grow``, ``shrink`` and ``close`` may be called from any thread and take turns; the rest never
    waits for them.
    """

    fenced = True

    def __init__(self, mapping: DeviceRange, info: RegionInfo, properties: Any) -> None:
        self._range = mapping
        self._keepalive: Keepalive | None = mapping.keepalive()
        self._info = info
        self._properties = properties
        self._handle_type: HandleType = "fabric" if info.handle_type == "fabric" else "posix"
        self._next_index = 0
        self._ready: dict[int, Event] = {}
        self._ready_handles: dict[int, bytes] = {}
        self._releases: dict[int, dict[int, tuple[bytes, Event]]] = {}
        self._changing = threading.Lock()

    @classmethod
    def create(
        cls,
        device: int,
        pool_bytes: int,
        max_pool_bytes: int,
        slots: int,
        *,
        writable: bool = False,
        handle_type: AskedType = "auto",
    ) -> Self:
        """Make a pool of ``pool_bytes`` on GPU ``device`` that may grow to ``max_pool_bytes``.

        Slow.  Sizes are rounded up to the GPU's granularity.  If it fails nothing is kept.
        """
        check_pool(pool_bytes, max_pool_bytes, slots)
        if not driver.device_attribute(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise BackendError(
                f"GPU {device} has no virtual memory management; use device='cpu'",
                call="cuDeviceGetAttribute",
                code="not_supported",
            )
        with Undo() as undo:
            context = PrimaryContext(device)
            undo.add(context.release)
            kind = context.call(choose, device, handle_type)
            properties = driver_memory.allocation_properties(device, kind)
            granule = driver_memory.granularity(properties)
            size, uuid = round_up(max_pool_bytes, granule), driver.device_uuid(device)
            info = RegionInfo("cuda", size, granule, slots, writable, kind, uuid)
            mapping = DeviceRange.reserve(context, size)
            undo.keep()
        region = cls(mapping, info, properties)
        with Undo() as undo:
            undo.add(region.close)
            region.grow(pool_bytes)
            undo.keep()
        return region

    @property
    def info(self) -> RegionInfo:
        """What a consumer must know before it maps anything."""
        return self._info

    @property
    def address(self) -> int:
        """First byte of the reserved address range."""
        self._check()
        return self._range.address

    def segments(self) -> Sequence[SegmentInfo]:
        """The segments that are mapped now, by index."""
        return () if self._keepalive is None else tuple(self._range.mapped.values())

    def export(self, index: int) -> OwnedFd | bytes:
        """Return a new handle to segment ``index``, one per segment and consumer (inv. 12).

        The creation handle is long gone, so another reference is taken from the mapping for as
        long as the export lasts.  Keeping one exported descriptor per segment and duplicating it
        would hold the physical memory as well, beyond a shrink, and a descriptor for nothing.
        """
        self._check()
        segment = find(self.segments(), index)
        context = self._range.context
        with Undo() as undo:
            with context.working():
                memory = Allocation.retain(self._range.address + segment.start)
                undo.add(context.call, memory.release)
                exported = memory.export(self._handle_type)
                handle = OwnedFd(exported) if isinstance(exported, int) else exported
                if isinstance(handle, OwnedFd):
                    undo.add(handle.close)
                    os.set_inheritable(handle.fileno(), False)
                memory.release()
            undo.keep()
        return handle

    def grow(self, nbytes: int) -> SegmentInfo:
        """Map one more segment of ``nbytes``, rounded up, in the first gap that holds it.

        An index is never used twice, so a late word about a segment that was given back cannot
        mean its successor.
        """
        with self._changing:
            self._check()
            size = round_up(nbytes, self._info.granule)
            start = first_gap(self.segments(), size, self._info.max_nbytes)
            segment = SegmentInfo(self._next_index, start, size)
            self._range.map(segment, self._allocate(size), writable=True)
            self._next_index += 1
            return segment

    def _allocate(self, size: int) -> Allocation:
        context = self._range.context
        with Undo() as undo:
            with context.working():
                try:
                    memory = Allocation.create(size, self._properties)
                except BackendError as error:
                    where = f"the memory of GPU {context.device} ({self._info.device})"
                    raise driver_memory.lacking(size, where, error) from error
                undo.add(context.call, memory.release)
            undo.keep()
        return memory

    def shrink(self, index: int) -> None:
        """Unmap segment ``index``, which nothing may be using; on an error nothing has changed.

        The memory is free once the consumers that mapped it have unmapped it too.
        """
        with self._changing:
            self._check()
            find(self.segments(), index)
            self._range.unmap(index)

    def record_ready(self, slot: int, stream: int) -> bytes:
        """Record the slot's ready event on ``stream``: one driver call after the first time.

        Returns its handle.
        """
        self._check()
        (self._ready.get(slot) or self._make_ready(slot)).record(stream)
        return self._ready_handles.get(slot) or self.ready_handle(slot)

    def _make_ready(self, slot: int) -> Event:
        if not 0 <= slot < self._info.slots:
            raise ArgumentError(f"there is no slot {slot}, only {self._info.slots}")
        event = Event.create(self._range.context)
        self._range.events.add(event)
        self._ready[slot] = event
        return event

    def ready_handle(self, slot: int) -> bytes:
        """Return the 64 bytes with which a consumer opens the slot's ready event."""
        self._check()
        handle = self._ready_handles.get(slot)
        if handle is None:
            event = self._ready.get(slot) or self._make_ready(slot)
            handle = self._ready_handles[slot] = event.handle()
        return handle

    def ready_fence(self, slot: int) -> Fence | None:
        """Return the fence of the slot's last ready event; None if there was none yet."""
        return self._ready.get(slot)

    def open_release(self, peer: int, slot: int, handle: bytes) -> None:
        """Open the event that consumer ``peer`` made for ``slot``; once, and never another."""
        self._check()
        check_event(slot, self._info.slots, handle)
        events = self._releases.setdefault(peer, {})
        if slot in events:
            check_same(slot, events[slot][0], handle)
            return
        event = Event.open(self._range.context, handle)
        self._range.events.add(event)
        events[slot] = (handle, event)

    def release_fence(self, peer: int, slot: int) -> Fence | None:
        """Return the fence of that consumer's last release of ``slot``."""
        try:
            return self._releases[peer][slot][1]
        except KeyError:
            raise RemoteProtocolError(
                f"slot {slot} was released without an event ever given"
            ) from None

    def forget_peer(self, peer: int) -> None:
        """Give back the events of a consumer whose process is gone.

        What cannot be given back now is tried again by :meth:`close`.
        """
        self._range.context.check("exporter")
        teardown = Teardown()
        for _, event in self._releases.pop(peer, {}).values():
            if teardown.step(event.destroy):
                self._range.events.discard(event)
        teardown.finish()

    def ask(self, fences: Sequence[Fence]) -> list[bool]:
        """Say of each fence whether it is done; captures in other threads go on."""
        before = driver.capture_relaxed()
        try:
            return [surely_done(fence) for fence in fences]
        finally:
            driver.capture_again(before)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Make the context current on this thread, and let others capture graphs meanwhile."""
        self._check()
        with self._range.context.working():
            yield

    def poison(self, start: int, nbytes: int) -> None:
        """Overwrite a freed range, which may cross segments, with ``POISON``; waits for it.

        It must be over before the chunk is used again, on whichever stream that is, so it has a
        stream of its own and the host waits: for debugging only.
        """
        self._check()
        parts = list(pieces(self.segments(), start, nbytes))
        with self._range.context.working(), Undo() as undo:
            stream = driver.stream_create()
            undo.add(driver.stream_destroy, stream)
            for first, size in parts:
                driver_memory.memory_fill(self._range.address + first, POISON, size, stream)
            driver.stream_synchronize(stream)
            driver.stream_destroy(stream)
            undo.keep()

    def keepalive(self) -> object:
        """Return an object that keeps the mapping alive; every view holds it."""
        self._check()
        return self._keepalive

    def close(self) -> None:
        """Wait for what was recorded, then let go; it ends when the last keepalive is gone.

        If something could not be given back, the error says what, and another call tries again.
        """
        if self._range.context.forked:
            return
        with self._changing:
            teardown = Teardown()
            if self._keepalive is not None:
                teardown.step(self._range.settle)
                self._keepalive = None
            teardown.step(self._range.closed)
            teardown.finish()

    def _check(self) -> None:
        if self._keepalive is None or self._range.context.forked:
            self._range.context.check("exporter")
            raise ClosedError("the pool is closed on this side")
