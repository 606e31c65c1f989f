"""A scheduler that is a plain loop, fed by an encoder that is async.

    python examples/scheduler.py

Every step works on all running requests at once and then polls for new ones; a poll costs the step
nothing while nothing has arrived. Only with nothing to do does the loop wait.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import torch

import asyncvmm
from asyncvmm import blocking

REQUESTS = 12
WIDTH = 64


async def encoder(name: str) -> None:
    """Send the features of every request; each is to be worked on for some steps."""
    async with asyncvmm.open_exporter(name, device="cpu", pool_bytes="1MiB", slots=4) as exporter:
        await exporter.wait_attached(1)
        for request in range(REQUESTS):
            features = {"image": torch.full((100, WIDTH), float(request))}
            # Waits while four requests are running: their features are still needed.
            await exporter.send(features, key=request, metadata={"steps": 1 + request % 3})


def scheduler(name: str) -> None:
    """Run requests until the encoder has said goodbye and the last one is done."""
    running: list[tuple[asyncvmm.Owner, int]] = []
    done = most = 0
    with blocking.connect(name, device="cpu", rank=0, wait=True, timeout=60) as consumer:
        while True:
            try:
                batch = consumer.poll() if running else consumer.receive()
            except asyncvmm.EndOfStream:
                batch = None
                if not running:
                    break
            if batch is not None:
                running += [(owner, steps_of(owner)) for owner in batch]
                most = max(most, len(running))
            for owner, _ in running:
                assert owner["image"].mean().item() == owner.key  # what a model does in a step
            for owner in [owner for owner, left in running if left == 1]:
                owner.release()  # lets the encoder's memory go
                done += 1
            running = [(owner, left - 1) for owner, left in running if left > 1]
    print(f"scheduler: {done} requests done, at most {most} at once")


def steps_of(owner: asyncvmm.Owner) -> int:
    """Return for how many steps a request is to run."""
    metadata = owner.metadata
    assert isinstance(metadata, dict)
    return int(metadata["steps"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["encoder"]:
        asyncio.run(encoder(sys.argv[2]))
    else:
        own_name = f"scheduler-{os.getpid()}"
        with subprocess.Popen([sys.executable, __file__, "encoder", own_name]) as process:
            scheduler(own_name)
        raise SystemExit(process.returncode)
