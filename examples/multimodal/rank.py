"""A rank: the language model, on features that the encoder's process made.

Every rank of this example has all the weights. In a server each would have its share of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from multiprocessing.queues import Queue
from typing import Any

import torch

import asyncvmm
from examples.multimodal.model import REQUESTS, answer, device_of, make_model, make_request


async def rank(name: str, device: str, number: int, queue: Queue[Any] | None = None) -> None:
    """Answer every request, and hand the logits on to whoever wants them."""
    device = device_of(device, 1 + number)
    model = make_model(device)
    del model.model.visual  # the encoder's process has it
    async with (
        asyncvmm.open_exporter(f"{name}-logits-{number}", device=device, pool_bytes="8MiB") as out,
        asyncvmm.connect(name, device=device, rank=number, wait=True) as consumer,
    ):
        requests = streamed(consumer) if queue is None else by_ticket(consumer, queue)
        async for key, images in requests:
            logits = answer(model, make_request(key).to(device), images)
            del images  # the last views; without this the next turn would let go of them
            await out.send({"logits": logits}, key=key)


async def streamed(
    consumer: asyncvmm.Consumer,
) -> AsyncIterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Yield requests as they come; the images are views of the encoder's memory."""
    async for batch in consumer:
        for owner in batch:
            with owner:
                yield int(owner.key), tuple(owner[name] for name in owner)


async def by_ticket(
    consumer: asyncvmm.Consumer, queue: Queue[Any]
) -> AsyncIterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Yield requests as their tickets come; the images are this process's own copy."""
    for key in range(REQUESTS):
        tickets = await asyncio.to_thread(queue.get)
        yield key, tuple([await consumer.reconstruct(ticket) for ticket in tickets])
