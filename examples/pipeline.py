"""A stage of a pipeline: one source, and workers that take whatever comes next.

    python examples/pipeline.py            # a source and two workers
    python examples/pipeline.py 4 200      # four workers, 200 frames

Each frame goes to exactly one worker: the freest. The source holds no more frames than fit its
pool, however slow the workers are. A worker that is killed gives its unbegun frames to the others.
"""

from __future__ import annotations

import asyncio
import os
import sys

import torch

import asyncvmm

SIDE = 256


async def source(workers: int, frames: int) -> None:
    """Send frames to whoever is free, and report where they went."""
    name = f"pipeline-{os.getpid()}"
    async with asyncvmm.open_exporter(
        name, device="cpu", pool_bytes="2MiB", slots=8, route=asyncvmm.Compete()
    ) as exporter:
        started = [
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, "worker", name, f"worker-{index}"
            )
            for index in range(workers)
        ]
        await exporter.wait_attached(workers)  # only so that all get a share of so few frames
        acknowledgements = []
        for number in range(frames):
            frame = torch.full((3, SIDE, SIDE), number % 256, dtype=torch.uint8)
            acknowledgements.append(await exporter.send({"pixels": frame}, key=number))
        for acknowledgement in acknowledgements:
            await acknowledgement
        waits = exporter.statistics().waits
    for process in started:  # the exporter has said goodbye, so they end by themselves
        await process.wait()
    print(f"source: {frames} frames delivered, the source had to wait {waits} times")


async def worker(name: str, own_name: str) -> None:
    """Work on frames until the source has no more."""
    done = 0
    async with asyncvmm.connect(name, device="cpu", member=own_name) as consumer:
        async for batch in consumer:
            for owner in batch:
                with owner:
                    brightness = owner["pixels"].float().mean().item()
                if round(brightness) != int(owner.key) % 256:
                    raise SystemExit(f"{own_name}: frame {owner.key} has brightness {brightness}")
                done += 1
    print(f"{own_name}: {done} frames")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", name, own_name]:
            asyncio.run(worker(name, own_name))
        case []:
            asyncio.run(source(workers=2, frames=100))
        case [workers, frames]:
            asyncio.run(source(int(workers), int(frames)))
        case _:
            raise SystemExit(__doc__)
