"""What the rest of the library asks of memory.

Three Protocols, small enough that every backend can keep all of each.  Nothing here knows an
event loop, a socket or a tensor.  Streams are plain integers (a ``CUstream``; 0 is the default
stream, and host memory ignores them).  A method that may take long is marked *slow*: the shell
calls it in a worker thread.

Where something is "done when made", as everything is in host memory, a fence is ``None``: the
shell then takes the short way without a watcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from asyncvmm._errors import BackendError
from asyncvmm._fds import OwnedFd
from asyncvmm._types import RegionInfo, SegmentInfo


class Fence(Protocol):
    """Everything queued on some stream up to some point is done."""

    def done(self) -> bool:
        """Say whether it is done, at once.

        Called from the watcher's thread or from the loop's; never blocks.  Raises
        :class:`asyncvmm.BackendError` if that can no longer be known, which means "not done".
        """


def surely_done(fence: Fence) -> bool:
    """Say whether a fence is known to be done: if it cannot be asked, it is not."""
    try:
        return fence.done()
    except BackendError:
        return False


class ExporterRegion(Protocol):
    """The exporter's side of one pool: its memory, and the events of its slots."""

    @property
    def info(self) -> RegionInfo:
        """What a consumer must know before it maps anything."""

    @property
    def fenced(self) -> bool:
        """False where everything is done when made: no event is recorded and no fence given."""

    @property
    def address(self) -> int:
        """First byte of the reserved address range, mapped readable and writable."""

    def segments(self) -> Sequence[SegmentInfo]:
        """The segments that are mapped now, by index."""

    def export(self, index: int) -> OwnedFd | bytes:
        """Return a new handle to segment ``index``: a descriptor, or bytes (FABRIC)."""

    def grow(self, nbytes: int) -> SegmentInfo:
        """Map one more segment of at least ``nbytes``.  Slow.  All or nothing."""

    def shrink(self, index: int) -> None:
        """Give segment ``index`` back.  Slow.  Nothing may be using it."""

    def record_ready(self, slot: int, stream: int) -> bytes:
        """Record the slot's ready event on ``stream``, after what was queued there.

        Returns its handle.
        """

    def ready_handle(self, slot: int) -> bytes:
        """Return what lets another process wait for the slot's ready event; may be empty.

        Makes the event if there is none yet.
        """

    def ready_fence(self, slot: int) -> Fence | None:
        """Return the fence of the slot's last ready event; None if surely done."""

    def open_release(self, peer: int, slot: int, handle: bytes) -> None:
        """Take the release event that consumer ``peer`` made for ``slot``."""

    def release_fence(self, peer: int, slot: int) -> Fence | None:
        """Return the fence of that consumer's last release of ``slot``; None if surely done."""

    def forget_peer(self, peer: int) -> None:
        """Drop the events of a consumer whose process is gone."""

    def ask(self, fences: Sequence[Fence]) -> list[bool]:
        """Say of each fence whether it is done; one that cannot be asked counts as not done.

        For the loop's thread: no other thread's graph capture is disturbed.
        """

    def watching(self) -> AbstractContextManager[None]:
        """Prepare the calling thread for asking fences, for as long as the context lasts."""

    def poison(self, start: int, nbytes: int) -> None:
        """Overwrite a freed range with a pattern nobody sends (debug mode)."""

    def keepalive(self) -> object:
        """Return an object that keeps the mapping alive; every writable view holds it."""

    def close(self) -> None:
        """Give everything back, in the order that undoes it.  Slow.  Again is a no-op.

        Waits for the device work that was recorded; the mapping ends when the last keepalive is
        gone.
        """


class ConsumerRegion(Protocol):
    """A consumer's side of one pool."""

    @property
    def address(self) -> int:
        """First byte of this process's address range for the pool."""

    def map(self, segment: SegmentInfo, handle: OwnedFd | bytes) -> None:
        """Map one segment.  Takes the handle, also when it raises.  Checks what it is given."""

    def unmap(self, index: int) -> None:
        """Unmap segment ``index``; no view of it may be alive."""

    def open_ready(self, slot: int, handle: bytes) -> None:
        """Take the ready event that the exporter made for ``slot``."""

    def wait_ready(self, slot: int, stream: int) -> None:
        """Make ``stream`` wait for the slot's ready event.  Never waits on the host."""

    def note_read(self, slot: int) -> None:
        """Note that the slot's bytes are read from now on, until its release is recorded.

        Whoever waited for the slot's batch says so for each owner it reads; the wait itself says
        nothing, for an owner of the batch may be let go unread.
        """

    def record_release(
        self, slot: int, streams: Sequence[int], others: Sequence[int] = ()
    ) -> bytes:
        """Record the slot's release event behind all ``streams``; it stands for ``others``, too.

        Returns the event's handle if the exporter does not have it yet, else empty bytes.
        """

    def keepalive(self) -> object:
        """Return an object that keeps the mapping alive; every view holds it."""

    def close(self) -> None:
        """Let go of the mapping; it ends when the last keepalive is gone.  Again is a no-op."""
