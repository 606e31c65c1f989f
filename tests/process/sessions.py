"""One connection's worth of fuzz, in either direction, over blocking sockets."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from asyncvmm._core import wire
from asyncvmm._errors import RemoteProtocolError
from asyncvmm._types import RegionInfo, SegmentInfo
from tests.patience import PROMPTLY
from tests.process import grammar
from tests.process.raw import PAGE, memfd, packet, welcome

HELLO = wire.encode_greeting(wire.Hello(1, None, "host"))
OBSERVE = wire.encode_greeting(wire.Observe())
ATTACHED = wire.encode_greeting(wire.Attached())
REGION = RegionInfo("host", 4 * PAGE, PAGE, 4)
STAGES = {"cold": 20, "greeted": 20, "observing": 1, "attached": 60, "back": 1}
"""How far a connection has come before it misbehaves, and how often.

"observing" and "back" (a consumer that has lost its link) are known on one side only, and have to
wait for the other end, up to a tenth of a second each: they are few, so that others are many.
"""

GONE = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, TimeoutError)


def read(sock: socket.socket) -> bytes:
    """Return one packet, its descriptors closed; empty at the end."""
    data, fds, _, _ = socket.recv_fds(sock, 1 << 17, 16)
    for fd in fds:
        os.close(fd)
    return data


def put(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet, which a SEQPACKET socket may refuse for its length."""
    if fds:
        socket.send_fds(sock, [data], list(fds), socket.MSG_NOSIGNAL)
    else:
        sock.send(data, socket.MSG_NOSIGNAL)


@dataclass(frozen=True)
class Plan:
    """What one connection will say; drawn before it begins, for how far it gets is chance."""

    stage: str
    packets: list[tuple[bytes, int]]
    """Each with the number of descriptors that go with it."""
    patient: bool
    """Whether it waits for the other end to hang up."""

    @classmethod
    def of(cls, chance: random.Random, side: grammar.Side) -> Self:
        """Draw one."""
        return cls(
            stage=chance.choices([*STAGES], [*STAGES.values()])[0],
            packets=[
                (grammar.packet(chance, side), chance.choice([0] * 30 + [1, 1, 1, 2, 50]))
                for _ in range(chance.choice([1, 10, 40]))
            ],
            patient=chance.random() < 0.7,
        )


def connected(address: str) -> socket.socket:
    """Return a socket to an exporter."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(PROMPTLY)
    sock.connect(address)
    return sock


def came_back(greeting: bytes) -> bytes:
    """Return the greeting of a consumer that was welcomed with that one before."""
    welcome = wire.decode_greeting(greeting)
    assert isinstance(welcome, wire.Welcome)
    return wire.encode_greeting(wire.Resume(welcome.exporter, welcome.peer))


def attack_exporter(address: str, plan: Plan) -> int:
    """Come as a consumer, further or less far, and misbehave; return the packets sent."""
    sent = 0
    with (
        contextlib.ExitStack() as stack,
        contextlib.suppress(*GONE),
        memfd(PAGE) as fd,
    ):
        sock = stack.enter_context(connected(address))
        if plan.stage == "observing":
            put(sock, OBSERVE)
            if not read(sock):
                return 1
            sent += 1
        elif plan.stage != "cold":
            put(sock, HELLO)
            greeting = read(sock)
            if not greeting or not read(sock):  # the welcome and the segment, or refused
                return 1
            sent += 1
        if plan.stage in ("attached", "back"):
            put(sock, ATTACHED)
            sent += 1
        if plan.stage == "back":
            sock.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                read(sock)  # a batch, where there is one for everybody
            sock.close()
            sock = stack.enter_context(connected(address))
            put(sock, came_back(greeting))
            sent += 1
        for data, fds in plan.packets:
            put(sock, data, [fd] * fds)
            sent += 1
        if plan.patient:
            sock.shutdown(socket.SHUT_WR)
            while read(sock):
                pass
    return sent


def accept(listener: socket.socket, chance: random.Random) -> socket.socket:
    """Accept the next consumer; answer those that only come back, one way or another.

    Raises TimeoutError if nobody new comes within the listener's patience.
    """
    while True:
        sock = listener.accept()[0]
        sock.settimeout(PROMPTLY)
        with contextlib.suppress(*GONE):
            if not _comes_back(read(sock)):
                return sock
            with memfd(PAGE) as fd:
                for data, fds in grammar.answer(chance):
                    put(sock, data, [fd] * fds)
        sock.close()


def _comes_back(hello: bytes) -> bool:
    try:
        return isinstance(wire.decode_greeting(hello), wire.Resume)
    except RemoteProtocolError:
        return False  # it hung up


def attack_consumer(sock: socket.socket, plan: Plan) -> int:
    """Be the exporter of a consumer that has said hello; return the packets sent."""
    sent = 0
    with sock, contextlib.suppress(*GONE), memfd(PAGE) as fd:
        if plan.stage != "cold":
            put(sock, welcome(REGION, 2))
            put(sock, packet(wire.Segment(SegmentInfo(0, 0, PAGE))), [fd])
            sent += 2
        if plan.stage == "attached":
            put(sock, packet(wire.Segment(SegmentInfo(5, 3 * PAGE, PAGE))), [fd])
            sent += 1
        for data, fds in plan.packets:
            put(sock, data, [fd] * fds)
            sent += 1
        if plan.patient:
            sock.shutdown(socket.SHUT_WR)
            while read(sock):
                pass
    return sent
