"""One rank: a process that attaches, runs its block on the views, and tells what came out.

Started as ``python -m asyncvmm.cli.demo.rank_side ORDER``.  It needs no watch over whoever started
it: without an exporter it cannot attach, and when the exporter dies iteration raises.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

import asyncvmm
from asyncvmm.cli import loops
from asyncvmm.cli.demo.plan import RankOrder, RankRecord

if TYPE_CHECKING:
    from asyncvmm.cli.demo import model


def main() -> int:
    """Do what the order on the command line says; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    order = msgspec.json.decode(sys.argv[1], type=RankOrder)
    try:
        loops.run(work(order), order.loop)
    except asyncvmm.AsyncVMMError as error:
        tell(RankRecord(error=f"{type(error).__name__}: {error}"))
        return 1
    tell(RankRecord(finished=True))
    return 0


def tell(record: RankRecord) -> None:
    """Write one record; whoever started this process reads all the time."""
    os.write(1, msgspec.json.encode(record) + b"\n")


async def work(order: RankOrder) -> None:
    """Attach, and run the rank's block on every owner that comes."""
    from asyncvmm.cli.demo import model

    model.use_one_thread()
    shard = model.build_rank(order.device, order.shard)
    await asyncio.to_thread(model.warm_up, shard)
    async with asyncvmm.connect(
        order.name,
        device=order.device,
        rank=None if order.compete else order.rank,
        member=f"rank-{order.rank}" if order.compete else None,
        trace=order.trace,
    ) as consumer:
        async for batch in consumer:
            async with batch:
                for owner in batch:
                    with owner:
                        result = await asyncio.to_thread(_run, shard, owner)
                    tell(RankRecord(key=str(owner.key), digest=result))


def _run(shard: model.Rank, owner: asyncvmm.Owner) -> str:
    import torch

    from asyncvmm.cli.demo import model

    with torch.inference_mode():
        grid = owner["grid"]
        features = [owner[f"image_{index}"] for index in range(len(grid))]
        return model.digest(shard(features, grid))


if __name__ == "__main__":
    sys.exit(main())
