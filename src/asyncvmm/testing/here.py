"""Where a function runs that a test has another process run."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec

from asyncvmm.testing.counters import live_events

LARGEST = 200_000
"""Bytes of one message between a test and its processes: what a socket takes by default."""


class Here:
    """What a function gets that runs in another process: the way back to the test.

    A *point* is a name that the function and the test agree on.
    """

    def __init__(
        self, channel: socket.socket, loop_factory: Callable[[], asyncio.AbstractEventLoop]
    ) -> None:
        self.channel = channel
        self.loop_factory = loop_factory
        self.exits = AsyncExitStack()
        """Left when the process ends in order: for what should outlive one function."""
        self.kept: dict[str, Any] = {}
        """For what one function leaves to the next."""
        self._thread = threading.get_ident()
        self._gates: dict[str, threading.Event] = {}
        self._doors: dict[str, asyncio.Future[None]] = {}
        self._later: list[list[Any]] = []

    def tell(self, point: str, **facts: Any) -> None:
        """Tell the test that this point is reached, and go on.

        The test finds it with :meth:`Process.at`; ``facts`` are plain data.
        """
        send(self.channel, msgspec.msgpack.encode(["at", point, facts]))

    async def reach(self, point: str, **facts: Any) -> None:
        """Tell the test, and wait for its :meth:`Process.go` while the loop goes on.

        Cancellation ends the wait; a later ``go`` is then for nobody, which is an error.
        """
        door = self._doors[point] = asyncio.get_running_loop().create_future()
        self.tell(point, **facts)
        await door

    def block(self, point: str, **facts: Any) -> None:
        """Tell the test, and stand still until its :meth:`Process.go`.

        In the loop's thread that stops the whole loop, as a long computation would; in another
        thread it stops that thread.
        """
        if threading.get_ident() != self._thread:
            gate = self._gates[point] = threading.Event()
            self.tell(point, **facts)
            gate.wait()
            return
        self.tell(point, **facts)
        while True:
            select.select([self.channel], [], [])
            message = receive(self.channel)
            if message is None:
                os._exit(0)  # the test is gone
            if message == ["go", point]:
                return
            self._later.append(message)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end in a loop of the kind that the test asked for."""
        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            runner.run(main)

    def _go(self, point: str) -> None:
        if point in self._gates:
            self._gates.pop(point).set()
        else:
            self._doors.pop(point).set_result(None)

    def _messages(self) -> list[list[Any] | None]:
        """Return what the test says, with what came while this process stood still."""
        found: list[list[Any] | None] = [*self._later]
        self._later.clear()
        with suppress(BlockingIOError):
            found.append(receive(self.channel))
        return found


def send(channel: socket.socket, data: bytes) -> None:
    """Send one message; where the test is slow to read, stand still until it has."""
    while True:
        try:
            channel.send(data)
        except BlockingIOError:
            select.select([], [channel], [])
        else:
            return


def receive(channel: socket.socket) -> Any:
    """Return one message, or None if the other end is gone."""
    try:
        data = channel.recv(LARGEST)
    except ConnectionResetError:
        return None
    return msgspec.msgpack.decode(data) if data else None


async def count_events(here: Here) -> int:
    """Return this process's interprocess events."""
    return live_events()
