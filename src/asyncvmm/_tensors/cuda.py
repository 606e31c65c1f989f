"""Tensors over GPU memory.

A view is made from ``__cuda_array_interface__`` *with the device given*: without it torch takes
the GPU that owns the memory, and the first kernel of a consumer on another GPU would end its
context.  Every view's array object holds the owner's :class:`_Chunk`; torch holds the array as
long as any tensor, slice or DLPack import of it lives, so the chunk tells when the last is gone.

Copies are queued on the caller's current stream.  That orders them after the work that made the
sources, with no event and no wait of our own (docs/performance.md says what a private stream
would cost).  Torch's allocator is told that this stream reads the sources, so they may be freed
at once whichever stream they were allocated on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NoReturn

import torch

from asyncvmm._backends import driver
from asyncvmm._backends.base import ConsumerRegion, ExporterRegion
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._core.wire import Feature
from asyncvmm._errors import ArgumentError
from asyncvmm._tensors.host import split
from asyncvmm._tensors.launches import Launches
from asyncvmm._tensors.plan import (
    TORCH_DTYPES,
    Layout,
    Plan,
    Tensor,
    plan_specs,
    plan_tensors,
)
from asyncvmm._types import RegionInfo, is_int

PAGEABLE_BYTES = 64 << 10
"""Pageable sources of at least this many bytes are copied in a worker thread: the driver stages
them through pinned memory and keeps the caller until the last byte is staged."""

PER_THREAD = 2
"""``CU_STREAM_PER_THREAD``: in each thread the number of another stream."""

_POOLED = 1
"""Set in torch's id of a stream of its own; for one that others made the id is its address."""

_TYPESTR = {
    torch.bool: "|b1", torch.uint8: "|u1", torch.int8: "|i1", torch.int16: "<i2",
    torch.int32: "<i4", torch.int64: "<i8", torch.float16: "<f2", torch.float32: "<f4",
    torch.float64: "<f8", torch.complex64: "<c8", torch.complex128: "<c16",
}  # fmt: skip
_CARRIER = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}


def _refuse_per_thread() -> NoReturn:
    """Refuse the stream that another thread would take for its own.

    What is copied in a worker thread, or released when a view dies in another, would be ordered
    after the wrong work, and nobody would notice.
    """
    raise ArgumentError(
        f"stream {PER_THREAD} (CU_STREAM_PER_THREAD) is another stream in each thread, and the "
        f"event of a copy or of a release may be recorded in another thread than yours; use a "
        f"stream with a handle of its own, such as torch.cuda.Stream()"
    )


class _Chunk:
    """The bytes of one owner, kept mapped; dies with the owner's last view."""

    __slots__ = ("__weakref__", "address", "keepalive", "nbytes")

    def __init__(self, address: int, nbytes: int, keepalive: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.keepalive = keepalive


class _Array:
    """One feature's bytes in the form that torch takes over without copying."""

    __slots__ = ("__cuda_array_interface__", "chunk")

    def __init__(self, chunk: _Chunk, offset: int, typestr: str, shape: tuple[int, ...]) -> None:
        self.chunk = chunk
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (chunk.address + offset, False),
            "version": 3,
        }


