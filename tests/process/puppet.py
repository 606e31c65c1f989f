"""The other process: it does one step after another as it is told, and says what came of it.

``python -m tests.process.puppet SOCKET`` is the *nursery*: it has torch and asyncvmm loaded, and
forks one process per connection to its socket, which takes milliseconds instead of seconds.  It
has one thread and nothing of asyncvmm is open in it, so its children are as good as new.  They
end as any interpreter does, by falling off the end of this file.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
import torch
import uvloop

import asyncvmm
from asyncvmm._tensors import preload
from tests.process.patterns import pattern

CLONE_NEWPID = 0x2000_0000
PR_SET_PDEATHSIG = 1

LARGEST = 200_000
"""Bytes of one message between a test and its processes."""


class Me:
    """What a step gets: what this process has, and the way back to the test."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.exits = AsyncExitStack()
        self.exporter: asyncvmm.Exporter
        self.consumer: asyncvmm.Consumer
        self.acks: list[asyncvmm.Acknowledgement] = []
        self.batches: list[asyncvmm.Batch] = []
        self.kept: dict[str, Any] = {}
        self._thread = threading.get_ident()
        self._gates: dict[str, threading.Event] = {}
        self._doors: dict[str, asyncio.Future[None]] = {}
        self._later: list[list[Any]] = []

    def tell(self, point: str, **facts: Any) -> None:
        """Tell the test where this process is, and go on."""
        self.channel.send(msgspec.msgpack.encode(["at", point, facts]))

    async def reach(self, point: str, **facts: Any) -> None:
        """Tell the test, and wait for its "go" while the loop goes on."""
        door = self._doors[point] = asyncio.get_running_loop().create_future()
        self.tell(point, **facts)
        await door

    def block(self, point: str, **facts: Any) -> None:
        """Tell the test, and stand still until its "go": this thread, or the whole loop."""
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

    def go(self, point: str) -> None:
        """Let whoever stands there go on."""
        if point in self._gates:
            self._gates.pop(point).set()
        else:
            self._doors.pop(point).set_result(None)

    def messages(self) -> list[list[Any] | None]:
        """Return what the test says, with what came while this process stood still."""
        found: list[list[Any] | None] = [*self._later]
        self._later.clear()
        with suppress(BlockingIOError):
            found.append(receive(self.channel))
        return found


def receive(channel: socket.socket) -> Any:
    """Return one message, or None if the other end is gone."""
    try:
        data = channel.recv(LARGEST)
    except ConnectionResetError:
        return None
    return msgspec.msgpack.decode(data) if data else None


def find(name: str) -> Callable[..., Awaitable[Any]]:
    """Return the step ``module:function``."""
    module, _, function = name.partition(":")
    step: Callable[..., Awaitable[Any]] = getattr(importlib.import_module(module), function)
    return step


async def serve(channel: socket.socket) -> None:
    """Do what the test says until it says "end" or is gone."""
    me = Me(channel)
    ended = asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    async def run(number: int, name: str, arguments: list[Any]) -> None:
        try:
            value = await find(name)(me, *arguments)
            answer = msgspec.msgpack.encode(["done", number, value])
        except Exception as error:
            facts = {k: v for k, v in vars(error).items() if isinstance(v, str | int)}
            kind = type(error).__name__
            answer = msgspec.msgpack.encode(["raised", number, kind, str(error), facts])
        channel.send(answer)

    def on_readable() -> None:
        for message in me.messages():
            if message is None or message[0] == "end":
                ended.set()
            elif message[0] == "go":
                me.go(message[1])
            else:
                task = asyncio.get_running_loop().create_task(run(*message[1:]))
                running.add(task)
                task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_reader(channel, on_readable)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(channel)
    for task in running:
        task.cancel()
    await me.exits.aclose()


def play(channel: socket.socket, request: dict[str, Any]) -> None:
    """Be one process, from here to its end."""
    if request["namespace"]:
        enter_namespace()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(request["deadline"])  # whoever is forgotten leaves nothing behind
    os.environ.update(request["environment"])
    printed = os.open(request["printed"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 2)
    os.dup2(printed, 1)
    os.close(printed)
    channel.setblocking(False)
    factory = uvloop.new_event_loop if request["loop"] == "uvloop" else asyncio.new_event_loop

    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)

    if request["script"]:
        scope = {"__name__": "__main__", "run": run, "tell": Me(channel).tell}
        exec(compile(request["script"], "script", "exec"), scope)
    else:
        run(serve(channel))


def enter_namespace() -> None:
    """Go on as the first process of a pid namespace; the one left behind ends as this one does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    pid = os.fork()
    if pid:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Nursery:
    """Forks processes, and keeps what their ends were for whoever asks."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(64)
        self.children: set[int] = set()

    def serve(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """Serve until standard input ends; in a new process, return what it is to play."""
        while True:
            readable, _, _ = select.select([self.listener, sys.stdin], [], [])
            if sys.stdin in readable:
                for pid in self.children:
                    os.kill(pid, signal.SIGKILL)
                return None
            channel, _ = self.listener.accept()
            request = receive(channel)
            if request is None:
                channel.close()
                continue
            if isinstance(request, dict):
                pid = os.fork()
                if pid == 0:
                    self.listener.close()
                    return channel, request
                self.children.add(pid)
                channel.send(msgspec.msgpack.encode(pid))
            else:
                pid, status = os.waitpid(request[0], 0)
                self.children.discard(pid)
                channel.send(msgspec.msgpack.encode(os.waitstatus_to_exitcode(status)))
            channel.close()


def main() -> None:
    """Load what is slow to load, and begin."""
    torch.set_num_threads(1)
    preload("cpu")
    importlib.import_module("tests.process.steps")
    torch.equal(*[pattern(0, 0, 100)] * 2)  # torch looks at the machine at its first operation
    gc.collect()
    gc.freeze()  # a process that ends looks through what it made, not through all of torch
    nursery = Nursery(sys.argv[1])
    os.write(1, b"ready\n")
    found = nursery.serve()
    if found is None:
        os._exit(0)
    nursery.children.clear()
    play(*found)


if __name__ == "__main__":
    main()
