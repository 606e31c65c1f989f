"""torch.multiprocessing: shared memory for CPU tensors, CUDA IPC for those on a GPU.

It has no asyncio form, and its queues block; it runs without an event loop and its hand-offs
cost no thread, which is the best that can be made of it.  ``SimpleQueue`` is used, for ``Queue``
adds a feeder thread.  The file-descriptor strategy is torch's default on Linux.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.contents import CHECKED
from benchmarks.setting import Setting
from benchmarks.transports.base import Consumer, Producer, Take, Transport


@dataclass
class Queues:
    """One queue to each consumer (or one to all who compete), one back."""

    out: list[Any]
    back: Any


class TorchProducer(Producer):
    """Copies the features into new shared tensors and puts them; keeps them until they are back."""

    shared: Queues

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: dict[int, Any] = {}
        self._owed: dict[int, int] = {}

    async def __aexit__(self, *exc: object) -> None:
        for index in range(self.setting.consumers):
            self.shared.out[index % len(self.shared.out)].put(None)

    async def ready(self) -> None:
        for _ in range(self.setting.consumers):
            self.shared.back.get()

    def _tensors(self, number: int) -> list[torch.Tensor]:
        if self.setting.on_gpu:
            return [feature.clone() for feature in self.contents.features(number)]
        return [_shared_copy(feature) for feature in self.contents.features(number)]

    async def hand_over(self, number: int) -> Any:
        tensors = self._tensors(number)
        self._kept[number] = tensors
        self._owed[number] = len(self.shared.out)
        for queue in self.shared.out:
            queue.put((number, tensors))
        return number

    async def settled(self, ticket: Any) -> None:
        while ticket in self._owed:
            self._hear()

    def _hear(self) -> None:
        number = self.shared.back.get()
        self._owed[number] -= 1
        if not self._owed[number]:
            del self._owed[number]
            self._free(number)

    def _free(self, number: int) -> None:
        del self._kept[number]


class ReusingProducer(TorchProducer):
    """Puts tensors that were shared before, without a copy: a hand-made pool."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        depth = self.setting.depth
        self._pool = [super(ReusingProducer, self)._tensors(0) for _ in range(depth)]

    def _tensors(self, number: int) -> list[torch.Tensor]:
        while not self._pool:
            self._hear()
        tensors = self._pool.pop()
        if number & CHECKED:
            for tensor, feature in zip(tensors, self.contents.features(number), strict=True):
                tensor.copy_(feature)
        return tensors

    def _free(self, number: int) -> None:
        self._pool.append(self._kept.pop(number))


def _shared_copy(feature: torch.Tensor) -> torch.Tensor:
    """Copy once, straight into shared memory."""
    storage = torch.UntypedStorage._new_shared(feature.nbytes)
    return torch.empty(0, dtype=feature.dtype).set_(storage).copy_(feature)


class TorchConsumer(Consumer):
    """Rebuilds the tensors from their handles, drops them, answers.

    Dropping a CUDA tensor synchronises its stream in torch, so the answer says that reads are
    over.
    """

    shared: Queues

    async def consume(self, take: Take) -> None:
        queue = self.shared.out[self.index % len(self.shared.out)]
        back = self.shared.back
        back.put(-1)
        while (message := queue.get()) is not None:
            number, tensors = message
            take(number, tensors)
            del message, tensors
            back.put(number)


class TorchMP(Transport):
    """``torch.multiprocessing.SimpleQueue`` with a copy into a new shared tensor each time."""

    name = "torch_mp"
    about = "one copy into new shared memory (a clone on a GPU), handles by a queue; blocking"
    producer = TorchProducer
    consumer = TorchConsumer
    uses_loop = False
    devices = ("cpu", "cuda")

    @classmethod
    def share(cls, setting: Setting) -> Any:
        context = multiprocessing.get_context("forkserver")
        queues = torch.multiprocessing.get_context("forkserver")
        count = 1 if setting.compete else setting.consumers
        return Queues([queues.SimpleQueue() for _ in range(count)], context.SimpleQueue())


class TorchMPReused(TorchMP):
    """The same without the copy: tensors that were shared before are put again."""

    name = "torch_mp_reused"
    about = "no copy (a ring of tensors shared before), handles by a queue; blocking"
    producer = ReusingProducer
