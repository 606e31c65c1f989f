"""Both ends of a link for the tests, and sockets that count."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from asyncvmm._fds import OwnedFd
from asyncvmm._io.link import Link
from tests.patience import PROMPTLY


def frame(messages: Sequence[bytes]) -> bytes:
    """Join messages so that :func:`split` finds them again."""
    return b"".join(struct.pack("<I", len(message)) + message for message in messages)


def split(packet: bytes) -> list[bytes]:
    """Undo :func:`frame`."""
    messages = []
    at = 0
    while at < len(packet):
        (size,) = struct.unpack_from("<I", packet, at)
        messages.append(packet[at + 4 : at + 4 + size])
        at += 4 + size
    return messages


class CountingSocket(socket.socket):
    """A socket that counts the calls that are system calls, and those that came too early."""

    calls: Counter[str]

    @classmethod
    def of(cls, sock: socket.socket) -> CountingSocket:
        """Take over the descriptor of another socket."""
        counting = cls(fileno=sock.detach())
        counting.calls = Counter()
        return counting

    def _count(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        self.calls[name] += 1
        try:
            return call(*arguments)
        except BlockingIOError:
            self.calls["EAGAIN"] += 1
            raise

    def send(self, *arguments: Any) -> Any:
        return self._count("send", super().send, *arguments)

    def sendmsg(self, *arguments: Any) -> Any:
        return self._count("sendmsg", super().sendmsg, *arguments)

    def recv_into(self, *arguments: Any) -> Any:
        return self._count("recv_into", super().recv_into, *arguments)

    def recvmsg_into(self, *arguments: Any) -> Any:
        return self._count("recvmsg_into", super().recvmsg_into, *arguments)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected SEQPACKET sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class End:
    """One link that keeps what it gets; every wait ends with the link too."""

    def __init__(self, sock: socket.socket, *, take_fds: bool = True, **options: Any) -> None:
        self.packets: list[bytes] = []
        self.messages: list[bytes] = []
        self.fds: list[OwnedFd] = []
        self.ends: list[Exception | None] = []
        self.on_packet: Callable[[memoryview, list[OwnedFd]], None] | None = None
        self._take_fds = take_fds
        self._news = asyncio.Event()
        self.link = Link(
            sock,
            loop=asyncio.get_running_loop(),
            frame=frame,
            on_packet=self._on_packet,
            on_end=self._on_end,
            **options,
        )

    def _on_packet(self, view: memoryview, fds: list[OwnedFd]) -> None:
        self._news.set()
        packet = bytes(view)
        self.packets.append(packet)
        self.messages += split(packet)
        if self._take_fds:
            self.fds += fds
            fds.clear()
        if self.on_packet is not None:
            self.on_packet(view, fds)

    def _on_end(self, error: Exception | None) -> None:
        self._news.set()
        self.ends.append(error)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at whenever something arrived."""
        async with asyncio.timeout(PROMPTLY):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def ended(self) -> Exception | None:
        """Wait for the end and return what was told; more than one end is an error."""
        await self.until(lambda: bool(self.ends))
        (error,) = self.ends
        return error

    def close(self) -> None:
        """Close the link and what was received."""
        self.link.abort()
        for fd in self.fds:
            fd.close()


def memfd(content: bytes) -> OwnedFd:
    """Return a descriptor that is recognised by its content."""
    fd = OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC))
    os.write(fd.fileno(), content)
    return fd


def content(fd: OwnedFd) -> bytes:
    """Return what :func:`memfd` put there."""
    return os.pread(fd.fileno(), 4096, 0)


def open_fds() -> int:
    """Count the descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


async def turns(count: int = 3) -> None:
    """Let the loop run its ready callbacks."""
    for _ in range(count):
        await asyncio.sleep(0)
