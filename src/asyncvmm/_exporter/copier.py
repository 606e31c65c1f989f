"""Copies that are too long for the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from asyncvmm._exporter.draining import Draining
from asyncvmm._io.threads import begin, in_thread
from asyncvmm._tensors import DevicePort

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Plan


class Copier:
    """Copies in worker threads, so that the loop goes on (inv. 10).  Starts none before the first.

    A copy whose sender is cancelled runs on: it is a fence of its slot until it ends (inv. 4).
    """

    def __init__(self, port: DevicePort, draining: Draining) -> None:
        self._port = port
        self._draining = draining
        self._executor: ThreadPoolExecutor | None = None

    async def copy(self, slot: int, address: int, plan: Plan, stream: int) -> None:
        """Copy a plan's tensors to ``address``; raises what the copy raised."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._port.copy_threads, "asyncvmm-copy")
        copy = begin(partial(self._port.copy_in, address, plan, stream), self._executor)
        self._draining.copying[slot] = copy
        try:
            await asyncio.shield(copy)
        finally:
            if copy.done():
                del self._draining.copying[slot]

    async def close(self) -> None:
        """Wait for the copies that run."""
        if self._executor is not None:
            await in_thread(self._executor.shutdown)
