"""``python -m asyncvmm.testing.server SOCKET MODULE...``: the process that forks the others.

It has torch, asyncvmm and the modules loaded, and forks one process per connection to its socket,
which takes milliseconds instead of seconds.  It has one thread and nothing of asyncvmm is open in
it, so its children are as good as new.  They end as any interpreter does, by falling off the end
of this file.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import uvloop

from asyncvmm._tensors import preload
from asyncvmm.testing.here import Here, receive, send
from asyncvmm.testing.patterns import pattern


class Server:
    """Forks processes, and keeps what their ends were for whoever asks."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(64)
        self.children: set[int] = set()

    def serve(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """Serve until standard input ends; in a new process, return what it is to do."""
        while True:
            readable, _, _ = select.select([self.listener, sys.stdin], [], [])
            if sys.stdin in readable:
                for pid in self.children:
                    os.kill(pid, signal.SIGKILL)
                return None
            channel, _ = self.listener.accept()
            request = receive(channel)
            if isinstance(request, dict):
                pid = os.fork()
                if pid == 0:
                    self.listener.close()
                    self.children.clear()
                    return channel, request
                self.children.add(pid)
                channel.send(msgspec.msgpack.encode(pid))
            elif request is not None:
                pid, status = os.waitpid(request[0], 0)
                self.children.discard(pid)
                channel.send(msgspec.msgpack.encode(os.waitstatus_to_exitcode(status)))
            channel.close()


def find(name: str) -> Callable[..., Any]:
    """Return the function ``module:name``."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]  # the test looked that it is one


async def serve(here: Here) -> None:
    """Run what the test says until it says "end" or is gone."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    async def run(number: int, name: str, arguments: list[Any]) -> None:
        try:
            value = await find(name)(here, *arguments)
            answer = msgspec.msgpack.encode(["done", number, value])
        except Exception as error:
            facts = {k: v for k, v in vars(error).items() if isinstance(v, str | int)}
            kind = type(error).__name__
            answer = msgspec.msgpack.encode(["raised", number, kind, str(error), facts])
        send(here.channel, answer)

    def on_readable() -> None:
        for message in here._messages():
            if message is None or message[0] == "end":
                ended.set()
            elif message[0] == "go":
                here._go(message[1])
            else:
                task = loop.create_task(run(*message[1:]))
                running.add(task)
                task.add_done_callback(running.discard)

    loop.add_reader(here.channel, on_readable)
    await ended.wait()
    loop.remove_reader(here.channel)
    for task in running:
        task.cancel()
    await here.exits.aclose()


def play(here: Here) -> None:
    """Be a process that runs what the test says."""
    here.run(serve(here))


def begin(channel: socket.socket, request: dict[str, Any]) -> None:
    """Be one process, from here to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(request["deadline"])  # whoever is forgotten leaves nothing behind
    os.environ.update(request["environment"])
    printed = os.open(request["printed"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 2)
    os.dup2(printed, 1)
    os.close(printed)
    channel.setblocking(False)
    factory = uvloop.new_event_loop if request["loop"] == "uvloop" else asyncio.new_event_loop
    find(request["program"])(Here(channel, factory), *request["arguments"])


def main() -> None:
    """Load what is slow to load, and begin."""
    torch.set_num_threads(1)
    preload("cpu")
    for module in sys.argv[2:]:
        importlib.import_module(module)
    torch.equal(*[pattern(0, 0, 100)] * 2)  # torch looks at the machine at its first operation
    gc.collect()
    gc.freeze()  # a process that ends looks through what it made, not through all of torch
    server = Server(sys.argv[1])
    os.write(1, b"ready\n")
    found = server.serve()
    if found is None:
        os._exit(0)
    begin(*found)


if __name__ == "__main__":
    main()
