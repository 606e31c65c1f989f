"""Host memory: pools made of sealed memfds.

Both sides reserve one address range of the pool's largest size and place segments in it.  Each
segment is a memfd of its own (``sealed.py`` says why), so it is exported as one descriptor per
consumer, as on a GPU.  It is mapped once per consumer, never per batch (field report 60).

Whatever touches host memory is done when the call returns, so there are no events: every handle
is empty and every fence is None.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

from asyncvmm._backends.base import Fence, surely_done
from asyncvmm._backends.limits import check_room
from asyncvmm._backends.mapping import PAGE, READ, WRITE, Mapping, checked, pages
from asyncvmm._backends.sealed import check_file, commit
from asyncvmm._backends.segments import check_pool, check_segment, find, first_gap, pieces
from asyncvmm._errors import (
    ClosedError,
    RemoteProtocolError,
)
from asyncvmm._fds import OwnedFd
from asyncvmm._types import RegionInfo, SegmentInfo

POISON = 0xDB
"""Byte that fills a freed chunk in debug mode: as a float it is a huge negative number and as an
integer never small, so that it shows."""


class HostExporterRegion:
    """The exporter's side of a pool in host memory (an ``ExporterRegion``).

    ``grow``, ``shrink`` and ``close`` may be called from any thread and take turns; the rest never
    waits for them.
    """

    fenced = False

    def __init__(self, mapping: Mapping, info: RegionInfo) -> None:
        self._mapping: Mapping | None = mapping
        self._info = info
        self._segments: tuple[SegmentInfo, ...] = ()
        self._fds: dict[int, OwnedFd] = {}
        self._next_index = 0
        self._changing = threading.Lock()

    @classmethod
    def create(
        cls, pool_bytes: int, max_pool_bytes: int, slots: int, *, writable: bool = False
    ) -> Self:
        """Make a pool of ``pool_bytes`` that may grow to ``max_pool_bytes``.  Slow.

        Sizes are rounded up to whole pages.  Every page is there when this returns (field report
        55); if it cannot be, :class:`asyncvmm.PoolMemoryError` says what was asked, what is
        available and where, and nothing is kept.
        """
        check_pool(pool_bytes, max_pool_bytes, slots)
        size = pages(pool_bytes)
        check_room(size)
        info = RegionInfo("host", pages(max_pool_bytes), PAGE, slots, writable, "memfd")
        region = cls(Mapping(info.max_nbytes), info)
        region._add(SegmentInfo(0, 0, size))
        return region

    @property
    def info(self) -> RegionInfo:
        """What a consumer must know before it maps anything."""
        return self._info

    @property
    def address(self) -> int:
        """First byte of the reserved address range."""
        return self._open().address

    def segments(self) -> Sequence[SegmentInfo]:
        """The segments that are mapped now, by index."""
        return self._segments

    def export(self, index: int) -> OwnedFd:
        """Return a new descriptor of segment ``index``: one per segment and consumer (inv. 12)."""
        fd = self._fds[self._find(index).index]
        return OwnedFd(checked("dup", os.dup, fd.fileno()))

    def grow(self, nbytes: int) -> SegmentInfo:
        """Add a segment of ``nbytes``, rounded up to whole pages, in the first gap that holds it.

        An index is never used twice, so a late word about a segment that was given back cannot
        mean its successor.  On an error nothing has changed.
        """
        with self._changing:
            self._open()
            size = pages(nbytes)
            segment = SegmentInfo(
                self._next_index, first_gap(self._segments, size, self._info.max_nbytes), size
            )
            check_room(size)
            self._add(segment)
            return segment

    def _add(self, segment: SegmentInfo) -> None:
        fd = commit(self._open(), segment, writable=self._info.writable)
        self._fds[segment.index] = fd
        self._segments = (*self._segments, segment)
        self._next_index = segment.index + 1

    def shrink(self, index: int) -> None:
        """Give segment ``index`` back; on an error nothing has changed.

        The memory is free once the consumers that mapped it have unmapped it too.
        """
        with self._changing:
            segment = self._find(index)
            self._open().vacate(segment.start, segment.nbytes)
            self._segments = tuple(each for each in self._segments if each is not segment)
            self._fds.pop(index).close()

    def record_ready(self, slot: int, stream: int) -> bytes:
        """Do nothing: what was written is there."""
        return b""

    def ready_handle(self, slot: int) -> bytes:
        """Return empty bytes: there is no event to wait for."""
        return b""

    def ready_fence(self, slot: int) -> Fence | None:
        """Return None: surely done."""
        return None

    def open_release(self, peer: int, slot: int, handle: bytes) -> None:
        """Refuse a handle that is not empty."""
        _refuse_event(handle)

    def release_fence(self, peer: int, slot: int) -> Fence | None:
        """Return None: surely done."""
        return None

    def forget_peer(self, peer: int) -> None:
        """Do nothing: no consumer has events here."""

    def ask(self, fences: Sequence[Fence]) -> list[bool]:
        """Ask each; only stand-ins for a GPU give any."""
        return [surely_done(fence) for fence in fences]

    def watching(self) -> AbstractContextManager[None]:
        """Prepare nothing."""
        return contextlib.nullcontext()

    def poison(self, start: int, nbytes: int) -> None:
        """Overwrite a freed range, which may cross segments, with ``POISON``."""
        mapping = self._open()
        for first, size in list(pieces(self._segments, start, nbytes)):
            mapping.fill(first, size, POISON)

    def keepalive(self) -> object:
        """Return an object that keeps the mapping alive; every view holds it."""
        return self._open()

    def close(self) -> None:
        """Let go of the memory; this side's mapping ends when the last keepalive is gone."""
        with self._changing:
            self._mapping = None
            self._segments = ()
            while self._fds:
                self._fds.popitem()[1].close()

    def _open(self) -> Mapping:
        return _unless_closed(self._mapping)

    def _find(self, index: int) -> SegmentInfo:
        self._open()
        return find(self._segments, index)


