"""The processes of one test, and the one that forks them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from asyncvmm._errors import AsyncVMMError
from asyncvmm.testing.here import LARGEST
from asyncvmm.testing.process import ANSWER_SECONDS, Process, name_of

PLAY = "asyncvmm.testing.server:play"


class ForkServer:
    """The process that forks all others, with torch and ``modules`` loaded.

    It takes seconds to start and milliseconds to fork, so have one for many tests.  It holds no
    socket of yours and nothing of asyncvmm is open in it.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="asyncvmm-testing-")
        self._path = f"{self._folder.name}/forks"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncvmm.testing.server", self._path, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,  # Ctrl-C is for the test, which then ends it
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise AsyncVMMError("the fork server did not start; its standard error says why")

    def ask(self, request: object) -> tuple[socket.socket, Any]:
        """Ask for a process, or for the end of one; return the connection and the answer."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(ANSWER_SECONDS)
        channel.connect(self._path)
        channel.send(msgspec.msgpack.encode(request))
        return channel, msgspec.msgpack.decode(channel.recv(LARGEST))

    def close(self) -> None:
        """End it, and every process that it made and that still lives."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Processes:
    """The processes of one test, all of which are gone once it is left.

    ``server`` forks them; without one, one is started, and closed at the end.  No process outlives
    ``deadline`` seconds, whatever becomes of the test.
    """

    def __init__(self, server: ForkServer | None = None, *, deadline: int = 120) -> None:
        self._server = server
        self._own: ForkServer | None = None
        self._deadline = deadline
        self._processes: list[Process] = []
        self._started = 0

    def start(self, *, loop: str = "", **environment: str) -> Process:
        """Start one that waits for functions to run.

        ``loop`` is "asyncio" or "uvloop", by default what the test itself runs on.  It gets this
        process's environment, and ``environment`` on top.  Raises :class:`asyncvmm.AsyncVMMError`
        if there is no server and none can be started.
        """
        return self._start(PLAY, (), loop, environment)

    def start_program(
        self, program: Callable[..., None], *args: Any, loop: str = "", **environment: str
    ) -> Process:
        """Start one that runs ``program(here, *args)`` and ends: a plain function, with no loop."""
        return self._start(name_of(program), args, loop, environment)

    def _start(
        self, program: str, args: Sequence[Any], loop: str, environment: dict[str, str]
    ) -> Process:
        if self._server is None:
            self._server = self._own = ForkServer()
        server = self._server
        if not loop:
            module = type(asyncio.get_running_loop()).__module__
            loop = "uvloop" if module.startswith("uvloop") else "asyncio"
        printed = Path(self._folder.name) / str(self._started)
        self._started += 1
        channel, pid = server.ask(
            {
                "program": program,
                "arguments": args,
                "loop": loop,
                "printed": str(printed),
                "deadline": self._deadline,
                "environment": {**os.environ, **environment},
            }
        )

        def status() -> int:
            asked, found = server.ask([pid])
            asked.close()
            assert isinstance(found, int)
            return found

        process = Process(channel, pid, printed, status)
        self._processes.append(process)
        return process

    async def end(self, process: Process) -> None:
        """Kill one and forget it, so that a long run keeps nothing of it."""
        self._processes.remove(process)
        await process.killed()
        process.close()

    @property
    def pids(self) -> list[int]:
        """Return the numbers of all processes that were not ended."""
        return [process.pid for process in self._processes]

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="asyncvmm-printed-")
        return self

    async def __aexit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for process in tuple(self._processes):
            await self.end(process)
        if self._own is not None:
            self._own.close()
        self._folder.cleanup()
