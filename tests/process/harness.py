"""The processes of the tests: those of ``asyncvmm.testing``, with more to begin with."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncvmm._fds import OwnedFd
from asyncvmm.testing import ForkServer, Process, Processes
from tests.patience import PROMPTLY
from tests.process import puppet

__all__ = ["Peers", "fork_server", "kill", "turns", "until"]


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
