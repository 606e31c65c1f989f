"""A ring in shared memory: iceoryx2's publish and subscribe, woken by its events.

It has no asyncio form; it runs without an event loop.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from pathlib import Path
from typing import Any, Self

import iceoryx2
import torch

from benchmarks.contents import CHECKED
from benchmarks.setting import Setting
from benchmarks.transports.acks import Acks
from benchmarks.transports.base import Consumer, Producer, Take, Transport

_HEAD = 256
"""Bytes before the features; the first eight are the number."""
_END = (1 << 64) - 1
_HELLO = _END - 1


def _prefix(setting: Setting) -> str:
    return f"{setting.folder.name}_"


class _Ends:
    """What both sides need: one service out, one back, and an event each way."""

    def __init__(self, setting: Setting) -> None:
        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        config = iceoryx2.config.default()
        config.global_cfg.prefix = iceoryx2.FileName.new(_prefix(setting))
        config.global_cfg.root_path = iceoryx2.Path.new(str(setting.folder / "iceoryx2"))
        self.node = (
            iceoryx2.NodeBuilder.new()
            .config(config)
            .signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
            .create(iceoryx2.ServiceType.Ipc)
        )
        self.out = (
            self._service("out")
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .subscriber_max_buffer_size(setting.depth)
            .max_subscribers(setting.consumers)
            .enable_safe_overflow(False)
            .open_or_create()
        )
        self.back = (
            self._service("back")
            .publish_subscribe(ctypes.c_uint64)
            .subscriber_max_buffer_size(setting.depth + 1)
            .max_publishers(setting.consumers)
            .enable_safe_overflow(False)
            .open_or_create()
        )

    def _service(self, name: str) -> Any:
        return self.node.service_builder(iceoryx2.ServiceName.new(name))

    def event(self, name: str, listeners: int, notifiers: int) -> Any:
        """Open an event."""
        builder = self._service(name).event()
        return builder.max_listeners(listeners).max_notifiers(notifiers).open_or_create()

    def events(self, consumers: int) -> tuple[Any, Any]:
        """Open the event that wakes consumers and the one that wakes the producer."""
        return self.event("filled", consumers, 1), self.event("emptied", 1, consumers)


_WAIT_AND_RETRY = iceoryx2.BackpressureStrategy.RetryUntilDelivered


class IceoryxProducer(Producer):
    """Loans memory for a sample, copies the features into it, sends and notifies."""

    copies = True

    async def __aenter__(self) -> Self:
        setting = self.setting
        self._ends = ends = _Ends(setting)
        self._nbytes = _HEAD + setting.payload.total
        builder = ends.out.publisher_builder().initial_max_slice_len(self._nbytes)
        self._publisher = builder.backpressure_strategy(_WAIT_AND_RETRY).create()
        self._answers = ends.back.subscriber_builder().create()
        filled, emptied = ends.events(setting.consumers)
        self._notifier = filled.notifier_builder().create()
        self._listener = emptied.listener_builder().create()
        self._acks = Acks()
        self._out: deque[int] = deque()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._send(_END)
        del self._publisher, self._answers, self._notifier, self._listener, self._ends

    async def ready(self) -> None:
        for _ in range(self.setting.consumers):
            while self._answer() is None:
                self._listener.blocking_wait()

    def _answer(self) -> int | None:
        sample = self._answers.receive()
        return None if sample is None else int(sample.payload().contents.value)

    def _send(self, number: int) -> None:
        sample = self._publisher.loan_slice_uninit(self._nbytes)
        place = sample.payload().as_ptr()
        ctypes.c_uint64.from_address(place).value = number
        if number != _END and (self.copies or number & CHECKED):
            place += _HEAD
            for feature in self.contents.features(number):
                ctypes.memmove(place, feature.data_ptr(), feature.nbytes)
                place += feature.nbytes
        sample.assume_init().send()
        self._notifier.notify()

    async def hand_over(self, number: int) -> Any:
        # A full ring blocks its sender: who went on sending would never take the answers, and
        # their ring would block the consumer.
        if len(self._out) == self.setting.depth:
            await self.settled(self._out.popleft())
        self._acks.expect(number, self.setting.consumers)
        self._out.append(number)
        self._send(number)
        return number

    async def settled(self, ticket: Any) -> None:
        while not self._acks.settled(ticket):
            number = self._answer()
            if number is None:
                self._listener.blocking_wait()
            else:
                self._acks.heard(number)


class IceoryxConsumer(Consumer):
    """Makes views of the sample, drops it, answers."""

    async def __aenter__(self) -> Self:
        self._ends = ends = _Ends(self.setting)
        self._subscriber = ends.out.subscriber_builder().create()
        builder = ends.back.publisher_builder()
        self._publisher = builder.backpressure_strategy(_WAIT_AND_RETRY).create()
        filled, emptied = ends.events(self.setting.consumers)
        self._listener = filled.listener_builder().create()
        self._notifier = emptied.notifier_builder().create()
        self._tell(_HELLO)
        return self

    async def __aexit__(self, *exc: object) -> None:
        del self._subscriber, self._publisher, self._listener, self._notifier, self._ends

    def _tell(self, number: int) -> None:
        self._publisher.send_copy(ctypes.c_uint64(number))
        self._notifier.notify()

    async def consume(self, take: Take) -> None:
        payload = self.setting.payload
        while True:
            sample = self._subscriber.receive()
            if sample is None:
                self._listener.blocking_wait()
                continue
            memory = sample.payload().as_memory_view()
            number = int.from_bytes(memory[:8], "little")
            if number == _END:
                return
            take(
                number,
                [
                    torch.frombuffer(
                        memory,
                        dtype=torch.uint8,
                        count=payload.nbytes,
                        offset=_HEAD + index * payload.nbytes,
                    )
                    for index in range(payload.count)
                ],
            )
            del memory, sample
            self._tell(number)


class Iceoryx(Transport):
    """iceoryx2's publish and subscribe."""

    name = "iceoryx2"
    about = "one copy into a loaned sample, events both ways, views; blocking"
    producer = IceoryxProducer
    consumer = IceoryxConsumer
    uses_loop = False
    routes = ("broadcast",)

    @classmethod
    def clean(cls, setting: Setting) -> None:
        for left in Path("/dev/shm").glob(f"{_prefix(setting)}*"):
            with contextlib.suppress(FileNotFoundError):
                left.unlink()
