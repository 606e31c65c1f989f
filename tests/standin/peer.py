"""A consumer in another process that does one thing after another as it is told."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncvmm._backends.cuda import CudaConsumerRegion
from asyncvmm._backends.device_range import UNMAP_THREAD
from asyncvmm._consumer.lingering import GOODBYE_THREAD
from asyncvmm._errors import BackendError
from asyncvmm._fds import OwnedFd
from asyncvmm._types import RegionInfo, SegmentInfo
from tests.standin import Standin

LARGEST = 1 << 16


def join_goodbyes() -> None:
    """Wait for the threads that keep events until the exporter, which is closed, has hung up."""
    for thread in threading.enumerate():
        if thread.name == GOODBYE_THREAD:
            thread.join()


def join_unmapping() -> None:
    """Wait for the threads that give pools back once the device is done."""
    for thread in threading.enumerate():
        if thread.name == UNMAP_THREAD:
            thread.join()


class Peer:
    """This process's end: each method name of :class:`Told` is a word for :meth:`tell`.

    ``module`` is what the other process runs, this one or one that does more.
    """

    def __init__(self, settings: Mapping[str, str], *, module: str = "tests.standin.peer") -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env={**os.environ, **settings},
                pass_fds=[theirs.fileno()],
            )

    def tell(self, word: str, *args: object, fd: OwnedFd | None = None) -> Any:
        """Have it done; return the result, or raise the BackendError that came of it."""
        content = msgspec.msgpack.encode([word, args])
        if fd is None:
            self._socket.send(content)
        else:
            with fd:
                socket.send_fds(self._socket, [content], [fd.fileno()])
        answer = self._socket.recv(LARGEST)
        if not answer:
            raise EOFError(f"the peer ended with {self.process.wait()}")
        good, value = msgspec.msgpack.decode(answer)
        if good:
            return value
        raise BackendError(value[0], call=value[1], code=value[2])

    def map(self, segment: SegmentInfo, handle: OwnedFd | bytes) -> None:
        """Have one segment mapped."""
        if isinstance(handle, OwnedFd):
            self.tell("map", segment, b"", fd=handle)
        else:
            self.tell("map", segment, handle)

    def end(self) -> None:
        """Close the socket, which ends it, and wait."""
        self._socket.close()
        self.process.wait()


class Told:
    """What the other process can do."""

    region: CudaConsumerRegion
    keep: object = None

    def __init__(self) -> None:
        self.driver: Standin | None = None
        self.fds: list[int] = []

    def attach(self, info: Any, device: int) -> None:
        self.region = CudaConsumerRegion(msgspec.convert(info, RegionInfo), device)
        self.driver = Standin()

    def map(self, segment: Any, handle: bytes) -> None:
        given = OwnedFd(self.fds.pop()) if self.fds else handle
        self.region.map(msgspec.convert(segment, SegmentInfo), given)

    def unmap(self, index: int) -> None:
        self.region.unmap(index)

    def open_ready(self, slot: int, handle: bytes) -> None:
        self.region.open_ready(slot, handle)

    def wait_ready(self, slot: int, stream: int) -> None:
        self.region.wait_ready(slot, stream)

    def release(self, slot: int, streams: list[int]) -> bytes:
        return self.region.record_release(slot, streams)

    def read(self, start: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.region.address + start, nbytes)

    def write(self, start: int, content: bytes) -> None:
        ctypes.memmove(self.region.address + start, content, len(content))

    def keep_alive(self, on: bool) -> None:
        self.keep = self.region.keepalive() if on else None

    def close(self) -> None:
        if hasattr(self, "region"):
            self.region.close()

    def control(self, name: str, args: list[Any]) -> object:
        assert self.driver is not None
        return getattr(self.driver, name)(*args)

    def join_unmapping(self) -> None:
        join_unmapping()


def main(told: Told) -> None:
    """Serve the socket whose number is the argument until it ends."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while True:
            content, fds, _, _ = socket.recv_fds(connection, LARGEST, 1)
            if not content:
                os._exit(0)  # as a killed process would: nothing is given back
            told.fds = list(fds)
            word, args = msgspec.msgpack.decode(content)
            try:
                answer: list[object] = [True, getattr(told, word)(*args)]
            except BackendError as error:
                answer = [False, [str(error), error.call, error.code]]
            connection.send(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main(Told())
