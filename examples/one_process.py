"""Both ends in one process, on a machine without a GPU.

    python examples/one_process.py

An exporter sends four steps of two owners each; a consumer adds them up. It is the smallest
complete program, and a way to try the library in a notebook: nothing here needs a second process.
"""

from __future__ import annotations

import asyncio
import os

import torch

import asyncvmm

NAME = f"one-process-{os.getpid()}"
STEPS = 4


async def produce() -> None:
    """Send every step, and wait until each owner was let go of."""
    async with asyncvmm.open_exporter(
        NAME, device="cpu", pool_bytes="1MiB", slots=4, route=asyncvmm.Broadcast(1)
    ) as exporter:
        for step in range(STEPS):
            left = await exporter.send({"x": torch.full((1000,), float(step))}, key="left")
            right = await exporter.send({"x": torch.full((1000,), -2.0 * step)}, key="right")
        await left
        await right


async def consume() -> float:
    """Add up everything that arrives; the loop ends when the exporter says goodbye."""
    total = 0.0
    async with asyncvmm.connect(NAME, device="cpu", rank=0, wait=True) as consumer:
        async for batch in consumer:
            for owner in batch:
                with owner:  # lets go of it at the end of the block
                    total += owner["x"].sum().item()
    return total


async def main() -> None:
    """Run both ends side by side."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        consumer = tasks.create_task(consume())
    print(f"sum of everything sent: {consumer.result():.0f}")


if __name__ == "__main__":
    asyncio.run(main())
