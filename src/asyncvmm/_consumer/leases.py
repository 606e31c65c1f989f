"""All leases of one consumer: making views, and settling once nobody needs the bytes.

Settling happens on the loop's thread.  A view that dies in another thread, or inside the garbage
collector, only puts its lease into a queue and wakes the loop.  After the loop is gone (views
kept in a global, a consumer closed) what is left *lingers*: the socket stays open without a
loop, and the thread that drops the last view says so on it directly.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from asyncvmm._backends.base import ConsumerRegion
from asyncvmm._consumer.lease import Lease, Readiness
from asyncvmm._consumer.ordering import Ordering
from asyncvmm._consumer.pinned import Pinned
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.layout import feature_bytes, offsets
from asyncvmm._core.ledger import PeerState
from asyncvmm._core.wire import NO_LANE, OwnerFrame
from asyncvmm._errors import BackendError, DeviceLostError, ReleasedError
from asyncvmm._io.turn import MOST
from asyncvmm._logs import Once, kind_of
from asyncvmm._tensors import DevicePort

if TYPE_CHECKING:
    from asyncvmm._tensors.local import KeptCopy
    from asyncvmm._tensors.plan import Tensor

logger = logging.getLogger("asyncvmm.consumer")

AGAIN_SECONDS = 0.02
"""After how long a release is tried again whose event the driver refused to record."""


class Pump(Protocol):
    """Sends what the core has to say; at once if it is a ``whole`` packet's worth."""

    def __call__(self, *, whole: bool = False) -> None: ...


