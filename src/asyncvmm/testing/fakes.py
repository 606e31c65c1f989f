"""A fake GPU: host memory whose fences a test finishes by hand.

A :class:`FakeDevice` stands for the GPU: its streams are numbers, and the events on them are notes
in two lists.  Every rule that orders work by events can be tried with it on any machine: a slot
that must not come back yet, a readiness that must be waited for, a fence that can no longer be
asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec

from asyncvmm._backends.base import ConsumerRegion, ExporterRegion, Fence
from asyncvmm._backends.memfd import HostConsumerRegion, HostExporterRegion
from asyncvmm._errors import ArgumentError, LocalProtocolError
from asyncvmm._tensors.host import HostPort
from asyncvmm._types import RegionInfo

Kind = Literal["ready", "release"]


class HandDrivenFence:
    """A fence that is done when the test says so."""

    def __init__(self, kind: Kind, slot: int, streams: Sequence[int]) -> None:
        self.kind = kind
        self.slot = slot
        self.streams = tuple(streams)
        self.asked = 0
        """How often somebody wanted to know."""
        self.finished = False
        self._error: Exception | None = None

    def finish(self) -> None:
        """Let everything queued before it be done; again is a no-op."""
        self.finished = True

    def fail(self, error: Exception) -> None:
        """Raise ``error`` from now on to whoever asks."""
        self._error = error

    def done(self) -> bool:
        """Say whether it is done, or raise what :meth:`fail` was given."""
        self.asked += 1
        if self._error is not None:
            raise self._error
        return self.finished

    def __repr__(self) -> str:
        state = "done" if self.finished else "pending"
        return f"<HandDrivenFence {self.kind} of slot {self.slot} on {self.streams}, {state}>"


class FakeDevice:
    """What both ends of a fake GPU share: one current stream, and every event ever recorded.

    ``hold_ready`` and ``hold_release`` say whether new fences of that kind wait for
    :meth:`finish`; otherwise they are done when made.  Both may be changed at any time.
    """

    def __init__(self, *, hold_ready: bool = False, hold_release: bool = False) -> None:
        self.hold_ready = hold_ready
        self.hold_release = hold_release
        self.stream = 7
        """The current stream; set it to another number to work "on another stream"."""
        self.passing: set[int] = set()
        """Streams that may be destroyed, and their numbers given to others."""
        self.fences: list[HandDrivenFence] = []
        """Every fence that was recorded, oldest first."""
        self.waits: list[tuple[int, int]] = []
        """(slot, stream) of every wait for a slot's readiness."""
        self.events: dict[bytes, HandDrivenFence] = {}
        """Consumers' release events by name, as they were last recorded."""

    def pending(self, kind: Kind | None = None) -> list[HandDrivenFence]:
        """Return the fences that are not done, oldest first."""
        return [f for f in self.fences if not f.finished and kind in (None, f.kind)]

    def finish(self) -> None:
        """Let everything that is pending be done."""
        for fence in self.pending():
            fence.finish()

    def record(self, kind: Kind, slot: int, streams: Sequence[int]) -> HandDrivenFence:
        """Note an event; done at once unless its kind is held."""
        fence = HandDrivenFence(kind, slot, streams)
        if not (self.hold_ready if kind == "ready" else self.hold_release):
            fence.finish()
        self.fences.append(fence)
        return fence


