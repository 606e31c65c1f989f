"""The exporter's side: encode each request, send it as one owner, and note what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import asyncvmm
from asyncvmm.cli.demo import images, model
from asyncvmm.cli.demo.plan import Plan
from asyncvmm.cli.demo.ranks import RankProcess, no_rank_left_behind

HEARTBEAT = 0.005
"""Seconds.  Loops have timers of 1 ms; much finer beats would only measure that."""


@dataclass(slots=True)
class Streamed:
    """What one run noted.  Times are seconds."""

    results: list[list[tuple[str, str]]] = field(default_factory=list)
    """Key and digest of each request, by rank."""
    payload_bytes: int = 0
    handoffs: list[float] = field(default_factory=list)
    """From the call of ``send`` to the acknowledgement, one of each request."""
    loop_gaps: list[float] = field(default_factory=list)
    wall: float = 0.0
    statistics: asyncvmm.PoolStatistics | None = None
    """As they were when every acknowledgement had come and the exporter was still open."""


class Streamer:
    """Drives one run; ``progress`` is called once per acknowledged request."""

    def __init__(
        self,
        plan: Plan,
        source: images.Images,
        encoder: model.Encoder,
        progress: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._source = source
        self._encoder = encoder
        self._progress = progress
        self._streamed = Streamed()

    async def run(self) -> Streamed:
        """Stream every request to the ranks; all processes have ended when it returns."""
        plan, streamed = self._plan, self._streamed
        route = asyncvmm.Compete() if plan.route == "compete" else asyncvmm.Broadcast(plan.ranks)
        async with (
            no_rank_left_behind() as ranks,
            asyncio.TaskGroup() as watchers,
            asyncvmm.open_exporter(
                plan.name,
                device=plan.device,
                pool_bytes=plan.pool_bytes,
                max_pool_bytes=plan.pool_bytes,
                slots=plan.slots,
                route=route,
                trace=plan.trace,
            ) as exporter,
        ):
            for rank in range(plan.ranks):
                ranks.append(await RankProcess.start(plan, rank))
                watchers.create_task(ranks[-1].watch())
            await exporter.wait_attached(plan.ranks)  # so that starting them is not measured
            await self._stream(exporter)
            streamed.statistics = exporter.statistics()
        streamed.results = [process.results for process in ranks]
        return streamed

    async def _stream(self, exporter: asyncvmm.Exporter) -> None:
        heart = asyncio.create_task(self._beat())
        hand_over = self._write_in_place if self._plan.in_place else self._copy_in
        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as acknowledgements:
                for index in range(self._plan.batches):
                    pictures = images.request(self._source, index)
                    called, ack = await hand_over(exporter, f"request-{index}", pictures)
                    acknowledgements.create_task(self._settle(called, ack))
        finally:
            heart.cancel()
        self._streamed.wall = time.perf_counter() - started

    async def _copy_in(
        self, exporter: asyncvmm.Exporter, key: str, pictures: Sequence[torch.Tensor]
    ) -> tuple[float, asyncvmm.Acknowledgement]:
        """Encode first, then have the features copied into the pool."""
        features = await asyncio.to_thread(encode, self._encoder, pictures)
        self._streamed.payload_bytes += sum(feature.nbytes for feature in features.values())
        called = time.perf_counter()
        return called, await exporter.send(features, key=key)

    async def _write_in_place(
        self, exporter: asyncvmm.Exporter, key: str, pictures: Sequence[torch.Tensor]
    ) -> tuple[float, asyncvmm.Acknowledgement]:
        """Reserve the room first and have the encoder write there: nothing is copied."""
        specs = {
            f"image_{number}": asyncvmm.TensorSpec(
                (images.patches(picture), model.WIDTH), torch.float32
            )
            for number, picture in enumerate(pictures)
        }
        specs["grid"] = asyncvmm.TensorSpec((len(pictures), 2), torch.int64)
        async with exporter.reserve(specs, key=key) as owner:
            room = {name: owner[name] for name in specs}
            self._streamed.payload_bytes += sum(feature.nbytes for feature in room.values())
            await asyncio.to_thread(encode, self._encoder, pictures, room)
            called = time.perf_counter()
            return called, owner.publish()

    async def _settle(self, called: float, acknowledgement: asyncvmm.Acknowledgement) -> None:
        await acknowledgement
        self._streamed.handoffs.append(time.perf_counter() - called)
        self._progress()

    async def _beat(self) -> None:
        """Note how much later than asked the loop comes back: what others would have to wait."""
        while True:
            due = time.perf_counter() + HEARTBEAT
            await asyncio.sleep(HEARTBEAT)
            self._streamed.loop_gaps.append(max(0.0, time.perf_counter() - due))


def encode(
    encoder: model.Encoder,
    pictures: Sequence[torch.Tensor],
    out: Mapping[str, torch.Tensor] | None = None,
) -> Mapping[str, torch.Tensor]:
    """Return the features of one request by name, written into those of ``out`` if given."""
    with torch.inference_mode():
        grid = images.grid_of(pictures)
        if out is not None:
            for number, picture in enumerate(pictures):
                encoder(picture, out=out[f"image_{number}"])
            out["grid"].copy_(grid)
            return out
        features = {f"image_{number}": encoder(picture) for number, picture in enumerate(pictures)}
        return {**features, "grid": grid}
