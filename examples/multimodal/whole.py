"""The same model in one process, which compares: the ranks' logits must be the same bits."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

import asyncvmm
from examples.multimodal.model import answer_whole, device_of, make_model, make_request


async def whole(name: str, device: str, ranks: int) -> None:
    """Answer every request, and compare with what each rank answered."""
    device = device_of(device, 0)
    model = make_model(device)
    await asyncio.gather(*(compare(model, name, device, rank) for rank in range(ranks)))


async def compare(model: Any, name: str, device: str, rank: int) -> None:
    """Compare one rank's logits; raises if any differs."""
    requests = tokens = 0
    async with asyncvmm.connect(
        f"{name}-logits-{rank}", device=device, rank=0, wait=True
    ) as consumer:
        async for batch in consumer:
            for owner in batch:
                with owner:
                    expected = answer_whole(model, make_request(int(owner.key)).to(device))
                    if not torch.equal(owner["logits"], expected):
                        raise SystemExit(f"rank {rank}: logits of request {owner.key} differ")
                    requests += 1
                    tokens += expected.shape[1]
    print(f"rank {rank}: {requests} requests, the logits of {tokens} tokens are equal")
