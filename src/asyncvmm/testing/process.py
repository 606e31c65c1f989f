"""One other process, as the test sees it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from asyncvmm._errors import ArgumentError, AsyncVMMError
from asyncvmm._fds import OwnedFd
from asyncvmm.testing.counters import Counters
from asyncvmm.testing.here import LARGEST, count_events

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_SECONDS = 30
"""How long one function may take; far more than any does, so that a hang fails and nothing else."""


class ProcessRaisedError(AsyncVMMError):
    """A function raised in its process.

    ``kind`` names the type, ``text`` is its text, ``facts`` are its attributes that are text or
    numbers.
    """

    def __init__(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
        self.facts = facts


class ProcessEndedError(AsyncVMMError):
    """The process ended before it answered or reached a point.  ``pid`` is its number."""

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


def name_of(function: Callable[..., Any]) -> str:
    """Return ``module:name``, by which another process finds a function."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise ArgumentError(
            f"{module}.{name} cannot be imported by another process; give a function that is "
            f"defined at the top of a module other than __main__"
        )
    return f"{module}:{name}"


class Process:
    """One other process; :meth:`Processes.start` makes it.

    It runs functions as the test says, tells when it reaches a point, and is stopped, continued
    and killed.  ``pid`` is its number.
    """

    def __init__(
        self, channel: socket.socket, pid: int, printed: Path, status: Callable[[], int]
    ) -> None:
        self.pid = pid
        self._channel = channel
        self._channel.setblocking(False)
        self._pidfd = OwnedFd(os.pidfd_open(pid))
        self._printed = printed
        self._ask_status = status
        self._status: int | None = None
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._facts: dict[str, list[dict[str, Any]]] = {}
        self._failed: ProcessRaisedError | None = None
        self._arrived = asyncio.Event()
        self._gone = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._on_readable)

    # -- what it does ------------------------------------------------------------------------

    def begin(
        self,
        function: Callable[Concatenate[Any, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> asyncio.Future[T]:
        """Have it begin ``await function(here, *args)`` now; the value can be awaited later.

        Arguments are positional, and they and the value are plain data.  The future raises
        :class:`ProcessRaisedError`, :class:`ProcessEndedError`, or TimeoutError after 30 seconds.
        Cancelling it leaves the function running.  Raises :class:`asyncvmm.ArgumentError` for a
        function that cannot be imported there.
        """
        return self.begin_long(ANSWER_SECONDS, function, *args, **kwargs)

    def begin_long(
        self,
        seconds: float,
        function: Callable[Concatenate[Any, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> asyncio.Future[T]:
        """Do as :meth:`begin` with a function that may take so many seconds."""
        if kwargs:
            raise ArgumentError(f"give {', '.join(kwargs)} as positional arguments")
        name = name_of(function)
        self._number += 1
        answer: asyncio.Future[T] = self._loop.create_future()
        self._answers[self._number] = answer
        deadline = self._loop.call_later(seconds, _late, answer, name)

        def over(answer: asyncio.Future[T]) -> None:
            deadline.cancel()
            answer.cancelled() or answer.exception()  # nobody has to ask

        answer.add_done_callback(over)
        if self._gone:
            answer.set_exception(
                ProcessEndedError(f"process {self.pid} had ended before {name}", self.pid)
            )
        else:
            self._say(["call", self._number, name, args])
        return answer

    async def call(
        self,
        function: Callable[Concatenate[Any, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Have it run a function, and return the value; see :meth:`begin`."""
        return await self.begin(function, *args, **kwargs)

    async def at(self, point: str) -> dict[str, Any]:
        """Wait until it has reached a point; return the facts that it told there.

        Each arrival is returned once.  Raises :class:`ProcessEndedError`; what the last function
        raised there, if none runs any more; or TimeoutError after 30 seconds.
        """
        async with asyncio.timeout(ANSWER_SECONDS):
            while not self._facts.get(point):
                if self._failed is not None and not self._answers:
                    raise self._failed
                if self._gone:
                    raise ProcessEndedError(
                        f"process {self.pid} ended before it reached {point!r}", self.pid
                    )
                self._arrived.clear()
                await self._arrived.wait()
        return self._facts[point].pop(0)

    def reached(self, point: str) -> int:
        """Return how often it told of a point that nobody has waited for."""
        return len(self._facts.get(point, ()))

    def go(self, point: str) -> None:
        """Let it go on from a point where it waits."""
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
        self._failed = None if what == "done" else ProcessRaisedError(*rest[1:])
        self._arrived.set()
        if answer.done():
            return
        if self._failed is None:
            answer.set_result(rest[1])
        else:
            answer.set_exception(self._failed)

    def _lose(self) -> None:
        if self._gone:
            return
        self._gone = True
        self._loop.remove_reader(self._channel)
        self._arrived.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ProcessEndedError(f"process {self.pid} ended", self.pid))
        self._answers.clear()

    # -- its life ----------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; safe however long it has been dead."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd.fileno(), number)

    def stop(self) -> None:
        """Stop it (SIGSTOP), and return once it stands."""
        self.signal(signal.SIGSTOP)
        while self._state not in "TtZ":
            pass

    def resume(self) -> None:
        """Let it continue (SIGCONT)."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it (SIGKILL) and return at once; :meth:`died` waits for its end."""
        self.signal(signal.SIGKILL)

    @property
    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    @property
    def dead(self) -> bool:
        """Say whether it has ended."""
        poll = select.poll()
        poll.register(self._pidfd.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def died(self) -> None:
        """Wait for its end; raise TimeoutError after 30 seconds."""
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
            self._status = self._ask_status()
        return self._status

    @property
    def printed(self) -> list[str]:
        """Return the lines that it wrote to standard output and error."""
        return self._printed.read_text().splitlines() if self._printed.exists() else []

    def counters(self) -> Counters:
        """Count its descriptors, mappings, threads and memory."""
        return Counters.of(self.pid)

    async def events(self) -> int:
        """Return how many interprocess CUDA events it has."""
        return await self.call(count_events)

    def close(self) -> None:
        """Let go of a dead one and of what it printed."""
        self.status()
        self._lose()
        self._printed.unlink(missing_ok=True)
        self._channel.close()
        self._pidfd.close()


def _late(answer: asyncio.Future[Any], name: str) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError(f"{name} took too long"))
