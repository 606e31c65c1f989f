"""Pickle over a Unix socket: what is at hand without any library."""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any, Self

import torch

from benchmarks.transports.acks import Acks
from benchmarks.transports.base import Consumer, Producer, Take, Transport

_LENGTH = struct.Struct("<Q")
_NUMBER = struct.Struct("<Q")


class PickleProducer(Producer):
    """Pickles the features as numpy arrays (protocol 5) and writes them to asyncio streams."""

    async def __aenter__(self) -> Self:
        self._acks = Acks()
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: list[asyncio.Task[None]] = []
        self._all = asyncio.Event()
        self._turn = 0
        self._server = await asyncio.start_unix_server(
            self._connected, self.setting.folder / "pickle"
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        for writer in self._writers:
            writer.close()
        self._server.close()
        for task in self._readers:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._readers.append(asyncio.ensure_future(self._read(reader)))
        if len(self._writers) == self.setting.consumers:
            self._all.set()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (number,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
                self._acks.heard(number)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def ready(self) -> None:
        await self._all.wait()

    async def hand_over(self, number: int) -> Any:
        setting = self.setting
        arrays = [feature.cpu().numpy() for feature in self.contents.features(number)]
        data = pickle.dumps((number, arrays), protocol=5)
        writers = self._writers
        if setting.compete:
            self._turn = (self._turn + 1) % len(writers)
            writers = [writers[self._turn]]
        self._acks.expect(number, len(writers))
        for writer in writers:
            writer.write(_LENGTH.pack(len(data)))
            writer.write(data)
            await writer.drain()
        return number

    async def settled(self, ticket: Any) -> None:
        await self._acks.wait(ticket)


class PickleConsumer(Consumer):
    """Reads and unpickles; the tensors are its own."""

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_unix_connection(
            self.setting.folder / "pickle"
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.close()

    async def consume(self, take: Take) -> None:
        device = self.setting.consumer_device
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                data = await self._reader.readexactly(length)
            except asyncio.IncompleteReadError:
                return
            number, arrays = pickle.loads(data)  # a benchmark's own child
            take(number, [torch.from_numpy(array).to(device) for array in arrays])
            self._writer.write(_NUMBER.pack(number))


class PickleUDS(Transport):
    """Pickle over a Unix stream socket, by asyncio's streams."""

    name = "pickle_uds"
    about = "pickled (one copy), through the socket (two), unpickled (one); on the loop"
    producer = PickleProducer
    consumer = PickleConsumer
    devices = ("cpu", "cuda")
