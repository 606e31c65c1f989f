"""The pool's segments, as the exporter says that they come and go."""

from __future__ import annotations

import logging

from asyncvmm._backends.base import ConsumerRegion
from asyncvmm._core import wire
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._errors import BackendError
from asyncvmm._fds import OwnedFd
from asyncvmm._logs import Once, kind_of
from asyncvmm._types import SegmentInfo

once = Once(logging.getLogger("asyncvmm.consumer"))


class Segments:
    """Maps and unmaps; what this process's memory refuses harms neither the link nor others."""

    def __init__(self, core: ConsumerCore, region: ConsumerRegion) -> None:
        self._core = core
        self._region = region
        self._stuck: dict[int, SegmentInfo] = {}  # those that could not be unmapped, by index

    def map(self, message: wire.Segment, fds: list[OwnedFd], *, attached: bool) -> None:
        """Map a segment; if that fails, others can perhaps, so only what lies in it is refused.

        Raises BackendError instead where we are not ``attached`` yet and so hold up nobody.
        """
        try:
            self._map(message, fds)
        except BackendError as error:
            if not attached:
                raise
            once.warning(kind_of(error), "a new segment cannot be mapped: %s", error)
            self._core.add_segment(message.info, failure=str(error))

    def _map(self, message: wire.Segment, fds: list[OwnedFd]) -> None:
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

    def unmap(self, index: int) -> None:
        """Unmap a segment; one that cannot be stays mapped until its place or the end comes."""
        mapped = self._core.has_mapped(index)
        info = self._core.remove_segment(index)
        if mapped:
            try:
                self._region.unmap(index)
            except BackendError as error:
                once.warning(kind_of(error), "a segment given back stays mapped for now: %s", error)
                self._stuck[index] = info
