"""A plain ``copy_`` into warm memory: what the copy alone costs."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.transports.base import Consumer, Producer, Take, Transport


class CopyingProducer(Producer):
    """Copies into a ring of warm tensors; nobody is told, the consumer's process idles."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        setting = self.setting
        payload = setting.payload
        self._ring = [
            [
                torch.zeros(payload.nbytes, dtype=torch.uint8, device=setting.device)
                for _ in range(payload.count)
            ]
            for _ in range(setting.depth)
        ]

    async def ready(self) -> None:
        """Nobody connects."""

    async def hand_over(self, number: int) -> Any:
        targets = self._ring[number % len(self._ring)]
        for target, source in zip(targets, self.contents.features(number), strict=True):
            target.copy_(source)
        return None

    async def settled(self, ticket: Any) -> None:
        """Host copies are done when they return."""


class IdleConsumer(Consumer):
    """Is handed nothing."""

    async def consume(self, take: Take) -> None:
        """Nothing comes."""


class PlainCopy(Transport):
    """``Tensor.copy_`` in one process."""

    name = "plain_copy"
    about = "Tensor.copy_ into warm memory of the same process; nothing is handed over"
    producer = CopyingProducer
    consumer = IdleConsumer
    uses_loop = False
    kinds = ("flow",)
    delivers = False
    routes = ()
