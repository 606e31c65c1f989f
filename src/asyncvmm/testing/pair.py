"""Both ends in one process and one event loop."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from asyncvmm._consumer.consumer import Consumer
from asyncvmm._consumer.opening import connect
from asyncvmm._exporter.exporter import Exporter
from asyncvmm._exporter.opening import open_exporter
from asyncvmm._tensors import DevicePort
from asyncvmm._types import Broadcast, Route

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Pair:
    """An exporter and its consumers, in one event loop."""

    exporter: Exporter
    consumers: tuple[Consumer, ...]

    @property
    def consumer(self) -> Consumer:
        """The first consumer."""
        return self.consumers[0]


@asynccontextmanager
async def open_pair(
    *,
    consumers: int = 1,
    route: Route | None = None,
    port: DevicePort | None = None,
    writable: bool = False,
    prefetch: int = 2,
    name: str | None = None,
    **options: Any,
) -> AsyncIterator[Pair]:
    """Open an exporter and connect ``consumers`` of them, all in this process and loop.

    ``route`` is ``Broadcast(consumers)`` unless given.  ``options`` go to ``open_exporter``.
    The memory is host memory, or what ``port`` makes.  The consumers leave first; finish held
    fences before that, for the exporter waits for them.
    """
    route = route or Broadcast(consumers)
    name = name or f"@asyncvmm-pair-{os.getpid()}-{next(_numbers)}"
    options.setdefault("pool_bytes", "1MiB")
    options.setdefault("slots", 16)
    options.setdefault("busy_poll", 0)  # one loop has nobody to turn for
    async with AsyncExitStack() as stack:
        exporter = await stack.enter_async_context(
            open_exporter(name, device="cpu", route=route, writable=writable, _port=port, **options)
        )
        found = [
            await stack.enter_async_context(
                connect(
                    name,
                    device="cpu",
                    rank=rank if isinstance(route, Broadcast) else None,
                    prefetch=prefetch,
                    writable=writable,
                    busy_poll=options["busy_poll"],
                    _port=port,
                )
            )
            for rank in range(consumers)
        ]
        await exporter.wait_attached(consumers)
        yield Pair(exporter, tuple(found))
