"""Ends that speak the protocol by hand, and break it where a test wants to."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
from array import array
from collections.abc import Sequence
from typing import Any, Self

from asyncvmm._core import wire
from asyncvmm._core.layout import chunk_bytes, feature_bytes
from asyncvmm._types import RegionInfo, SegmentInfo
from tests.patience import PROMPTLY

PAGE = mmap.PAGESIZE
SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0010  # SEAL, SHRINK, GROW, FUTURE_WRITE


class Raw:
    """One end of a connection that sends what it is given."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    def put(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Send one packet now, or raise what the kernel says."""
        rights = array("i", fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
        self.sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)

    async def send(self, *packets: bytes, fds: Sequence[int] = ()) -> None:
        """Send packets, each with the same descriptors; a peer that hung up is no error here."""
        async with asyncio.timeout(PROMPTLY):
            for packet in packets:
                while True:
                    try:
                        self.put(packet, fds)
                    except BlockingIOError:
                        await asyncio.sleep(0.001)
                    except (BrokenPipeError, ConnectionResetError):
                        return
                    else:
                        break

    async def packet(self) -> bytes | None:
        """Return the next packet, its descriptors closed; None once the peer has hung up."""
        async with asyncio.timeout(PROMPTLY):
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 256)
                except BlockingIOError:
                    await asyncio.sleep(0.001)
                except ConnectionResetError:
                    return None
                else:
                    for fd in fds:
                        os.close(fd)
                    return data or None

    async def rest(self) -> list[bytes]:
        """Return every packet until the peer hangs up, which it must."""
        found = []
        while (packet := await self.packet()) is not None:
            found.append(packet)
        return found

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RawConsumer(Raw):
    """A consumer by hand."""

    welcome: wire.Welcome

    @classmethod
    def to(cls, address: str) -> Self:
        """Connect a socket and say nothing."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(address)
        return cls(sock)

    async def hello(self, rank: int | None = None, **fields: Any) -> None:
        """Say hello and read the welcome and the pool's segments."""
        message = wire.Hello(rank, fields.pop("name", None), "host", **fields)
        await self.send(wire.encode_greeting(message))
        packet = await self.packet()
        assert packet is not None
        welcome = wire.decode_greeting(packet)
        assert isinstance(welcome, wire.Welcome)
        self.welcome = welcome
        for _ in range(welcome.segments):
            assert await self.packet() is not None

    async def attach(self) -> None:
        """Say that everything is mapped."""
        await self.send(wire.encode_greeting(wire.Attached()))

    async def batch(self) -> list[wire.OwnerFrame]:
        """Return the owners of the next delivery."""
        packet = await self.packet()
        assert packet is not None
        (message,) = wire.decode_from_exporter(packet)
        assert isinstance(message, wire.Deliver)
        return message.owners

    async def say(self, *messages: wire.FromConsumer) -> None:
        """Send messages in one packet."""
        await self.send(packet(*messages))


class RawExporter:
    """An exporter by hand: it listens, and greets whoever comes as it is told."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(address)
        self.listener.listen()
        self.listener.setblocking(False)

    async def accept(self) -> Raw:
        """Accept a consumer and read its hello."""
        async with asyncio.timeout(PROMPTLY):
            while True:
                with contextlib.suppress(BlockingIOError):
                    sock, _ = self.listener.accept()
                    break
                await asyncio.sleep(0.001)
        end = Raw(sock)
        assert await end.packet() is not None
        return end

    async def greet(self, region: RegionInfo, *segments: SegmentInfo) -> Raw:
        """Accept a consumer, and give it a pool with right segments; return the connection.

        Nobody else is listened to: a consumer whose link breaks looks for a way back when it
        leaves, and is to be told at once that there is none.
        """
        end = await self.accept()
        self.listener.close()
        await end.send(welcome(region, len(segments)))
        for segment in segments:
            with memfd(segment.nbytes) as fd:
                await end.send(packet(wire.Segment(segment)), fds=[fd])
        return end

    def close(self) -> None:
        """Listen no more."""
        self.listener.close()
        os.unlink(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def packet(*messages: wire.Message) -> bytes:
    """Return messages in one packet."""
    return wire.frame([wire.encode(message) for message in messages])


def welcome(region: RegionInfo, segments: int = 1, *, ranks: int = 1) -> bytes:
    """Return an exporter's greeting."""
    message = wire.Welcome(b"identity--------", 0, ranks, region, segments)
    return wire._HEADER.pack(wire.MAGIC, wire.VERSION) + wire.encode(message)


class memfd:
    """A descriptor of so many bytes, sealed as an exporter's are unless told otherwise."""

    def __init__(self, nbytes: int, seals: int = SEALS) -> None:
        self.fd = os.memfd_create("asyncvmm-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)


def owner(
    slot: int = 0,
    generation: int = 1,
    start: int = 0,
    nbytes: int | None = None,
    features: Sequence[wire.Feature] = (wire.Feature("x", "uint8", (100,)),),
) -> wire.OwnerFrame:
    """Return an owner as it travels, right unless told otherwise."""
    if nbytes is None:
        nbytes = chunk_bytes(feature_bytes(f.name, f.dtype, f.shape) for f in features)
    return wire.OwnerFrame(slot, generation, start, nbytes, f"{slot}.{generation}", list(features))


def deliver(*owners: wire.OwnerFrame) -> bytes:
    """Return a packet that delivers owners as one batch."""
    return packet(wire.Deliver(list(owners)))
