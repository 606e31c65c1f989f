"""UCXX: two-sided messages over UCX, by its asyncio endpoints."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any, Self

import numpy as np
import torch

from benchmarks.transports.acks import Acks
from benchmarks.transports.base import Consumer, Producer, Take, Transport

if importlib.util.find_spec("ucxx") is None:
    raise ImportError("ucxx is not installed: pip install ucxx-cu13")


def _start() -> Any:
    import ucxx

    ucxx.init(progress_mode="blocking")  # driven by the loop; the other modes spin in a thread
    return ucxx


def _buffer(tensor: torch.Tensor) -> Any:
    return tensor if tensor.is_cuda else tensor.numpy()


class UCXXProducer(Producer):
    """Sends a number and each feature; a task for each consumer hears the answers."""

    async def __aenter__(self) -> Self:
        self._ucxx = _start()
        self._acks = Acks()
        self._ends: list[Any] = []
        self._all = asyncio.Event()
        self._turn = 0
        self._listener = self._ucxx.create_listener(self._connected)
        (self.setting.folder / "port").write_text(str(self._listener.port))
        return self

    async def _connected(self, end: Any) -> None:
        self._ends.append(end)
        if len(self._ends) == self.setting.consumers:
            self._all.set()
        answer = np.zeros(1, dtype=np.uint64)
        while True:
            try:
                await end.recv(answer)
            except Exception:  # whatever UCX calls an end that was closed
                return
            self._acks.heard(int(answer[0]))

    async def __aexit__(self, *exc: object) -> None:
        for end in self._ends:
            await end.send(np.zeros(1, dtype=np.uint64))
        for end in self._ends:
            await end.close()
        self._listener.close()

    async def ready(self) -> None:
        await self._all.wait()

    async def hand_over(self, number: int) -> Any:
        ends = self._ends
        if self.setting.compete:
            self._turn = (self._turn + 1) % len(ends)
            ends = [ends[self._turn]]
        self._acks.expect(number, len(ends))
        head = np.full(1, number + 1, dtype=np.uint64)
        for end in ends:
            await end.send(head)
            for feature in self.contents.features(number):
                await end.send(_buffer(feature))
        return number

    async def settled(self, ticket: Any) -> None:
        await self._acks.wait(ticket)


class UCXXConsumer(Consumer):
    """Receives into memory of its own, which it uses again and again."""

    async def __aenter__(self) -> Self:
        port = int((self.setting.folder / "port").read_text())
        self._end = await _start().create_endpoint("127.0.0.1", port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end.close()

    async def consume(self, take: Take) -> None:
        setting = self.setting
        features = [
            torch.zeros(setting.payload.nbytes, dtype=torch.uint8, device=setting.consumer_device)
            for _ in range(setting.payload.count)
        ]
        head = np.zeros(1, dtype=np.uint64)
        while True:
            await self._end.recv(head)
            number = int(head[0]) - 1
            if number < 0:
                return
            for feature in features:
                await self._end.recv(_buffer(feature))
            take(number, features)
            await self._end.send(np.full(1, number, dtype=np.uint64))


class UCXX(Transport):
    """ucxx's asyncio endpoints."""

    name = "ucxx"
    about = "sent and received by UCX, a message for each feature, an answer back; on the loop"
    producer = UCXXProducer
    consumer = UCXXConsumer
    devices = ("cpu", "cuda")
