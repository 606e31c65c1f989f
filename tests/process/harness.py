"""The fault harness: processes that are started, stopped, continued and killed at named points.

A :class:`Peer` is one such process.  It does *steps* (functions of ``tests.process.steps``) as the
test tells it, tells the test when it reaches a point, and stands there until the test says go.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec

from asyncvmm._fds import OwnedFd
from tests.process.counters import Counters
from tests.process.puppet import LARGEST, Me

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_SECONDS = 30
"""How long one step may take; far more than any does, so that a hang fails and nothing else."""


class Raised(Exception):
    """A step raised in its process.  ``kind`` names the type, ``facts`` are its attributes."""

    def __init__(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
        self.facts = facts


class Ended(Exception):
    """The process ended while a step was asked of it."""


class Nursery:
    """The process that forks all others; see ``puppet``.  One per test run; it holds no socket."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "nursery")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.puppet", self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError("the nursery did not start; its standard error says why")

    def ask(self, request: object) -> tuple[socket.socket, Any]:
        """Ask for a process, or for the end of one; return the connection and the answer."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(ANSWER_SECONDS)
        channel.connect(self.path)
        channel.send(msgspec.msgpack.encode(request))
        return channel, msgspec.msgpack.decode(channel.recv(LARGEST))

    def close(self) -> None:
        """End it, and every process that it made and that still lives."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Peer:
    """One other process."""

    def __init__(self, nursery: Nursery, request: dict[str, Any]) -> None:
        self._nursery = nursery
        self._channel, self.pid = nursery.ask(request)
        self._channel.setblocking(False)
        self._pidfd = OwnedFd(os.pidfd_open(self.pid))
        self._printed = Path(request["printed"])
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._facts: dict[str, list[dict[str, Any]]] = {}
        self._arrived = asyncio.Event()
        self._gone = False
        self._status: int | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._on_readable)

    # -- steps -------------------------------------------------------------------------------

    def begin(
        self, step: Callable[Concatenate[Me, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Have a step begun now; await what comes of it later, or never."""
        return self.begin_long(ANSWER_SECONDS, step, *args, **kwargs)

    def begin_long(
        self,
        seconds: float,
        step: Callable[Concatenate[Me, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> asyncio.Future[T]:
        """Have a step begun that may take so many seconds."""
        assert not kwargs, "steps take positional arguments"
        self._number += 1
        answer: asyncio.Future[T] = self._loop.create_future()
        self._answers[self._number] = answer
        name = f"{step.__module__}:{step.__qualname__}"
        deadline = self._loop.call_later(seconds, self._late, answer, name)

        def over(answer: asyncio.Future[T]) -> None:
            deadline.cancel()
            answer.cancelled() or answer.exception()  # nobody has to ask

        answer.add_done_callback(over)
        if self._gone:
            answer.set_exception(Ended(f"process {self.pid} had ended before {name}"))
        else:
            self._say(["call", self._number, name, args])
        return answer

    def _late(self, answer: asyncio.Future[Any], name: str) -> None:
        if not answer.done():
            answer.set_exception(TimeoutError(f"{name} took too long"))

    async def call(
        self, step: Callable[Concatenate[Me, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Have a step done; return its value, or raise :class:`Raised` or :class:`Ended`."""
        return await self.begin(step, *args, **kwargs)

    async def at(self, point: str) -> dict[str, Any]:
        """Wait until the process has reached a point; return what it said there."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while not self._facts.get(point):
                if self._gone:
                    raise Ended(f"process {self.pid} ended before it reached {point!r}")
                self._arrived.clear()
                await self._arrived.wait()
        return self._facts[point].pop(0)

    def reached(self, point: str) -> int:
        """Return how often it told of a point that nobody has waited for."""
        return len(self._facts.get(point, ()))

    def go(self, point: str) -> None:
        """Let the process go on from a point."""
        self._say(["go", point])

    def _say(self, message: list[Any]) -> None:
        try:
            self._channel.send(msgspec.msgpack.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            self._lose()

    def _on_readable(self) -> None:
        try:
            data = self._channel.recv(LARGEST)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._lose()
            return
        what, *rest = msgspec.msgpack.decode(data)
        if what == "at":
            self._facts.setdefault(rest[0], []).append(rest[1])
            self._arrived.set()
            return
        answer = self._answers.pop(rest[0])
        if answer.done():
            return
        if what == "done":
            answer.set_result(rest[1])
        else:
            answer.set_exception(Raised(*rest[1:]))

    def _lose(self) -> None:
        if self._gone:
            return
        self._gone = True
        self._loop.remove_reader(self._channel)
        self._arrived.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Ended(f"process {self.pid} ended"))
        self._answers.clear()

    # -- its life ----------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; safe however long it has been dead."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd.fileno(), number)

    def stop(self) -> None:
        """Stop it, and return once it stands."""
        self.signal(signal.SIGSTOP)
        while self.state not in "TtZ":
            pass

    def cont(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it; :meth:`died` waits for its end."""
        self.signal(signal.SIGKILL)

    @property
    def state(self) -> str:
        """Return the letter that the kernel has for what it does."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    @property
    def dead(self) -> bool:
        """Say whether its process is gone."""
        poll = select.poll()
        poll.register(self._pidfd.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def died(self) -> None:
        """Wait for its end."""
        dead = asyncio.Event()
        self._loop.add_reader(self._pidfd.fileno(), dead.set)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await dead.wait()
        finally:
            self._loop.remove_reader(self._pidfd.fileno())

    async def killed(self) -> None:
        """Kill it and wait for its end."""
        self.kill()
        await self.died()

    async def ends(self) -> int:
        """Let it end in order if it has not; return its exit status, negative for a signal."""
        if not self._gone:
            self._say(["end"])
        await self.died()
        return self.status()

    def status(self) -> int:
        """Return the exit status of a process that has ended."""
        if self._status is None:
            channel, status = self._nursery.ask([self.pid])
            channel.close()
            assert isinstance(status, int)
            self._status = status
        return self._status

    @property
    def printed(self) -> list[str]:
        """Return the lines that it wrote to standard output and error."""
        return self._printed.read_text().splitlines() if self._printed.exists() else []

    def close(self) -> None:
        """Let go of a dead one; the nursery then does, too."""
        self.status()
        self._lose()
        self._printed.unlink(missing_ok=True)
        self._channel.close()
        self._pidfd.close()

    # -- counters ----------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Count what it has."""
        return Counters.of(self.pid)


def kill(pid: int) -> None:
    """Kill a process that is nobody's :class:`Peer`, and wait for its end."""
    with OwnedFd(os.pidfd_open(pid)) as pidfd:
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
        select.select([pidfd], [], [])


class Peers:
    """The processes of one test."""

    def __init__(self, nursery: Nursery, folder: Path, *, deadline: int = 120) -> None:
        self._nursery = nursery
        self._folder = folder
        self._deadline = deadline
        self._peers: list[Peer] = []
        self._started = 0

    def start(
        self, *, script: str = "", loop: str = "", namespace: bool = False, **environment: str
    ) -> Peer:
        """Start one, with the same kind of event loop as the test has unless told otherwise.

        In a ``namespace`` of its own for pids it is a child of the process that is told of here,
        and dies with that.
        """
        if not loop:
            module = type(asyncio.get_running_loop()).__module__
            loop = "uvloop" if module.startswith("uvloop") else "asyncio"
        request = {
            "loop": loop,
            "printed": str(self._folder / f"printed-{self._started}"),
            "deadline": self._deadline,
            "namespace": namespace,
            "environment": {**os.environ, **environment},
            "script": script,
        }
        self._started += 1
        peer = Peer(self._nursery, request)
        self._peers.append(peer)
        return peer

    async def end(self, peer: Peer) -> None:
        """Kill one and forget it, so that a long run keeps nothing of it."""
        self._peers.remove(peer)
        await peer.killed()
        peer.close()

    @property
    def pids(self) -> list[int]:
        """Return the numbers of all processes started."""
        return [peer.pid for peer in self._peers]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for peer in self._peers:
            peer.kill()
        for peer in tuple(self._peers):
            await self.end(peer)


async def until(condition: Callable[[], bool], seconds: float = ANSWER_SECONDS) -> None:
    """Look at a condition again and again, for the few that no event tells of."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is looked at tells nobody
            await asyncio.sleep(0.002)


async def turns(count: int = 3) -> None:
    """Let the loop run its ready callbacks."""
    for _ in range(count):
        await asyncio.sleep(0)
