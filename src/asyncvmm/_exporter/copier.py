"""Copies that are too long for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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

    async def copy(
        self, slots: Sequence[int], plans: Sequence[tuple[int, Plan]], stream: int
    ) -> None:
        """Copy plans' tensors to their addresses, in these slots; raises what the copy raised."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._port.copy_threads, "asyncvmm-copy")
        copying = self._draining.copying
        copy = begin(partial(self._port.copy_all, plans, stream), self._executor)
        copying.update(dict.fromkeys(slots, copy))
        try:
            await asyncio.shield(copy)
        finally:
            if copy.done():
                for slot in slots:
                    copying.pop(slot, None)

    async def close(self) -> None:
        """Wait for the copies that run."""
        if self._executor is not None:
            await in_thread(self._executor.shutdown)
