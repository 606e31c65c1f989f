"""The CUDA regions under the whole library, with host tensors laid over the stand-in's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from asyncvmm._backends.base import ConsumerRegion, ExporterRegion
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._tensors.host import HostPort
from asyncvmm._types import RegionInfo

EXPORTS, READS = 0x1000, 0x2000
"""A stream for each side: two ends in one process must not share one."""


class StandinPort(HostPort):
    """GPU memory of the stand-in driver (a ``DevicePort``); ``stream`` is the current stream.

    Copies are the host's and over at once: only events are ordered by streams.
    """

    kind: Literal["host", "cuda"] = "cuda"
    device = "cuda:0"

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def create(
        self,
        pool_bytes: int,
        max_pool_bytes: int,
        slots: int,
        *,
        writable: bool,
        handle_type: Literal["auto", "fabric", "posix"],  # type: ignore[override]  # as CudaPort
    ) -> ExporterRegion:
        return CudaExporterRegion.create(
            0, pool_bytes, max_pool_bytes, slots, writable=writable, handle_type=handle_type
        )

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        return CudaConsumerRegion(info, 0)

    def current_stream(self) -> int:
        return self.stream

    @contextmanager
    def using(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def stream_of(self, stream: object) -> int:
        return self.stream if stream is None else int(stream)  # type: ignore[call-overload]  # tests give numbers
