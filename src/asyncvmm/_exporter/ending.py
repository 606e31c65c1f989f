"""What everybody who waits on an exporter is told when nothing comes back any more.

That is so once it is closed, and from the moment in which its GPU is lost: a fault ends the
context of its process, and then no event can be asked and nothing can be copied.  What consumers
hold is theirs as before; the slots stay as they are, for nobody can know when they are free.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from copy import copy

from asyncvmm._core.exporter import ExporterCore
from asyncvmm._errors import AsyncVMMError, ClosedError, DeviceLostError, ForkError
from asyncvmm._exporter.acknowledgement import Acknowledgement
from asyncvmm._exporter.connections import Connections
from asyncvmm._exporter.room import Room, Sizes
from asyncvmm._fds import Single
from asyncvmm._io.waiting import wake, woken

logger = logging.getLogger("asyncvmm.exporter")


class Ending(Single):
    """The end of an exporter, for those who send and those who wait."""

    name: str
    _core: ExporterCore
    _room: Room
    _connections: Connections

    def __init__(self) -> None:
        self._made_in = os.getpid()
        self._forked = self._closing = False
        self._shut = False  # it takes no new owners: closing, or its GPU is lost
        self._over: AsyncVMMError | None = None  # why nobody can let go of anything any more
        self._ended = False  # the memory was given back
        self._idle: list[asyncio.Future[None]] = []

    def _guard(self) -> None:
        if self._forked:
            raise ForkError("exporter", self._made_in, os.getpid())
        if self._closing:
            raise ClosedError(f"the exporter {self.name!r} is closed")
        if self._over is not None:
            raise copy(self._over)

    def _begin_closing(self) -> None:
        """Take no new owners from now on."""
        self._closing = self._shut = True
        self._room.close(ClosedError("the exporter was closed while a send waited for room"))

    @property
    def _device_lost(self) -> bool:
        return isinstance(self._over, DeviceLostError)

    async def _until_idle(self) -> None:
        while (
            any(record.published for record in self._core.records.values())
            or self._device_lost  # nothing comes back, and that is said
        ):
            if self._over is not None:
                raise copy(self._over)
            await woken(self._idle)

    def _hang_up(self) -> None:
        """Tell everybody who waits for consumers that nothing comes from them any more."""
        self._end(ClosedError(f"the exporter {self.name!r} was closed before everybody let go"))

    def _lose_device(self, error: DeviceLostError) -> None:
        """Tell everybody who waits that this process can use its GPU no more, once."""
        if self._over is None:
            error = copy(error)  # the one raised keeps the frames, and so the tensors, it went by
            logger.error("the exporter %r takes nothing more: %s", self.name, error)
            self._shut = True
            self._room.close(error)
            self._end(error)
            self._connections.changed()

    def _no_room(self, holds: Callable[[Sizes], bool], error: AsyncVMMError) -> None:
        """Send away who waits for more than a pool that cannot grow ever has."""
        if isinstance(error, DeviceLostError):
            self._lose_device(error)
        else:
            self._room.refuse(holds, error)

    def _end(self, error: AsyncVMMError) -> None:
        self._over = self._over or error
        for record in self._core.records.values():
            if isinstance(record.acknowledgement, Acknowledgement):
                record.acknowledgement._settle(None, error)
        wake(self._idle)

    def close(self) -> None:
        """Mark a forked child's copy as unusable; not for users: leave the ``async with``."""
        self._forked = True
