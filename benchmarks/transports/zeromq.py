"""ZeroMQ over ipc, by its asyncio sockets."""

from __future__ import annotations

import asyncio
import struct
import warnings
from typing import Any, Self

import torch
import zmq
import zmq.asyncio

from benchmarks.setting import Setting
from benchmarks.transports.acks import Acks
from benchmarks.transports.base import Consumer, Producer, Take, Transport

_NUMBER = struct.Struct("<Q")
_HELLO = (1 << 64) - 1


def _address(setting: Setting, name: str) -> str:
    return f"ipc://{setting.folder / name}"


class ZMQProducer(Producer):
    """Sends a number and the features as frames of one message, zero-copy where pyzmq can.

    One PUSH socket for each consumer, or one for all who compete; answers come by a PULL socket.
    """

    async def __aenter__(self) -> Self:
        setting = self.setting
        self._context = zmq.asyncio.Context()
        self._out = []
        for index in range(1 if setting.compete else setting.consumers):
            sock = self._context.socket(zmq.PUSH)
            sock.bind(_address(setting, f"out-{index}"))
            self._out.append(sock)
        self._back = self._context.socket(zmq.PULL)
        self._back.bind(_address(setting, "back"))
        self._acks = Acks()
        self._present = 0
        self._all = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        for index in range(self.setting.consumers):
            await self._out[index % len(self._out)].send(b"")
        self._reader.cancel()
        for sock in (*self._out, self._back):
            sock.close(linger=1000)
        self._context.term()

    async def _read(self) -> None:
        while True:
            (number,) = _NUMBER.unpack(await self._back.recv())
            if number == _HELLO:
                self._present += 1
                if self._present == self.setting.consumers:
                    self._all.set()
            else:
                self._acks.heard(number)

    async def ready(self) -> None:
        await self._all.wait()

    async def hand_over(self, number: int) -> Any:
        arrays = [feature.cpu().numpy() for feature in self.contents.features(number)]
        self._acks.expect(number, len(self._out))
        for sock in self._out:
            await sock.send_multipart([_NUMBER.pack(number), *arrays], copy=False)
        return number

    async def settled(self, ticket: Any) -> None:
        await self._acks.wait(ticket)


class ZMQConsumer(Consumer):
    """Makes tensors of the frames without a copy, and answers."""

    async def __aenter__(self) -> Self:
        setting = self.setting
        self._context = zmq.asyncio.Context()
        self._in = self._context.socket(zmq.PULL)
        self._in.connect(_address(setting, f"out-{0 if setting.compete else self.index}"))
        self._back = self._context.socket(zmq.PUSH)
        self._back.connect(_address(setting, "back"))
        await self._back.send(_NUMBER.pack(_HELLO))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._in.close(linger=0)
        self._back.close(linger=1000)
        self._context.term()

    async def consume(self, take: Take) -> None:
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        device = self.setting.consumer_device
        while True:
            head, *frames = await self._in.recv_multipart(copy=False)
            if not len(head.buffer):
                return
            (number,) = _NUMBER.unpack(head.buffer)
            take(
                number,
                [torch.frombuffer(f.buffer, dtype=torch.uint8).to(device) for f in frames],
            )
            await self._back.send(_NUMBER.pack(number))


class ZMQ(Transport):
    """pyzmq's asyncio sockets over ipc."""

    name = "zmq"
    about = "frames without a copy here, through the socket (two), views of the frames; on the loop"
    producer = ZMQProducer
    consumer = ZMQConsumer
    devices = ("cpu", "cuda")
