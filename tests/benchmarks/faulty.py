"""Transports with a fault each, made of the floor on event loops."""

from __future__ import annotations

import asyncio
import ctypes
import os
from typing import Any

import torch

from benchmarks.transports.base import Take
from benchmarks.transports.floor import FloorLoop, LoopConsumer, LoopProducer
from benchmarks.transports.floor_host import ProducerMemory


class Flipping(ProducerMemory):
    """Changes the last byte of every fifth payload."""

    turns = 0

    def fill(self, slot: int, features: Any) -> None:
        super().fill(slot, features)
        self.turns += 1
        if not self.turns % 5:
            self._targets[slot][-1][-1] ^= 1


class FlippingProducer(LoopProducer):
    def memory(self) -> Any:
        return Flipping(self.setting)


class Corrupting(FloorLoop):
    name = "corrupting"
    producer = FlippingProducer


class Forgetful(ProducerMemory):
    """Copies nothing after the first round of slots: consumers see what was there before."""

    turns = 0

    def fill(self, slot: int, features: Any) -> None:
        self.turns += 1
        if self.turns <= len(self._targets):
            super().fill(slot, features)


class ForgetfulProducer(LoopProducer):
    def memory(self) -> Any:
        return Forgetful(self.setting)


class Stale(FloorLoop):
    name = "stale"
    producer = ForgetfulProducer


class OverlookingConsumer(LoopConsumer):
    """Answers every seventh hand-off without showing it to anybody."""

    async def consume(self, take: Take) -> None:
        turns = 0

        def overlook(number: int, features: Any) -> None:
            nonlocal turns
            turns += 1
            if turns % 7:
                take(number, features)

        await super().consume(overlook)


class Losing(FloorLoop):
    name = "losing"
    consumer = OverlookingConsumer


class HangingConsumer(LoopConsumer):
    async def consume(self, take: Take) -> None:
        await asyncio.Event().wait()


class Hanging(FloorLoop):
    name = "hanging"
    consumer = HangingConsumer


class StuckProducer(LoopProducer):
    """Keeps its whole interpreter for ever in the first hand-off."""

    async def hand_over(self, number: int) -> Any:
        ctypes.PyDLL(None).sleep(3600)


class Stuck(FloorLoop):
    name = "stuck"
    producer = StuckProducer


class DyingConsumer(LoopConsumer):
    async def consume(self, take: Take) -> None:
        def die(number: int, features: Any) -> None:
            os.write(2, b"a warning\nthe reason why\n")
            os._exit(7)

        await super().consume(die)


class Dying(FloorLoop):
    name = "dying"
    consumer = DyingConsumer


class RaisingProducer(LoopProducer):
    async def hand_over(self, number: int) -> Any:
        raise RuntimeError(f"no {torch.float8_e4m3fn} today")


class Raising(FloorLoop):
    name = "raising"
    producer = RaisingProducer
