"""Host memory that stands still, or fails, where a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncvmm._backends.base import ConsumerRegion, ExporterRegion
from asyncvmm._tensors.host import HostPort
from asyncvmm._types import RegionInfo


class _Wrapped:
    """A region that calls ``before`` ahead of each of its methods."""

    def __init__(self, region: Any, before: Callable[[str], None]) -> None:
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

    def __init__(self, before: Callable[[str], None]) -> None:
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