class CudaPort:
    """GPU memory and CUDA tensors (a ``DevicePort``)."""

    kind: Literal["host", "cuda"] = "cuda"
    copy_threads = 2
    """The driver copies pageable memory with the thread that calls it."""

    def __init__(self, device: str) -> None:
        chosen = torch.device(device)
        index: int | None = chosen.index  # None for plain "cuda"
        self._index = torch.cuda.current_device() if index is None else index
        count = driver.device_count()  # torch starts NVML to count them, every first time
        if self._index >= count:
            raise ArgumentError(
                f"device={device!r} was asked for, but there are {count} CUDA device(s) here, "
                f"numbered from 0"
            )
        self._device = torch.device("cuda", self._index)
        self.device = str(self._device)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._lasting = {0, 1}  # the default stream, by both its numbers
        # 0.1 us against 3.5 us for torch.cuda.current_stream(); Triton relies on it as well.
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice
        self._launches = Launches(self._device, self._streams, self._stream, self._target)
        torch.zeros(1, device=self._device)  # makes the primary context, so the driver has one

    plan_tensors = staticmethod(plan_tensors)
    plan_specs = staticmethod(plan_specs)

    def create(
        self,
        pool_bytes: int,
        max_pool_bytes: int,
        slots: int,
        *,
        writable: bool,
        handle_type: Literal["auto", "fabric", "posix"],
    ) -> ExporterRegion:
        """Make a CUDA VMM pool.  Slow."""
        # The first record_stream of a process takes 11 to 17 ms (H200, torch 2.11); here it is in
        # a worker thread and not in the first send, and consumers do without.
        torch.zeros(1, device=self._device).record_stream(self._stream(self.current_stream()))
        return CudaExporterRegion.create(
            self._index,
            pool_bytes,
            max_pool_bytes,
            slots,
            writable=writable,
            handle_type=handle_type,
        )

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        """Prepare a consumer's side of a pool, on this port's own device."""
        return CudaConsumerRegion(info, self._index)

    def current_stream(self) -> int:
        """Return the caller's current stream on this device."""
        stream: int = self._raw_stream(self._index)
        return stream if stream != PER_THREAD else _refuse_per_thread()

    def stream_of(self, stream: object) -> int:
        """Return the number of a torch stream, of a number, or of the current stream (None)."""
        if stream is None:
            return self.current_stream()
        number = getattr(stream, "cuda_stream", stream)
        if isinstance(stream, torch.cuda.Stream) and stream.stream_id & _POOLED:
            self._lasting.add(stream.cuda_stream)
        if not is_int(number):
            raise ArgumentError(f"a stream is a torch.cuda.Stream or its number, got {stream!r}")
        return number if number != PER_THREAD else _refuse_per_thread()

    def lasting(self, stream: int) -> bool:
        """Say whether a stream's number can never come to mean another one.

        The driver gives the number of a destroyed stream away at once, also while its work is
        pending (50 of 50 times on an H200, driver 580).  Torch never destroys its own streams;
        what others made may be destroyed.
        """
        if stream in self._lasting:
            return True
        known = stream == self._raw_stream(self._index) and (
            torch._C._cuda_getCurrentStream(self._index)[0] & _POOLED
        )
        if known:
            self._lasting.add(stream)
        return bool(known)

    def copies_slowly(self, plan: Plan) -> bool:
        """Say whether a source is in pageable host memory and large."""
        return plan.layout.device != self._device and any(
            source.is_cpu and size >= PAGEABLE_BYTES and not source.is_pinned()
            for source, size in zip(plan.tensors, plan.layout.sizes, strict=True)
        )

    def copy_all_slowly(self, plans: Sequence[Plan]) -> bool:
        """Say whether any of these has a large source in pageable host memory."""
        return any(map(self.copies_slowly, plans))

    def copy_in(self, address: int, plan: Plan, stream: int) -> None:
        """Queue the copies on ``stream``."""
        self.copy_all(((address, plan),), stream)

    def copy_all(self, plans: Sequence[tuple[int, Plan]], stream: int) -> None:
        """Queue the copies of several plans, each to its address, on ``stream``."""
        if self._current_device() != self._index or stream != self._raw_stream(self._index):
            with self.using(stream):
                self._launches.queue(plans, stream)
        else:
            self._launches.queue(plans, stream)

    def _target(self, address: int, layout: Layout, number: int) -> Tensor:
        """Return a tensor over one feature of a chunk; it keeps nothing alive."""
        chunk = _Chunk(address, layout.nbytes, None)
        return self.view(chunk, layout.offsets[number], layout.features[number])

    def holder(self, address: int, nbytes: int, keepalive: object) -> object:
        """Return the chunk's bytes as an object that every view of them holds."""
        return _Chunk(address, nbytes, keepalive)

    def view(self, holder: object, offset: int, feature: Feature) -> Tensor:
        """Return one feature as a tensor on this port's device, without a copy."""
        assert isinstance(holder, _Chunk)
        dtype = TORCH_DTYPES[feature.dtype]
        if 0 in feature.shape:
            return torch.empty(feature.shape, dtype=dtype, device=self._device)
        typestr = _TYPESTR.get(dtype)
        array = _Array(holder, offset, typestr or _CARRIER[dtype.itemsize], feature.shape)
        tensor = torch.as_tensor(array, device=self._device)
        return tensor if typestr else tensor.view(dtype)

    def clone(self, holder: object, nbytes: int, features: Sequence[Feature]) -> dict[str, Tensor]:
        """Copy the whole owner with one copy on the current stream."""
        whole = self.view(holder, 0, Feature("", "uint8", (nbytes,)))
        return split(whole.clone(), features)

    def copies_out_slowly(self, nbytes: int) -> bool:
        """Return False: the copy is queued, and the host waits for nothing."""
        return False

    def _stream(self, stream: int) -> torch.cuda.Stream:
        """Return torch's object for a stream's number; making one takes longer than a copy."""
        found = self._streams.get(stream)
        if found is None:
            if stream:
                found = torch.cuda.ExternalStream(stream, device=self._device)
            else:
                found = torch.cuda.default_stream(self._device)
            self._streams[stream] = found
        return found

    def to_host(self, tensor: Tensor, stream: int) -> Tensor:
        """Return a copy in host memory, made after the work on ``stream``."""
        with self.using(stream):
            return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def to_device(self, value: object, stream: int) -> object:
        """Return a tensor as one on this port's GPU, copied on ``stream``."""
        if not isinstance(value, torch.Tensor):
            return value
        with self.using(stream):
            return value.to(self._device)

    def using(self, stream: int) -> AbstractContextManager[object]:
        """Make ``stream`` current if it is not; worker threads have another current stream."""
        if stream != self.current_stream():
            return torch.cuda.stream(self._stream(stream))
        if self._current_device() != self._index:
            # Numbers of default streams mean those of the current device (field report 43).
            return torch.cuda.device(self._index)
        return nullcontext()