class HandDrivenExporterRegion(HostExporterRegion):
    """Host memory with events that the test finishes."""

    fenced = True

    gpu: FakeDevice

    @property
    def info(self) -> RegionInfo:
        """What a consumer must know; it says "cuda", so that both ends take the way of a GPU."""
        return msgspec.structs.replace(super().info, kind="cuda", handle_type="posix")

    def record_ready(self, slot: int, stream: int) -> bytes:
        """Note the slot's ready event."""
        self._ready[slot] = self.gpu.record("ready", slot, (stream,))
        return self.ready_handle(slot)

    def ready_handle(self, slot: int) -> bytes:
        """Return something that names the event; one that was never recorded is done."""
        if slot not in self._ready:
            self._ready[slot] = HandDrivenFence("ready", slot, ())
            self._ready[slot].finish()
        return b"ready %d" % slot

    def ready_fence(self, slot: int) -> Fence | None:
        """Return the slot's last ready event."""
        return self._ready.get(slot)

    def open_release(self, peer: int, slot: int, handle: bytes) -> None:
        """Take the name of a consumer's event; it comes once."""
        if (peer, slot) in self._opened or handle not in self.gpu.events:
            raise LocalProtocolError(f"slot {slot} got the release event {handle!r}")
        self._opened[peer, slot] = handle

    def release_fence(self, peer: int, slot: int) -> Fence | None:
        """Return that consumer's last release event of the slot."""
        return self.gpu.events[self._opened[peer, slot]]

    def forget_peer(self, peer: int) -> None:
        """Drop the events of a consumer."""
        for name in [name for name in self._opened if name[0] == peer]:
            del self._opened[name]

    def drive(self, gpu: FakeDevice) -> None:
        """Take the device whose events these are."""
        self.gpu = gpu
        self._ready: dict[int, HandDrivenFence] = {}
        self._opened: dict[tuple[int, int], bytes] = {}


class HandDrivenConsumerRegion(HostConsumerRegion):
    """The consumer's side of the same."""

    def __init__(self, info: RegionInfo, gpu: FakeDevice) -> None:
        super().__init__(msgspec.structs.replace(info, kind="host", handle_type="memfd"))
        self.gpu = gpu
        self._known: set[int] = set()
        self._names: dict[int, bytes] = {}

    def open_ready(self, slot: int, handle: bytes) -> None:
        """Take the name of the slot's ready event; it comes once."""
        if slot in self._known or handle != b"ready %d" % slot:
            raise LocalProtocolError(f"slot {slot} got the ready event {handle!r}")
        self._known.add(slot)

    def wait_ready(self, slot: int, stream: int) -> None:
        """Note the wait; refuse one for an event that never came."""
        if slot not in self._known:
            raise LocalProtocolError(f"slot {slot} is to be waited for, its event never came")
        self.gpu.waits.append((slot, stream))

    def record_release(
        self, slot: int, streams: Sequence[int], others: Sequence[int] = ()
    ) -> bytes:
        """Note the slot's release event; its name goes out with the first one."""
        first = slot not in self._names
        if first:
            self._names[slot] = b"release %d" % next(_numbers)
        name = self._names[slot]
        self.gpu.events[name] = self.gpu.record("release", slot, streams)
        return name if first else b""


_numbers = itertools.count()


class FakePort(HostPort):
    """Tensors in host memory that both shells treat as if it were a GPU's."""

    kind: Literal["host", "cuda"] = "cuda"

    def __init__(self, device: FakeDevice) -> None:
        self.gpu = device

    def create(
        self,
        pool_bytes: int,
        max_pool_bytes: int,
        slots: int,
        *,
        writable: bool,
        handle_type: str,
    ) -> ExporterRegion:
        """Make a memfd pool whose fences the test finishes."""
        region = HandDrivenExporterRegion.create(
            pool_bytes, max_pool_bytes, slots, writable=writable
        )
        region.drive(self.gpu)
        return region

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        """Prepare a consumer's side."""
        return HandDrivenConsumerRegion(info, self.gpu)

    def current_stream(self) -> int:
        """Return the device's current stream."""
        return self.gpu.stream

    def lasting(self, stream: int) -> bool:
        """Say whether a stream's number can never come to mean another one."""
        return stream not in self.gpu.passing

    @contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Make a stream the device's current one for a while."""
        before, self.gpu.stream = self.gpu.stream, stream
        try:
            yield
        finally:
            self.gpu.stream = before

    def stream_of(self, stream: object) -> int:
        """Return a stream given as a number, or the current one for None."""
        if stream is None:
            return self.gpu.stream
        if not isinstance(stream, int):
            raise ArgumentError(f"a fake stream is an int, got {stream!r}")
        return stream
