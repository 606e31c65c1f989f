"""Hand the features of a vision encoder to every rank of a language model.

    python examples/encoder_to_llm.py          # on a GPU if there is one, else in host memory

The encoder's process owns the pool. Each rank is a process of its own and reads the features where
they lie. Features are written straight into the pool, so no payload byte is copied on the way.
"""

from __future__ import annotations

import asyncio
import os
import sys

import torch

import asyncvmm

RANKS = 2
REQUESTS = 24
WIDTH = 128
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


async def encoder_side(name: str) -> None:
    """Encode requests, and let each go as soon as all ranks are done with it."""
    encoder = torch.nn.Linear(48, WIDTH, device=DEVICE).requires_grad_(False)
    async with (
        asyncvmm.open_exporter(
            name, device=DEVICE, pool_bytes="4MiB", slots=8, route=asyncvmm.Broadcast(RANKS)
        ) as exporter,
        asyncio.TaskGroup() as acknowledgements,
    ):
        await exporter.wait_attached(RANKS)  # they load torch first; until then the pool would fill
        for request in range(REQUESTS):
            pixels = torch.randn(64 + 8 * request, 48, device=DEVICE)
            spec = asyncvmm.TensorSpec((len(pixels), WIDTH), torch.float32)
            async with exporter.reserve({"image_0": spec}, key=f"request-{request}") as owner:
                torch.addmm(encoder.bias, pixels, encoder.weight.t(), out=owner["image_0"])
                acknowledgement = owner.publish()
            acknowledgements.create_task(settled(acknowledgement, request))


async def settled(acknowledgement: asyncvmm.Acknowledgement, request: int) -> None:
    """Say so if a rank went away before it was done; the other ranks and requests go on."""
    try:
        await acknowledgement
    except asyncvmm.DeliveryError as error:
        print(f"request-{request}: {error}", file=sys.stderr)


async def llm_rank(name: str, rank: int) -> None:
    """Do one rank's share of the language model: its slice of the columns."""
    share = WIDTH // RANKS
    tokens = 0
    async with asyncvmm.connect(name, device=DEVICE, rank=rank, wait=True) as consumer:
        async for batch in consumer:
            for owner in batch:
                with owner:
                    hidden = owner["image_0"]  # a view of the encoder's memory
                    mine = hidden[:, rank * share : (rank + 1) * share].float() * 2
                    tokens += len(hidden)
                    del hidden  # the last view; without this the next turn would let go of it
                if not bool(mine.isfinite().all()):
                    raise SystemExit(f"rank {rank}: {owner.key} is not finite")
    print(f"rank {rank}: {tokens} tokens of {REQUESTS} requests")


async def main() -> None:
    """Start the ranks as processes and be the encoder."""
    name = f"encoder-{os.getpid()}"
    ranks = [
        await asyncio.create_subprocess_exec(sys.executable, __file__, "rank", name, str(rank))
        for rank in range(RANKS)
    ]
    await encoder_side(name)
    for process in ranks:
        await process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        asyncio.run(llm_rank(sys.argv[2], int(sys.argv[3])))
    else:
        asyncio.run(main())
