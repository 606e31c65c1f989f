"""The encoder's process: the vision tower, and the pool that its features lie in."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.queues import Queue
from typing import Any

import asyncvmm
from examples.multimodal.model import REQUESTS, device_of, encode, make_model, make_request


async def encoder(name: str, device: str, ranks: int, queues: Sequence[Queue[Any]]) -> None:
    """Encode every request.  The features of its images are one owner: they come and go together.

    They are streamed to the ranks, or exported where there is a queue for each rank: a queue then
    carries the tickets, as whatever brings the requests to the ranks would.
    """
    device = device_of(device, 0)
    model = make_model(device)
    del model.model.language_model, model.lm_head  # the ranks have these
    acknowledgements = []
    async with asyncvmm.open_exporter(
        name, device=device, pool_bytes="8MiB", slots=8, route=asyncvmm.Broadcast(ranks)
    ) as exporter:
        for number in range(REQUESTS):
            images = encode(model, make_request(number).to(device))
            features = {f"image_{index}": image for index, image in enumerate(images)}
            if queues:
                tickets = await exporter.export(features, key=number)
                acknowledgements.append(tickets.acknowledgement)
                for queue in queues:
                    queue.put(list(tickets.values()))
            else:
                acknowledgements.append(await exporter.send(features, key=number))
        for acknowledgement in acknowledgements:
            await acknowledgement  # raises if a rank did not take it
        print(f"encoder: {REQUESTS} requests on {exporter.statistics().device}")
