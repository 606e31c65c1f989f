"""A Python that has imported torch already, for the many small programs of the documentation.

Importing torch takes longer than everything that those programs do.  So one process imports it
once and forks for each program; ``python`` on the search path is a client of it, which hands over
its arguments, its folder and its standard streams, and ends as the program ends.
"""

from __future__ import annotations

import array
import ctypes
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

import msgspec

PR_SET_PDEATHSIG = 1
"""As in linux/prctl.h."""

CLIENT = """\
#!{python} -S
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    order = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    fds = array.array("i", [0, 1, 2])
    server.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    sys.exit(int(server.recv(16) or 70))
"""


def install(folder: Path, address: Path) -> None:
    """Put a ``python`` and an ``asyncvmm`` into a folder, both clients of the process there."""
    client = CLIENT.format(python=sys.executable, address=str(address))
    for name, arguments in {"python": "[]", "asyncvmm": "['-m', 'asyncvmm.cli']"}.items():
        text = client.replace("sys.argv[1:]", f"{arguments} + sys.argv[1:]")
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o700)


def main() -> None:
    """Serve until standard input ends."""
    import torch  # noqa: F401 - this is what it is for

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _keep(connection)
            connection.close()


def _keep(connection: socket.socket) -> None:
    """Fork once more, run the program in the child, and tell its client how it ended."""
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fds = array.array("i", bytes(12))
    order, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(12))
    if not order:
        os._exit(0)
    fds = array.array("i", ancillary[0][2])
    program = os.fork()
    if program == 0:
        _end_with_parent()
        connection.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        _run(*msgspec.json.decode(order, type=tuple[list[str], str, dict[str, str]]))
    _, status = os.waitpid(program, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent ends: nothing outlives the tests."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Be the program."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
