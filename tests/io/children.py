"""Other processes for the tests: they run until their standard input ends, whatever happens."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

LISTEN = """
    import socket, sys
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(sys.argv[1].replace("@", "\\0", 1))
    sock.listen()
    print("ready", flush=True)
    sys.stdin.read()
"""
"""A bare program that listens on the path, or the abstract name, of its argument."""

Child: TypeAlias = "subprocess.Popen[str]"


@contextmanager
def child(program: str, *arguments: str, bare: bool = False) -> Iterator[Child]:
    """Start a process that runs ``program``; it is killed and reaped at the end.

    The program says "ready" on standard output when the test may go on, and should end with its
    standard input, so that nothing is left even if this process is killed.  A ``bare`` one
    knows the standard library only, and starts several times as fast.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-W", "error"),
            *(["-I", "-S"] if bare else []),
            *("-c", textwrap.dedent(program), *arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            line = process.stdout.readline()
            if line != "ready\n":
                raise AssertionError(f"the child process said {line!r} instead of ready")
            yield process
        finally:
            process.kill()
            process.wait()
