"""What runs in the other processes: steps, or a script, in a pid namespace or not."""

from __future__ import annotations

import ctypes
import logging
import os
import signal

import asyncvmm
from asyncvmm.testing import Here
from asyncvmm.testing.server import serve
from tests.patience import raise_limits

CLONE_NEWPID = 0x2000_0000
PR_SET_PDEATHSIG = 1

raise_limits()


class Me(Here):
    """What a step gets: what this process has, and the way back to the test."""

    exporter: asyncvmm.Exporter
    consumer: asyncvmm.Consumer

    def __init__(self, here: Here) -> None:
        super().__init__(here.channel, here.loop_factory)
        self.acks: list[asyncvmm.Acknowledgement] = []
        self.batches: list[asyncvmm.Batch] = []


def play(here: Here) -> None:
    """Do one step after another as the test says; what is logged counts as printed."""
    logging.basicConfig(format="%(message)s")
    here.run(serve(Me(here)))


def run_script(here: Here, source: str) -> None:
    """Be a program, which may ``run`` a coroutine and ``tell`` the test of a point."""
    scope = {"__name__": "__main__", "run": here.run, "tell": here.tell}
    exec(compile(source, "script", "exec"), scope)


def play_in_namespace(here: Here) -> None:
    """Go on as the first process of a pid namespace; the one left behind ends as this one does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    pid = os.fork()
    if pid:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    play(here)
