"""Waiting for what a consumer's link says: a goodbye, a loss, the segments of a pool."""

from __future__ import annotations

import asyncio

from asyncvmm._consumer.leases import Leases
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import AsyncVMMError
from asyncvmm._io.link import Link
from asyncvmm._io.liveness import DeathWatch
from asyncvmm._io.waiting import wake, woken


class News:
    """The part of a consumer that wakes those who wait for such news."""

    _core: ConsumerCore
    _loop: asyncio.AbstractEventLoop
    _lost: AsyncVMMError | None
    _link: Link
    _watch: DeathWatch | None
    _leases: Leases

    def __init__(self) -> None:
        self._told: list[asyncio.Future[None]] = []

    def _tell(self) -> None:
        wake(self._told)

    async def _heard(self) -> None:
        await woken(self._told)

    async def _until(self, segments: int | None = None) -> None:
        """Wait for the exporter's goodbye, its loss, or a number of mapped segments."""
        while self._lost is None and not self._core.ended:
            if segments is not None and self._core.segment_count >= segments:
                return
            if self._core.state is PeerState.CLOSED:
                return
            await self._heard()

    async def _until_hung_up(self) -> None:
        """Wait for the end of the link."""
        while not self._link.closed:
            await self._heard()

    async def _until_nothing_held(self) -> None:
        """Wait until every owner is back, or nobody can be told any more."""
        while self._leases.live and not self._link.closed:
            await self._heard()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def _idle(self) -> bool:
        """True once nothing comes any more and nothing is held."""
        over = self._link.closed and not self._core.resumable
        return over and not self._core.inbox and not self._leases.live
