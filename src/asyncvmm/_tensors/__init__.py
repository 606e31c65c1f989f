"""Torch lives here and nowhere else: reading features in, and views of memory out.

A :class:`DevicePort` joins one kind of memory (a backend) with the way torch sees it.  The shells
hold a port and never ask which kind it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Literal, Protocol

from asyncvmm._backends.base import ConsumerRegion, ExporterRegion
from asyncvmm._core.wire import Feature
from asyncvmm._errors import ArgumentError, BackendError
from asyncvmm._types import RegionInfo, TensorSpec

if TYPE_CHECKING:
    # Importing this package must not import torch: that is for open_port() to do, off the loop.
    from asyncvmm._tensors.plan import Plan, Tensor

__all__ = ["DevicePort", "HandleType", "check_device", "check_handle_type", "open_port", "preload"]

HandleType = Literal["auto", "fabric", "posix"]


class DevicePort(Protocol):
    """One kind of memory on one device, as both shells use it."""

    kind: Literal["host", "cuda"]
    device: str
    copy_threads: int
    """How many slow copies may run at once."""

    def plan_tensors(self, features: Mapping[str, Tensor]) -> Plan:
        """Describe and lay out tensors to be copied in; refuse what cannot be shared."""

    def plan_specs(self, specs: Mapping[str, TensorSpec]) -> Plan:
        """Describe and lay out features that the caller will write in place."""

    def create(
        self,
        pool_bytes: int,
        max_pool_bytes: int,
        slots: int,
        *,
        writable: bool,
        handle_type: HandleType,
    ) -> ExporterRegion:
        """Make an exporter's pool.  Slow."""

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        """Prepare a consumer's side of a pool; segments are mapped later."""

    def current_stream(self) -> int:
        """Return the stream that the caller's work goes to now; 0 for host memory."""

    def stream_of(self, stream: object) -> int:
        """Return the number of a stream given as a torch stream, a number, or None (current)."""

    def lasting(self, stream: int) -> bool:
        """Say whether a stream's number can never come to mean another one."""

    def to_host(self, tensor: Tensor, stream: int) -> Tensor:
        """Return a contiguous copy in host memory, made after the work on ``stream``.  Slow."""

    def to_device(self, value: object, stream: int) -> object:
        """Return a tensor as one on this port's device; what is no tensor as it is.  Slow."""

    def using(self, stream: int) -> AbstractContextManager[object]:
        """Make a stream the current one of this thread."""

    def copies_slowly(self, plan: Plan) -> bool:
        """Say whether copying the plan in would keep the loop too long."""

    def copy_all_slowly(self, plans: Sequence[Plan]) -> bool:
        """Say the same of several plans together."""

    def copy_in(self, address: int, plan: Plan, stream: int) -> None:
        """Copy (or queue on ``stream`` the copy of) every feature to its place."""

    def copy_all(self, plans: Sequence[tuple[int, Plan]], stream: int) -> None:
        """Do the same for several plans, each with its address, in as few launches as may be."""

    def holder(self, address: int, nbytes: int, keepalive: object) -> object:
        """Return an object that is alive while any view of these bytes is."""

    def view(self, holder: object, offset: int, feature: Feature) -> Tensor:
        """Return the feature as a tensor without copying; it keeps ``holder`` alive."""

    def clone(self, holder: object, nbytes: int, features: Sequence[Feature]) -> dict[str, Tensor]:
        """Copy the whole owner in one copy; the features are views of the copy."""

    def copies_out_slowly(self, nbytes: int) -> bool:
        """Say whether cloning an owner of this size would keep the loop too long."""


def preload(device: str) -> None:
    """Import what a device will need.  Slow: importing torch takes seconds."""
    check_device(device)
    import torch

    if device != "cpu" and torch.cuda.is_available():
        from asyncvmm._backends import driver
        from asyncvmm._tensors import cuda as cuda

        with suppress(ImportError):  # told by whoever needs them
            driver.import_bindings()
    if not device.startswith("cuda"):
        from asyncvmm._tensors import host as host


def check_device(device: object) -> None:
    """Refuse what names no device, without looking whether it is there."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ArgumentError(f"device={device!r} is unknown; give 'cpu', 'cuda:N' or 'auto'")


def check_handle_type(handle_type: object) -> None:
    """Refuse what names no way to share memory."""
    if handle_type not in ("auto", "fabric", "posix"):
        raise ArgumentError(
            f"handle_type={handle_type!r} is unknown; give 'auto', 'fabric' or 'posix'"
        )


def open_port(device: str, *, kind: str = "any") -> DevicePort:
    """Load torch and the backend for a device.  Slow: importing torch takes seconds.

    ``device`` is "cpu", "cuda:N", "cuda" (the current one) or "auto".  ``kind`` is what the other
    end has ("host", "cuda", or "any"); "auto" follows it, else takes a GPU if there is one.
    """
    check_device(device)
    import torch

    if device == "auto":
        available = kind == "cuda" or (kind == "any" and torch.cuda.is_available())
        device = "cuda" if available else "cpu"
    if device == "cpu":
        from asyncvmm._tensors.host import HostPort

        return HostPort()
    if not torch.cuda.is_available():
        raise BackendError(
            f"device={device!r} was asked for, but torch {torch.__version__} sees no CUDA device "
            f"here; use device='cpu', or run `asyncvmm doctor` to see what is missing",
            call="torch.cuda.is_available",
            code="no_device",
        )
    from asyncvmm._tensors.cuda import CudaPort

    return CudaPort(device)
