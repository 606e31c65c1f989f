"""The processes of the tests: those of ``asyncvmm.testing``, with more to begin with."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from asyncvmm._fds import OwnedFd
from asyncvmm.testing import ForkServer, Process, Processes
from tests.patience import PROMPTLY
from tests.process import puppet

__all__ = ["Peers", "fork_server", "kill", "shared_fork_server", "turns", "until"]


class Peers(Processes):
    """The processes of one test; what runs in them gets a :class:`puppet.Me`."""

    def start(  # type: ignore[override]  # an environment has no variable of these names
        self, *, script: str = "", loop: str = "", namespace: bool = False, **environment: str
    ) -> Process:
        """Start one that waits for steps, or runs a script.

        In a ``namespace`` of its own for pids it is a child of the process that is told of here,
        and dies with that.
        """
        if script:
            return self.start_program(puppet.run_script, script, loop=loop, **environment)
        program = puppet.play_in_namespace if namespace else puppet.play
        return self.start_program(program, loop=loop, **environment)


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Have the process that forks the others, with the steps loaded."""
    with ForkServer(["tests.process.steps"]) as server:
        yield server


class _Shared:
    """One fork server for all folders of tests; to pytest each has a fixture of its own."""

    def __init__(self) -> None:
        self._users = 0
        self._stack = ExitStack()

    def __enter__(self) -> ForkServer:
        if not self._users:
            self._server = self._stack.enter_context(fork_server())
        self._users += 1
        return self._server

    def __exit__(self, *exc: object) -> None:
        self._users -= 1
        if not self._users:
            self._stack.close()


shared_fork_server = _Shared()


def kill(pid: int) -> None:
    """Kill a process that no :class:`Process` stands for, and wait for its end."""
    with OwnedFd(os.pidfd_open(pid)) as pidfd:
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
        select.select([pidfd], [], [])


async def until(condition: Callable[[], bool], seconds: float = PROMPTLY) -> None:
    """Look at a condition again and again, for the few that no event tells of."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is looked at tells nobody
            await asyncio.sleep(0.002)


async def turns(count: int = 3) -> None:
    """Let the loop run its ready callbacks."""
    for _ in range(count):
        await asyncio.sleep(0)
