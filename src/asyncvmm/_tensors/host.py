"""Tensors over host memory.

A view is made with ``torch.frombuffer`` over a ctypes array that lies on the pool's bytes.  The
array (the *holder*) is what tells when the last view is gone: torch keeps it as long as any
tensor, slice, numpy array or DLPack import of it lives.  It claims to be writable, so torch does
not warn; whether a write reaches memory is up to the mapping, and consumers map read-only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from asyncvmm._backends.base import ConsumerRegion, ExporterRegion
from asyncvmm._backends.memfd import HostConsumerRegion, HostExporterRegion
from asyncvmm._core.layout import feature_bytes, offsets
from asyncvmm._core.wire import Feature
from asyncvmm._errors import ArgumentError, InvalidTensorError
from asyncvmm._tensors.plan import (
    TORCH_DTYPES,
    Plan,
    Tensor,
    plan_specs,
    plan_tensors,
    refuse_source,
)
from asyncvmm._types import RegionInfo

OFFLOAD_BYTES = 1 << 20
"""Copies of at least this many bytes leave the event loop: at 10 GB/s (measured, warm pages) it
keeps the loop 0.1 ms, about what handing the copy to a thread costs."""

_CPU = torch.device("cpu")

_UNCOPIABLE = frozenset(
    dtype for name, dtype in TORCH_DTYPES.items() if name.lstrip("u").startswith("int")
    and name.lstrip("u")[3:] in "1234567"
)  # fmt: skip
"""Sub-byte integers have no copy kernel in torch; their bytes are copied as uint8."""


class HostPort:
    """Host memory and CPU tensors (a ``DevicePort``)."""

    kind: Literal["host", "cuda"] = "host"
    device = "cpu"
    copy_threads = 1
    """Torch gives each thread that copies a team of its own with a thread for every core, and the
    idle ones of a team spin.  One copy fills the memory's bandwidth; with two teams 36 MiB ran at
    0.8 of the speed on two cores."""

    plan_tensors = staticmethod(plan_tensors)
    plan_specs = staticmethod(plan_specs)

    def create(
        self,
        pool_bytes: int,
        max_pool_bytes: int,
        slots: int,
        *,
        writable: bool,
        handle_type: str,
    ) -> ExporterRegion:
        """Make a memfd pool.  Slow: every page is made present."""
        if handle_type != "auto":
            raise ArgumentError(
                f"handle_type={handle_type!r} is for GPU pools; host pools travel as memfds"
            )
        return HostExporterRegion.create(pool_bytes, max_pool_bytes, slots, writable=writable)

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        """Prepare a consumer's side of a pool."""
        return HostConsumerRegion(info)

    def current_stream(self) -> int:
        """Return 0: host memory has no stream."""
        return 0

    def stream_of(self, stream: object) -> int:
        """Return 0: host memory has no stream."""
        return 0

    def lasting(self, stream: int) -> bool:
        """Return True: there is but one number."""
        return True

    def to_host(self, tensor: Tensor, stream: int) -> Tensor:
        """Return a copy in host memory."""
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def to_device(self, value: object, stream: int) -> object:
        """Return the value: host memory is this port's device."""
        return value

    def using(self, stream: int) -> AbstractContextManager[object]:
        """Do nothing: host memory has no stream."""
        return nullcontext()

    def copies_slowly(self, plan: Plan) -> bool:
        """Say whether the copy should leave the loop."""
        return plan.nbytes >= OFFLOAD_BYTES or plan.layout.device != _CPU

    def copy_all_slowly(self, plans: Sequence[Plan]) -> bool:
        """Say whether the copies together should leave the loop."""
        return sum(plan.nbytes for plan in plans) >= OFFLOAD_BYTES or any(
            plan.layout.device != _CPU for plan in plans
        )

    def copy_all(self, plans: Sequence[tuple[int, Plan]], stream: int) -> None:
        """Copy every feature of several plans; done when it returns."""
        for address, plan in plans:
            self.copy_in(address, plan, stream)

    def copy_in(self, address: int, plan: Plan, stream: int) -> None:
        """Copy every feature to its place; done when it returns."""
        layout, tensors = plan.layout, plan.tensors
        number = 0
        try:
            for number, offset, size in layout.places:
                source = tensors[number]
                start = source.data_ptr()
                if not start or source.nbytes != size:
                    refuse_source(layout.features[number].name, source, size)
                if (
                    size < OFFLOAD_BYTES
                    and source.is_contiguous()
                    and source.is_cpu
                    and not source.is_conj()
                    and not source.is_neg()
                ):
                    ctypes.memmove(address + offset, start, size)
                else:
                    feature = layout.features[number]
                    self._copy(address + offset, size, feature, source.detach())
        except InvalidTensorError:
            raise
        except Exception as error:  # whatever a subclass or a device may raise (inv. 13)
            name = layout.features[number].name
            raise InvalidTensorError(
                f"feature {name!r} could not be copied: {error}", feature=name
            ) from error

    def _copy(self, address: int, size: int, feature: Feature, source: Tensor) -> None:
        """Copy as torch does: strided sources, other devices, in several threads when large."""
        target = self.view(self.holder(address, size, None), 0, feature)
        if source.dtype in _UNCOPIABLE:
            source, target = source.view(torch.uint8), target.view(torch.uint8)
        target.copy_(source)

    def holder(self, address: int, nbytes: int, keepalive: object) -> object:
        """Return a ctypes array over the bytes; it keeps ``keepalive`` alive."""
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        array.keepalive = keepalive  # type: ignore[attr-defined]  # ctypes arrays take attributes
        return array

    def view(self, holder: object, offset: int, feature: Feature) -> Tensor:
        """Return one feature as a tensor over the holder's bytes."""
        dtype = TORCH_DTYPES[feature.dtype]
        shape = feature.shape
        count = 1
        for length in shape:
            count *= length
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(holder, dtype=dtype, count=count, offset=offset)
        # Of as many elements, so it touches no byte; a view of it would be a second tensor.
        return flat if len(shape) == 1 else flat.resize_(shape)

    def clone(self, holder: object, nbytes: int, features: Sequence[Feature]) -> dict[str, Tensor]:
        """Copy the whole owner in one copy into memory of this process alone."""
        local = torch.frombuffer(holder, dtype=torch.uint8, count=nbytes).clone()
        return split(local, features)

    def copies_out_slowly(self, nbytes: int) -> bool:
        """Say whether the copy should leave the loop."""
        return nbytes >= OFFLOAD_BYTES


def split(local: Tensor, features: Sequence[Feature]) -> dict[str, Tensor]:
    """Return the features of an owner as views of one uint8 tensor that holds its bytes."""
    sizes = [feature_bytes(f.name, f.dtype, f.shape) for f in features]
    found = {}
    for offset, size, feature in zip(offsets(sizes), sizes, features, strict=True):
        dtype = TORCH_DTYPES[feature.dtype]
        if size:
            found[feature.name] = local[offset : offset + size].view(dtype).view(feature.shape)
        else:
            found[feature.name] = torch.empty(feature.shape, dtype=dtype, device=local.device)
    return found
