"""The floor: the same messages and the same copy, and no library.

A slot of memory that all sides map is filled (or, for ``floor_reserve`` and ``ping_pong``, is
not), one small packet tells a consumer, who makes views and answers with one small packet.  On a
GPU each side also records an event and waits for the other's, and the producer asks the
consumer's event from the host.  Nothing can hand over a tensor for less by these means.

``floor`` and ``floor_reserve`` block on their sockets.  ``floor_loop`` and ``ping_pong`` do the
same from one persistent ``add_reader`` callback of an event loop on each side; ``floor_thread`` is
``floor_loop`` with its copies in a thread, as large ones have to be for the loop to go on.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch

from benchmarks.contents import CHECKED
from benchmarks.setting import Setting
from benchmarks.transports.acks import Acks
from benchmarks.transports.base import Consumer, Producer, Take, Transport

MESSAGE = struct.Struct("<IQQ")


def _memory(setting: Setting) -> Any:
    """Import what handles this kind of memory, late: the other one may not work here."""
    if setting.on_gpu:
        from benchmarks.transports import floor_cuda

        return floor_cuda
    from benchmarks.transports import floor_host

    return floor_host


class FloorProducer(Producer):
    """Blocks on its sockets."""

    copies = True

    async def __aenter__(self) -> Self:
        setting = self.setting
        self._memory = self.memory()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(setting.folder / "floor"))
        self._listener.listen(setting.consumers)
        self._sockets: list[socket.socket] = []
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self._acks = Acks()
        self._in_slot: list[int | None] = [None] * setting.depth
        self._turn = 0
        return self

    def memory(self) -> Any:
        """Make the memory that payloads are put into."""
        return _memory(self.setting).ProducerMemory(self.setting)

    async def __aexit__(self, *exc: object) -> None:
        for sock in self._sockets:
            sock.close()
        self._listener.close()

    async def ready(self) -> None:
        for index in range(self.setting.consumers):
            sock, _ = self._listener.accept()
            self._memory.offer(sock)
            self._by_fd[sock.fileno()] = index
            self._poll.register(sock, select.POLLIN)
            self._sockets.append(sock)
        self._watch()

    def _watch(self) -> None:
        """Prepare for answers; a blocking side has nothing to do."""

    async def hand_over(self, number: int) -> Any:
        setting = self.setting
        slot = self._turn % setting.depth
        before = self._in_slot[slot]
        if before is not None:
            await self.settled(before)
        if self.copies or number & CHECKED:
            await self._fill(slot, self.contents.features(number))
        self._memory.publish(slot)
        self._in_slot[slot] = number
        message = MESSAGE.pack(slot, number, setting.payload.total)
        to = self._sockets
        if setting.compete:
            to = [to[self._turn % len(to)]]
        self._turn += 1
        self._acks.expect(number, len(to))
        for sock in to:
            sock.send(message)
        return number

    async def _fill(self, slot: int, features: Sequence[torch.Tensor]) -> None:
        self._memory.fill(slot, features)

    async def settled(self, ticket: Any) -> None:
        while not self._acks.settled(ticket):
            if len(self._sockets) == 1:
                self._receive(0)
            else:
                for fd, _ in self._poll.poll():
                    self._receive(self._by_fd[fd])

    def _receive(self, index: int) -> None:
        packet = self._sockets[index].recv(MESSAGE.size)
        if not packet:
            raise EOFError("the consumer hung up")
        slot, number, _ = MESSAGE.unpack(packet)
        self._memory.finish(slot, index)
        self._acks.heard(number)


class ZeroCopyProducer(FloorProducer):
    """Blocks on its sockets and copies nothing but what is checked."""

    copies = False


class LoopProducer(FloorProducer):
    """Hears answers in callbacks of the loop."""

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for index, sock in enumerate(self._sockets):
            sock.setblocking(False)
            loop.add_reader(sock, self._receive, index)

    async def __aexit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)
        await super().__aexit__(*exc)

    async def settled(self, ticket: Any) -> None:
        await self._acks.wait(ticket)


class ThreadProducer(LoopProducer):
    """Has a thread copy, one and the same every time."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._executor = ThreadPoolExecutor(1)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._executor.shutdown()
        await super().__aexit__(*exc)

    async def _fill(self, slot: int, features: Sequence[torch.Tensor]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._memory.fill, slot, features)


class PingPongProducer(LoopProducer):
    """The loop's floor without a copy."""

    copies = False


class FloorConsumer(Consumer):
    """Blocks on its socket."""

    async def __aenter__(self) -> Self:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.connect(str(self.setting.folder / "floor"))
        self._memory = self.memory(self._sock)
        return self

    def memory(self, sock: socket.socket) -> Any:
        """Take the other end of the producer's memory from a socket."""
        return _memory(self.setting).ConsumerMemory(self.setting, sock)

    async def __aexit__(self, *exc: object) -> None:
        self._sock.close()

    async def consume(self, take: Take) -> None:
        while self._answer(take):
            pass

    def _answer(self, take: Take) -> bool:
        packet = self._sock.recv(MESSAGE.size)
        if not packet:
            return False
        slot, number, _ = MESSAGE.unpack(packet)
        take(number, self._memory.views(slot))
        self._memory.done(slot)
        self._sock.send(packet)
        return True


class LoopConsumer(FloorConsumer):
    """Answers in a callback of the loop."""

    async def consume(self, take: Take) -> None:
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def readable() -> None:
            try:
                if self._answer(take):
                    return
                over.set_result(None)
            except Exception as error:
                over.set_exception(error)
            loop.remove_reader(self._sock)

        self._sock.setblocking(False)
        loop.add_reader(self._sock, readable)
        await over


class Floor(Transport):
    """Two blocking sockets, one copy."""

    name = "floor"
    about = "one copy, one packet each way, blocking sockets (and bare driver calls on a GPU)"
    producer = FloorProducer
    consumer = FloorConsumer
    uses_loop = False
    devices = ("cpu", "cuda")


class FloorReserve(Floor):
    """Two blocking sockets, no copy."""

    name = "floor_reserve"
    about = "as floor, without the copy"
    producer = ZeroCopyProducer


class FloorLoop(Transport):
    """Two event loops, one copy."""

    name = "floor_loop"
    about = "one copy, one packet each way, add_reader callbacks of two event loops"
    producer = LoopProducer
    consumer = LoopConsumer


class FloorThread(FloorLoop):
    """Two event loops, one copy in a thread."""

    name = "floor_thread"
    about = "as floor_loop, the copy in a thread, so that the loop goes on"
    producer = ThreadProducer
    devices = ("cpu",)


class PingPong(FloorLoop):
    """Two event loops, no copy."""

    name = "ping_pong"
    about = "as floor_loop, without the copy: one packet each way"
    producer = PingPongProducer
