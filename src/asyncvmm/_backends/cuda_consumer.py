"""A consumer's side of a pool in GPU memory, its own GPU's or another's."""

from __future__ import annotations

from collections.abc import Sequence

from asyncvmm._backends import driver
from asyncvmm._backends.contexts import PrimaryContext, Undo
from asyncvmm._backends.device_range import DeviceRange, Keepalive
from asyncvmm._backends.driver_memory import FABRIC_HANDLE_BYTES, Allocation, HandleType
from asyncvmm._backends.events import Event, check_event, check_same
from asyncvmm._backends.segments import check_segment
from asyncvmm._errors import ArgumentError, BackendError, ClosedError, RemoteProtocolError
from asyncvmm._fds import OwnedFd
from asyncvmm._types import MAX_SLOTS, RegionInfo, SegmentInfo


class CudaConsumerRegion:
    """A consumer's side of a pool in GPU memory (a ``ConsumerRegion``).

    ``device`` is the consumer's own GPU: the pool is mapped for it alone, read-only unless the
    pool is writable, and no context is ever opened on the exporter's (field report 39).  Nothing
    the exporter says is trusted before it is checked.
    """

    def __init__(self, info: RegionInfo, device: int) -> None:
        _check_info(info)
        check_reach(info.device, device)
        self._info = info
        self._handle_type: HandleType = "fabric" if info.handle_type == "fabric" else "posix"
        with Undo() as undo:
            context = PrimaryContext(device)
            undo.add(context.release)
            self._range = DeviceRange.reserve(context, info.max_nbytes)
            undo.keep()
        self._keepalive: Keepalive | None = self._range.keepalive()
        self._ready: dict[int, tuple[bytes, Event]] = {}
        self._releases: dict[int, Event] = {}
        self._not_given: dict[int, bytes] = {}
        self._joins: list[Event] = []

    @property
    def address(self) -> int:
        """First byte of this process's address range for the pool."""
        self._check()
        return self._range.address

    def map(self, segment: SegmentInfo, handle: OwnedFd | bytes) -> None:
        """Map one segment.  A descriptor is closed in any case: the mapping needs it no more."""
        if isinstance(handle, OwnedFd):
            with handle:
                self._map(segment, handle)
        else:
            self._map(segment, handle)

    def _map(self, segment: SegmentInfo, handle: OwnedFd | bytes) -> None:
        self._check()
        check_segment(segment, self._info, self._range.mapped.values())
        shared = self._checked_handle(segment, handle)
        context = self._range.context
        with Undo() as undo:
            with context.working():
                memory = Allocation.take_in(shared, self._handle_type)
                undo.add(context.call, memory.release)
            self._range.map(segment, memory, writable=self._info.writable)
            undo.keep()

    def _checked_handle(self, segment: SegmentInfo, handle: OwnedFd | bytes) -> int | bytes:
        if self._handle_type == "posix":
            if isinstance(handle, OwnedFd):
                return handle.fileno()
        elif isinstance(handle, bytes) and len(handle) == FABRIC_HANDLE_BYTES:
            return handle
        raise RemoteProtocolError(
            f"segment {segment.index} of a pool shared by {self._handle_type} handles came "
            f"without one"
        )

    def unmap(self, index: int) -> None:
        """Unmap segment ``index``; a view of it that is still alive would fault."""
        self._check()
        if index not in self._range.mapped:
            raise RemoteProtocolError(f"segment {index} is to be unmapped but is not mapped")
        self._range.unmap(index)

    def open_ready(self, slot: int, handle: bytes) -> None:
        """Open the event that the exporter made for ``slot``; once, and never another."""
        self._check()
        check_event(slot, self._info.slots, handle)
        if slot in self._ready:
            check_same(slot, self._ready[slot][0], handle)
            return
        event = Event.open(self._range.context, handle)
        self._range.events.add(event)
        self._ready[slot] = (handle, event)

    def wait_ready(self, slot: int, stream: int) -> None:
        """Make ``stream`` wait for the slot's ready event: one driver call (inv. 8)."""
        self._check()
        found = self._ready.get(slot)
        if found is None:
            raise RemoteProtocolError(f"slot {slot} was sent without an event ever given")
        found[1].wait(stream)

    def note_read(self, slot: int) -> None:
        """Note that the slot's bytes are read from now on, until its release is recorded."""
        self._range.unordered.add(slot)

    def record_release(
        self, slot: int, streams: Sequence[int], others: Sequence[int] = ()
    ) -> bytes:
        """Record the slot's release event behind all ``streams``: one driver call for one stream.

        With several, the first waits for the others.  With none, nothing was read.  It stands
        for the reads of the slots ``others``, too, which were on the same streams.
        """
        self._check()
        event = self._releases.get(slot) or self._make_release(slot)
        if streams:
            first = streams[0]
            if len(streams) > 1:
                for other in set(streams[1:]) - {first}:
                    self._join(first, other)
            event.record(first)
        unordered = self._range.unordered
        unordered.discard(slot)
        if others:
            unordered.difference_update(others)
        return self._not_given.pop(slot, b"")

    def _make_release(self, slot: int) -> Event:
        if not 0 <= slot < self._info.slots:
            raise ArgumentError(f"there is no slot {slot}, only {self._info.slots}")
        with Undo() as undo:
            event = Event.create(self._range.context)
            undo.add(event.destroy)
            handle = event.handle()
            undo.keep()
        self._range.events.add(event)
        self._releases[slot], self._not_given[slot] = event, handle
        return event

    def _join(self, first: int, other: int) -> None:
        """Have stream ``first`` wait for what is queued on ``other`` so far.

        The event serves again at once, since a wait means the record before it; but never two
        callers together, and the garbage collector can run another release in the middle of one.
        """
        event = self._joins.pop() if self._joins else self._make_join()
        try:
            event.record(other)
            event.wait(first)
        finally:
            self._joins.append(event)

    def _make_join(self) -> Event:
        event = Event.create_local(self._range.context)
        self._range.events.add(event)
        return event

    def keepalive(self) -> object:
        """Return an object that keeps the mapping alive; every view holds it."""
        self._check()
        return self._keepalive

    def close(self) -> None:
        """Let go of the mapping; it ends when the last keepalive is gone (inv. 15).

        Never waits for the device: where that still reads, the end comes in a thread.  If
        something could not be given back, the error says what, and another call tries again.
        """
        if self._range.context.forked:
            return
        self._keepalive = None
        self._range.closed()

    def _check(self) -> None:
        if self._keepalive is None or self._range.context.forked:
            self._range.context.check("consumer")
            raise ClosedError("the pool is closed on this side")


