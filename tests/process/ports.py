"""Host memory that stands still, or fails, where a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from asyncvmm._backends.base import ConsumerRegion, ExporterRegion
from asyncvmm._backends.memfd import HostConsumerRegion
from asyncvmm._errors import BackendError
from asyncvmm._fds import OwnedFd
from asyncvmm._tensors.host import HostPort
from asyncvmm._tensors.plan import Layout, Plan
from asyncvmm._types import RegionInfo, SegmentInfo

Before: TypeAlias = Callable[[str], None]


class _Wrapped:
    """A region that calls ``before`` ahead of each of its methods."""

    def __init__(self, region: Any, before: Before) -> None:
        self._region = region
        self._before = before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._region, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(name)
            return found(*args, **kwargs)

        return call


class WatchedPort(HostPort):
    """Host memory that tells of every call on its way to the pool."""

    def __init__(self, before: Before) -> None:
        self._before = before

    def create(self, *args: Any, **kwargs: Any) -> ExporterRegion:
        """Make an exporter's pool whose calls are told of."""
        self._before("create")
        region: Any = _Wrapped(super().create(*args, **kwargs), self._before)
        return region  # type: ignore[no-any-return]  # it quacks

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        """Make a consumer's side whose calls are told of."""
        self._before("attach")
        region: Any = _Wrapped(super().attach(info), self._before)
        return region  # type: ignore[no-any-return]  # it quacks


class PausingPort(WatchedPort):
    """Host memory that stands still ahead of the calls named in ``points``."""

    def __init__(self, block: Callable[[str], None], points: Sequence[str]) -> None:
        def before(name: str) -> None:
            if name in points:
                block(name)

        super().__init__(before)


class _Unmappable(HostConsumerRegion):
    """A consumer's side that cannot map some segments."""

    bad: Sequence[int] = ()

    def map(self, segment: SegmentInfo, handle: OwnedFd | bytes) -> None:
        if segment.index in self.bad and isinstance(handle, OwnedFd):
            handle.close()
            raise BackendError("there is no room for it", call="mmap", code="ENOMEM")
        super().map(segment, handle)


class UnmappablePort(HostPort):
    """Host memory of which the segments named in ``bad`` cannot be mapped."""

    def __init__(self, bad: Sequence[int]) -> None:
        self._bad = bad

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        """Make a consumer's side that fails."""
        region = _Unmappable(info)
        region.bad = self._bad
        return region


class UncopiablePort(HostPort):
    """Host memory into which the feature called "bad" cannot be copied, on or off the loop."""

    def __init__(self, *, slowly: bool) -> None:
        self._slowly = slowly

    def copies_slowly(self, plan: Plan) -> bool:
        """Say what the test wants."""
        return self._slowly

    def copy_in(self, address: int, plan: Plan, stream: int) -> None:
        """Copy what comes before the bad one, then fail."""
        layout = plan.layout
        at = layout.numbers["bad"]
        good = Layout(layout.features[:at], layout.sizes[:at], layout.device)
        super().copy_in(address, Plan(good, good.nbytes, plan.tensors[:at]), stream)
        raise BackendError("the copy failed half-way", call="memcpy", code="EIO")
