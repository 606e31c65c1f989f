"""The pool's segments, as the exporter says that they come and go."""

from __future__ import annotations

import logging

from asyncvmm._backends.base import ConsumerRegion
from asyncvmm._core import wire
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._errors import BackendError
from asyncvmm._fds import OwnedFd
from asyncvmm._types import SegmentInfo

logger = logging.getLogger("asyncvmm.consumer")


class Segments:
    """Maps and unmaps; what this process's memory refuses harms neither the link nor others."""

    def __init__(self, core: ConsumerCore, region: ConsumerRegion) -> None:
        self._core = core
        self._region = region
        self._stuck: dict[int, SegmentInfo] = {}  # those that could not be unmapped, by index

    def map(self, message: wire.Segment, fds: list[OwnedFd]) -> None:
        """Map a segment.  Raises BackendError if it cannot be; the core does not know it then."""
        info = message.info
        self._core.check_segment(info)
        handle: OwnedFd | bytes = fds.pop(0) if fds else message.handle
        try:
            self._clear(info)
        except BackendError:
            if isinstance(handle, OwnedFd):
                handle.close()
            raise
        self._region.map(info, handle)
        self._core.add_segment(info)

    def _clear(self, info: SegmentInfo) -> None:
        """Unmap once more what is still mapped where a segment is to be."""
        for index, stuck in list(self._stuck.items()):
            if stuck.start < info.start + info.nbytes and info.start < stuck.start + stuck.nbytes:
                self._region.unmap(index)
                del self._stuck[index]

    def refuse(self, info: SegmentInfo, error: BackendError) -> None:
        """Note that others can map it and we cannot: what lies in it is refused, and why."""
        logger.warning("a new segment of the pool cannot be mapped: %s", error)
        self._core.add_segment(info, failure=str(error))

    def unmap(self, index: int) -> None:
        """Unmap a segment; one that cannot be stays mapped until its place or the end comes."""
        mapped = self._core.has_mapped(index)
        info = self._core.remove_segment(index)
        if mapped:
            try:
                self._region.unmap(index)
            except BackendError as error:
                logger.warning("a segment that was given back stays mapped for now: %s", error)
                self._stuck[index] = info