def check_reach(uuid: str, device: int) -> None:
    """Raise if GPU ``device`` of this process cannot read the memory of the GPU with ``uuid``.

    GPUs are matched by UUID: their numbers differ between processes (field report 40).
    """
    visible = {driver.device_uuid(number): number for number in range(driver.device_count())}
    exporter = visible.get(uuid)
    if exporter is None:
        raise BackendError(
            f"the pool lives on {uuid}, which is not visible to this process (visible: "
            f"{', '.join(visible) or 'none'}); add it to CUDA_VISIBLE_DEVICES",
            call="cuDeviceGetUuid",
            code="not_visible",
        )
    if exporter != device and not driver.can_access_peer(device, exporter):
        raise BackendError(
            f"GPU {device} has no peer access to {uuid} (GPU {exporter} here), where the pool "
            f"lives; use a GPU of one NVLink or PCIe domain, or the exporter's own",
            call="cuDeviceCanAccessPeer",
            code="no_peer_access",
        )


def _check_info(info: RegionInfo) -> None:
    if info.kind != "cuda" or info.handle_type not in ("posix", "fabric"):
        raise RemoteProtocolError(f"{info.kind} memory by {info.handle_type} is no pool on a GPU")
    if info.granule <= 0 or info.max_nbytes <= 0 or info.max_nbytes % info.granule:
        raise RemoteProtocolError(
            f"a pool of {info.max_nbytes:,} bytes in granules of {info.granule:,} cannot be"
        )
    if not 0 < info.slots <= MAX_SLOTS:
        raise RemoteProtocolError(f"a pool has 1 to {MAX_SLOTS} slots, not {info.slots}")