class Leases:
    """The owners that this process has and has not given back."""

    def __init__(
        self,
        core: ConsumerCore,
        region: ConsumerRegion,
        port: DevicePort,
        pump: Pump,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.live: dict[int, Lease] = {}  # slot -> lease not yet settled
        self._core = core
        self._region = region
        self._address = region.address
        self._once = Once(logger)
        self._port = port
        self._ordered = port.kind != "host"
        self._pump = pump
        self._loop = loop
        self._thread = threading.get_ident()
        self._queue: deque[Lease] = deque()
        self._due = False  # a sweep of the queue is scheduled
        self._lingering: Callable[[Lease], None] | None = None
        self._lanes: dict[int, int] = {}  # by stream
        self.pinned = Pinned(self.live, loop)
        ordering = Ordering(core, region, port, self._once)
        self._order, self.open_ready = ordering.order, ordering.open_ready

    def lease(self, frames: Sequence[OwnerFrame]) -> list[Lease]:
        """Begin leases of a batch that was just taken."""
        found = []
        live = self.live
        ready = Readiness(frames[0].slot)
        for frame in frames:
            lease = live[frame.slot] = Lease(frame, self, ready)
            found.append(lease)
        return found

    # -- views (Keeper) ----------------------------------------------------------------------

    def view(self, lease: Lease, index: int) -> Tensor:
        """Return one feature as a tensor, ordered after the producer's work."""
        holder = self._open(lease)
        feature = lease.frame.features[index]
        if not index:
            return self._port.view(holder, 0, feature)
        places = lease.offsets
        if places is None:
            sizes = (feature_bytes(f.name, f.dtype, f.shape) for f in lease.frame.features)
            places = lease.offsets = offsets(sizes)
        return self._port.view(holder, places[index], feature)

    def clone(self, lease: Lease) -> dict[str, Tensor]:
        """Copy the whole owner with one copy."""
        holder = self._open(lease)
        return self._port.clone(holder, lease.frame.nbytes, lease.frame.features)

    def local(self, lease: Lease) -> Callable[[], KeptCopy]:
        """Return what copies the whole owner; for host memory it may run in any thread."""
        from asyncvmm._tensors.local import LocalCopy  # imports torch, as the port has before

        holder, frame = self._open(lease), lease.frame
        clone = self._port.clone
        return lambda: LocalCopy.make(clone(holder, frame.nbytes, frame.features), frame.features)

    def _open(self, lease: Lease) -> object:
        region, frame = self._region, lease.frame
        if lease.done:
            raise ReleasedError(f"owner {frame.key!r} was given back")
        # First, for an error here is kept by whoever caught it, with what its frames hold.
        stream = self._order(lease) if self._ordered else None
        holder = lease.holder
        if holder is None:
            holder = self._port.holder(
                self._address + frame.start, frame.nbytes, region.keepalive()
            )
            return lease.open(holder, stream)
        if stream is not None and stream not in lease.streams:
            lease.add_stream(stream)
        return holder

    def record_stream(self, lease: Lease, stream: object) -> None:
        """Have the release wait for this stream too."""
        lease.add_stream(self._port.stream_of(stream))

    # -- the end of a lease ------------------------------------------------------------------

    def say_done(self, lease: Lease, stream: object) -> None:
        """Its user is done with it."""
        if stream is not None:
            self.record_stream(lease, stream)
        if not lease.say_done():
            if self._lingering is None:
                self.pinned.note(here=threading.get_ident() == self._thread)
        elif threading.get_ident() == self._thread and self._lingering is None:
            self._settle(lease)
            self._pump()
        else:
            self.settle_later(lease)

    def say_all_done(self, leases: Sequence[Lease], stream: object) -> None:
        """Its user is done with several: those read on the same streams share one event."""
        if threading.get_ident() != self._thread or self._lingering is not None:
            for lease in leases:
                self.say_done(lease, stream)
            return
        alike: dict[tuple[tuple[int, ...], bool], list[Lease]] = {}
        for lease in leases:
            if stream is not None:
                self.record_stream(lease, stream)
            if lease.say_done():
                alike.setdefault((lease.streams, lease.ordered), []).append(lease)
            else:
                self.pinned.note(here=True)
        for group in alike.values():
            self._settle(*group)
        self._pump(whole=len(leases) >= MOST)

    def put_back(self, lease: Lease) -> None:
        """Have the exporter take back an owner that a ticket was redeemed for, as unread."""
        if not lease.done:
            lease.say_done()
            lease.done = True
            del self.live[lease.frame.slot]
            self._core.put_back(lease.frame)

    def force(self, lease: Lease) -> None:
        """Give it back whatever views are alive."""
        lease.say_done()
        if threading.get_ident() == self._thread and self._lingering is None:
            self._settle(lease)
            self._pump()
        else:
            lease.views = None
            self.settle_later(lease)

    def drop(self, lease: Lease) -> None:
        """Its last reference is gone without a release; called from a finaliser."""
        if not lease.opened:
            lease.reason = "dropped unread"
        if lease.say_done():
            self.settle_later(lease)

    def settle_later(self, lease: Lease) -> None:
        """Settle it from the loop (Keeper); safe in any thread and inside a finaliser."""
        lingering = self._lingering
        if lingering is not None:
            self.live.pop(lease.frame.slot, None)
            lingering(lease)
            return
        self._queue.append(lease)
        if self._due:
            return
        self._due = True
        try:
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._sweep)
            else:
                self._loop.call_soon_threadsafe(self._sweep)
        except RuntimeError:
            # The loop was closed under us: the process is ending, and its death will tell.
            self._due = False
        except BaseException:
            # A signal's handler raised, maybe before the loop was asked: whoever is next asks it.
            self._due = False
            raise

    def _sweep(self) -> None:
        self._due = False
        for _ in range(len(self._queue)):  # what is put off again waits for the next sweep
            self._settle(self._queue.popleft())
        self._pump()

    def _settle(self, lease: Lease, *others: Lease) -> None:
        """Tell the exporter, exactly once (inv. 6); ``others`` were read on the same streams."""
        if lease.done:
            return
        frame = lease.frame
        handle, lane = b"", 0
        heard = self._core.state is not PeerState.CLOSED or self._core.resumable
        if lease.streams and lease.ordered and not lease.reason and heard:
            slots = [other.frame.slot for other in others] if others else ()
            try:
                handle = self._region.record_release(frame.slot, lease.streams, slots)
            except BackendError as error:
                self._put_off((lease, *others), error)
                return
            lane = self.lane(lease.streams)
        for each in (lease, *others) if others else (lease,):
            each.done = True
            del self.live[each.frame.slot]
        if lease.reason:
            self._core.refuse(frame, lease.reason)
        elif others:
            self._core.release(frame, handle, lane, [other.frame for other in others])
        else:
            self._core.release(frame, handle, lane)

    def _put_off(self, leases: Sequence[Lease], error: BackendError) -> None:
        """Try again soon: without its event a release frees bytes that may be read (inv. 4)."""
        key = leases[0].frame.key
        if isinstance(error, DeviceLostError):
            # Nobody can record it any more, so the exporter has it back when this process ends.
            self._once.warning("lost", "owner %r stays held: %s", key, error)
            return
        self._once.warning(kind_of(error), "owner %r is released later: %s", key, error)
        self._queue.extend(leases)
        if not self._due:
            self._due = True
            self._loop.call_later(AGAIN_SECONDS, self._sweep)

    def lane(self, streams: tuple[int, ...]) -> int:
        """Return a small number for the stream that the release was recorded on: the first.

        0 is for releases without an event.  When the numbers are used up, later streams have
        ``NO_LANE``: the exporter then asks each of their events by itself.  So have streams whose
        number may be that of another by now, for their events finish in no order.
        """
        first = streams[0]
        lane = self._lanes.get(first)
        if lane is None:
            lane = min(len(self._lanes) + 1, NO_LANE) if self._port.lasting(first) else NO_LANE
            if lane != NO_LANE:
                self._lanes[first] = lane
        return lane

    # -- the end of the consumer -------------------------------------------------------------

    def finish(self) -> list[Lease]:
        """Settle everything that no view needs; return what views still hold."""
        self.pinned.close()
        self._sweep()
        for lease in list(self.live.values()):
            if not lease.said and not lease.opened:
                lease.reason = "the consumer left without reading it"
            if lease.say_done():
                self._settle(lease)
        return list(self.live.values())

    def linger(self, settle: Callable[[Lease], None]) -> None:
        """From now on there is no loop: ``settle`` is called in the thread that drops a view."""
        self._lingering = settle
        for lease in list(self.live.values()):
            if not lease.viewed:  # its last view died while the loop was being left
                self.settle_later(lease)
