"""The floor of an event loop that never sleeps: ``floor_loop`` on two loops that turn all the time.

Where one hand-off waits for the last, nobody on an event loop can be quicker by these means.  It
takes a core for each side, also for nothing, so it is a floor and not a way to do it.
"""

from __future__ import annotations

import asyncio

from benchmarks.setting import Setting
from benchmarks.transports.base import Take
from benchmarks.transports.floor import FloorLoop, LoopConsumer, LoopProducer


class _Turns:
    """Keeps the running loop turning until told to stop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._on = True
        self._turn()

    def _turn(self) -> None:
        if self._on:
            self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Let the loop sleep again."""
        self._on = False


class TurningProducer(LoopProducer):
    """Hears answers in callbacks of a loop that turns all the time."""

    def _watch(self) -> None:
        super()._watch()
        self._turns = _Turns()

    async def __aexit__(self, *exc: object) -> None:
        self._turns.stop()
        await super().__aexit__(*exc)


class TurningConsumer(LoopConsumer):
    """Answers in a callback of a loop that turns all the time."""

    async def consume(self, take: Take) -> None:
        turns = _Turns()
        try:
            await super().consume(take)
        finally:
            turns.stop()


class FloorTurning(FloorLoop):
    """Two event loops that never sleep, one copy."""

    name = "floor_turning"
    about = "as floor_loop, with loops that never sleep, and with bare driver calls on a GPU"
    producer = TurningProducer
    consumer = TurningConsumer
    devices = ("cpu", "cuda")
    kinds = ("flow",)

    @classmethod
    def unusable(cls, setting: Setting) -> str:
        """Several sides that never sleep would be in each other's way."""
        if setting.consumers > 1 or setting.depth > 1:
            return "is for one hand-off at a time between two processes"
        return super().unusable(setting)