class HostConsumerRegion:
    """A consumer's side of a pool in host memory (a ``ConsumerRegion``).

    Mapped read-only unless the pool is writable.  Nothing the exporter says is trusted before it
    is checked: what does not fit raises :class:`asyncvmm.RemoteProtocolError`, a descriptor that
    is not what was promised :class:`asyncvmm.BackendError`.
    """

    def __init__(self, info: RegionInfo) -> None:
        _check_info(info)
        self._info = info
        self._segments: dict[int, SegmentInfo] = {}
        self._mapping: Mapping | None = Mapping(info.max_nbytes)

    @property
    def address(self) -> int:
        """First byte of this process's address range for the pool."""
        return _unless_closed(self._mapping).address

    def map(self, segment: SegmentInfo, handle: OwnedFd | bytes) -> None:
        """Map one segment.  The descriptor is closed in any case: the mapping needs it no more."""
        if not isinstance(handle, OwnedFd):
            raise RemoteProtocolError(
                f"segment {segment.index} of a host pool came without a descriptor"
            )
        with handle:
            mapping = _unless_closed(self._mapping)
            check_segment(segment, self._info, self._segments.values())
            check_file(handle.fileno(), segment, writable=self._info.writable)
            protection = READ | WRITE if self._info.writable else READ
            mapping.place(segment.start, segment.nbytes, handle.fileno(), protection)
            self._segments[segment.index] = segment

    def unmap(self, index: int) -> None:
        """Unmap segment ``index``; a view of it that is still alive would fault."""
        mapping = _unless_closed(self._mapping)
        if index not in self._segments:
            raise RemoteProtocolError(f"segment {index} is to be unmapped but is not mapped")
        segment = self._segments[index]
        mapping.vacate(segment.start, segment.nbytes)
        del self._segments[index]

    def open_ready(self, slot: int, handle: bytes) -> None:
        """Refuse a handle that is not empty."""
        _refuse_event(handle)

    def wait_ready(self, slot: int, stream: int) -> None:
        """Do nothing: what was written is there."""

    def note_read(self, slot: int) -> None:
        """Do nothing: reads are over when they return."""

    def record_release(
        self, slot: int, streams: Sequence[int], others: Sequence[int] = ()
    ) -> bytes:
        """Return empty bytes: what was read is over."""
        return b""

    def keepalive(self) -> object:
        """Return an object that keeps the mapping alive; every view holds it."""
        return _unless_closed(self._mapping)

    def close(self) -> None:
        """Let go of the mapping; it ends when the last keepalive is gone (inv. 15)."""
        self._mapping = None


def _check_info(info: RegionInfo) -> None:
    size, granule = info.max_nbytes, info.granule
    if (info.kind, info.handle_type) != ("host", "memfd"):
        raise RemoteProtocolError(f"{info.kind} memory by {info.handle_type} is no host pool")
    if granule <= 0 or granule % PAGE or size <= 0 or size % granule:
        raise RemoteProtocolError(
            f"a host pool of {size:,} bytes in granules of {granule:,} does not fit this "
            f"process's pages of {PAGE:,}"
        )


def _refuse_event(handle: bytes) -> None:
    if handle:
        raise RemoteProtocolError(f"an event of {len(handle)} bytes came for a host pool")


def _unless_closed(mapping: Mapping | None) -> Mapping:
    if mapping is None:
        raise ClosedError("the pool is closed on this side")
    return mapping
