"""This library."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import torch

import asyncvmm
import asyncvmm._consumer.opening
import asyncvmm._exporter.opening
from asyncvmm._tensors import preload
from benchmarks.contents import CHECKED
from benchmarks.setting import Setting
from benchmarks.transports.base import Consumer, Producer, Take, Transport

preload("auto")  # and the two above: imported where first used, and no part of connecting

_ALIGNMENT = 256


def _name(setting: Setting) -> str:
    return str(setting.folder / "exporter")


class SendProducer(Producer):
    """Each hand-off is one ``send``: a slot, one copy into the pool, one message."""

    exporter: asyncvmm.Exporter

    async def __aenter__(self) -> Self:
        setting = self.setting
        feature = -(-setting.payload.nbytes // _ALIGNMENT) * _ALIGNMENT
        route: asyncvmm.Broadcast | asyncvmm.Compete = (
            asyncvmm.Compete() if setting.compete else asyncvmm.Broadcast(setting.consumers)
        )
        async with AsyncExitStack() as stack:
            self.exporter = await stack.enter_async_context(
                asyncvmm.open_exporter(
                    _name(setting),
                    device=setting.device,
                    pool_bytes=feature * setting.payload.count * setting.depth,
                    slots=setting.depth,
                    route=route,
                )
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def ready(self) -> None:
        await self.exporter.wait_attached(self.setting.consumers)

    async def hand_over(self, number: int) -> Any:
        return await self.exporter.send(self.contents.mapping(number), key=number)

    async def settled(self, ticket: Any) -> None:
        await ticket

    def facts(self) -> dict[str, Any]:
        statistics = self.exporter.statistics()
        self.fallbacks = statistics.fallbacks
        return {
            "waits": statistics.waits,
            "high_water_bytes": statistics.high_water,
            "copied_bytes": statistics.copied_bytes,
            "refused": statistics.refused,
            "lost": statistics.lost,
        }


class SendAllProducer(SendProducer):
    """Hand-offs by ``send_all``: 16 features, or one owner, in a batch.

    As many as one packet takes of owners with one feature when they are sent one by one.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.together = max(1, 16 // self.setting.payload.count)

    async def hand_over_all(self, numbers: Sequence[int]) -> Sequence[Any]:
        mapping = self.contents.mapping
        return await self.exporter.send_all([mapping(number) for number in numbers], keys=numbers)


class ReserveProducer(SendProducer):
    """Each hand-off is one ``reserve`` and ``publish``; only checked ones are written."""

    fills = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        payload = self.setting.payload
        spec = asyncvmm.TensorSpec((payload.nbytes,), torch.uint8)
        self._specs = dict.fromkeys(self.contents.names, spec)

    async def hand_over(self, number: int) -> Any:
        async with self.exporter.reserve(self._specs, key=number) as owner:
            if self.fills or number & CHECKED:
                for name, feature in self.contents.mapping(number).items():
                    owner[name].copy_(feature)
            return owner.publish()


class FillingProducer(ReserveProducer):
    """The same, with the payload written into the pool by ``copy_`` every time."""

    fills = True


class ViewingConsumer(Consumer):
    """Makes a view of every feature and releases the owner."""

    async def __aenter__(self) -> Self:
        setting = self.setting
        async with AsyncExitStack() as stack:
            self._consumer = await stack.enter_async_context(
                asyncvmm.connect(
                    _name(setting),
                    device=setting.consumer_device,
                    rank=None if setting.compete else self.index,
                    wait=True,
                )
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def consume(self, take: Take) -> None:
        names = [f"x{index}" for index in range(self.setting.payload.count)]
        async for batch in self._consumer:
            for owner in batch:
                number = owner.key
                assert isinstance(number, int)
                take(number, [owner[name] for name in names])
                owner.release()


class BatchingConsumer(ViewingConsumer):
    """Makes a view of every feature and releases each batch as a whole."""

    async def consume(self, take: Take) -> None:
        names = [f"x{index}" for index in range(self.setting.payload.count)]
        async for batch in self._consumer:
            with batch:
                for owner in batch:
                    number = owner.key
                    assert isinstance(number, int)
                    take(number, [owner[name] for name in names])


class Send(Transport):
    """``Exporter.send``."""

    name = "asyncvmm"
    about = "one copy into the pool, one message each way, views; on the loop"
    producer = SendProducer
    consumer = ViewingConsumer
    devices = ("cpu", "cuda")
    kinds = ("flow", "fanout", "bursts", "reuse", "connect", "allocator")


class SendAll(Transport):
    """``Exporter.send_all``: several owners that became ready together."""

    name = "asyncvmm_send_all"
    about = "as asyncvmm, up to 16 hand-offs in one batch, released as one"
    producer = SendAllProducer
    consumer = BatchingConsumer
    devices = ("cpu", "cuda")


class Reserve(Transport):
    """``Exporter.reserve`` without writing: what is handed over was computed in place."""

    name = "asyncvmm_reserve"
    about = "no copy (written in place), one message each way, views; on the loop"
    producer = ReserveProducer
    consumer = ViewingConsumer
    devices = ("cpu", "cuda")


class ReserveFilled(Transport):
    """``Exporter.reserve``, and the payload copied into the reserved memory."""

    name = "asyncvmm_reserve_filled"
    about = "as asyncvmm_reserve, with the producer's writing counted"
    producer = FillingProducer
    consumer = ViewingConsumer
    devices = ("cpu", "cuda")
