"""An address range of one GPU with what is mapped in it and the events of its slots.

Both regions stand on it.  All of it is given back together, when the last keepalive is gone,
and only once the device is done with it: unmapping does not wait for kernels that still read, and
an event that is destroyed early looks done to the other process.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Self

from asyncvmm._backends import driver, driver_memory
from asyncvmm._backends.contexts import PrimaryContext, Teardown, Undo
from asyncvmm._backends.driver_memory import Allocation
from asyncvmm._backends.events import Event
from asyncvmm._errors import BackendError
from asyncvmm._fds import Single
from asyncvmm._types import SegmentInfo

logger = logging.getLogger("asyncvmm.backends")

UNMAP_THREAD = "asyncvmm-unmap"

_CAPTURING = "CUDA_ERROR_STREAM_CAPTURE"
"""Start of the codes with which the driver refuses to wait while a graph is captured."""


class Keepalive:
    """What every view holds: the range is given back after the last reference to it."""

    __slots__ = ("__weakref__",)


class DeviceRange(Single):
    """A reserved address range of ``nbytes``, on behalf of GPU ``context.device``."""

    def __init__(self, context: PrimaryContext, address: int, nbytes: int) -> None:
        self.context = context
        self.address = address
        self.nbytes = nbytes
        self.mapped: dict[int, SegmentInfo] = {}
        self.events = set[Event]()
        self.unordered = set[int]()
        """Slots whose reads no recorded event stands behind yet."""
        self._reserved = True
        self._ended = False
        self._over = False
        self._failed: BackendError | None = None
        self._ending = threading.Lock()

    @classmethod
    def reserve(cls, context: PrimaryContext, nbytes: int) -> Self:
        """Reserve the range; it takes the context over, but not where this raises."""
        with Undo() as undo:
            with context.working():
                address = driver_memory.address_reserve(nbytes)
                undo.add(context.call, driver_memory.address_free, address, nbytes)
            undo.keep()
        return cls(context, address, nbytes)

    def keepalive(self) -> Keepalive:
        """Return the object with whose end everything is given back; ask once."""
        keepalive = Keepalive()
        # Not at exit: the process's end gives all back, and views may outlive this module then.
        weakref.finalize(keepalive, self._finish).atexit = False
        return keepalive

    def map(self, segment: SegmentInfo, memory: Allocation, *, writable: bool) -> None:
        """Map ``memory`` for this GPU and give its reference back; on an error nothing is kept."""
        address = self.address + segment.start
        with Undo() as undo:
            undo.add(self.context.call, memory.release)
            with self.context.working():
                memory.map(address, segment.nbytes)
                unmap = driver_memory.memory_unmap
                undo.add(self.context.call, unmap, address, segment.nbytes)
                driver_memory.memory_set_access(
                    address, segment.nbytes, self.context.device, writable=writable
                )
                memory.release()
            undo.keep()
        self.mapped[segment.index] = segment

    def unmap(self, index: int) -> None:
        """Unmap a segment that nothing reads or writes any more; on an error it is still mapped."""
        segment = self.mapped[index]
        try:
            with self.context.working():
                driver_memory.memory_unmap(self.address + segment.start, segment.nbytes)
                del self.mapped[index]
        except BackendError as error:
            if index in self.mapped:
                raise
            # Nobody can try again what has been done.
            logger.warning("segment %d was unmapped, and then: %s", index, error)

    def settle(self) -> None:
        """Block until the device is done with the range.  Only for threads that may block."""
        with self.context.working():
            for event in tuple(self.events):
                if event.recorded and not event.done():
                    event.synchronize()
            if self.unordered:
                driver.context_synchronize()
                self.unordered.clear()

    def closed(self) -> None:
        """Raise what went wrong at the end, if the end has come; another call tries again."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._ended and not self._over:
            with self._ending:
                self._tear_down()

    def _finish(self) -> None:
        """The last keepalive is gone: end here if the device is done, else in a thread.

        Runs on whichever thread dropped it, often the event loop's, so it never waits (inv. 10).
        """
        if self.context.forked:
            return
        if self._busy():
            thread = threading.Thread(target=self._end_later, name=UNMAP_THREAD)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, and gives back what is left itself
                logger.debug("the interpreter ends with a pool still in use on the device")
        else:
            self._end()

    def _busy(self) -> bool:
        try:
            with self.context.working():
                return bool(self.unordered) or any(
                    event.recorded and not event.done() for event in tuple(self.events)
                )
        except BackendError as error:
            logger.warning("cannot tell whether the device still uses a pool: %s", error)
            return True

    def _end_later(self) -> None:
        try:
            self.settle()
        except BackendError as error:
            if error.code.startswith(_CAPTURING):
                logger.warning("a pool stays mapped until this process ends: %s", error)
                return
            # Any other code means that the context is broken: nothing runs in it any more.
            logger.warning("waiting for the device's last use of a pool failed: %s", error)
        self._end()

    def _end(self) -> None:
        with self._ending:
            self._ended = True
            try:
                self._tear_down()
            except BackendError as error:
                logger.warning("a pool was not given back whole: %s", error)
                try:
                    self._tear_down()  # for nobody may ask again: most refusals pass
                except BackendError as second:
                    self._failed = second

    def _tear_down(self) -> None:
        """Give everything back in the order that undoes it; keep what failed for another try."""
        if self._over:
            return
        teardown = Teardown()
        with self.context.working():
            for event in tuple(self.events):
                if teardown.step(event.destroy):
                    self.events.discard(event)
            for index in tuple(self.mapped):
                teardown.step(self.unmap, index)
            if self._reserved and not self.mapped:
                self._reserved = not teardown.step(
                    driver_memory.address_free, self.address, self.nbytes
                )
        if not teardown.errors:
            self._over = teardown.step(self.context.release)
        teardown.finish()
