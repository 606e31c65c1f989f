"""How a command ends when something went wrong: one line on standard error and a status."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sys
from collections.abc import Iterator

import typer

from asyncvmm._errors import ArgumentError, AsyncVMMError, DeliveryError

FAILED = 1
MISUSED = 2
INTERRUPTED = 130
"""As shells have it: 128 + SIGINT."""
TERMINATED = 143
"""128 + SIGTERM."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn this library's errors and interruptions into a line and an exit status.

    Anything else is a bug and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    except asyncio.CancelledError:
        _leave("terminated", TERMINATED)
    except (AsyncVMMError, BaseExceptionGroup) as error:
        cause = cause_of(error)
        if not isinstance(cause, AsyncVMMError):
            raise
        status = MISUSED if isinstance(cause, ArgumentError) else FAILED
        _leave(f"{type(cause).__name__}: {cause}", status)


@contextlib.contextmanager
def told_of_a_full_disk() -> Iterator[None]:
    """Turn an output that takes no more into a line and an exit status, like any other failure."""
    try:
        yield  # whatever a command prints is flushed with it
    except OSError as error:
        if error.errno not in _FULL:
            raise
        sys.stderr.write(f"asyncvmm: cannot write the result: {error}\n")
        sys.exit(FAILED)


def cause_of(error: BaseException) -> BaseException:
    """Return the error that says most of those in a group.

    What is not ours comes first, since it is a bug.  A failed delivery is what a lost process
    looks like from further away, so it comes last.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(part) for part in error.exceptions]
    foreign = [cause for cause in causes if not isinstance(cause, AsyncVMMError)]
    telling = [cause for cause in causes if not isinstance(cause, DeliveryError)]
    return (foreign or telling or causes)[0]


def _leave(line: str, status: int) -> None:
    typer.echo(f"asyncvmm: {' '.join(line.split())}", err=True)
    raise typer.Exit(status)
