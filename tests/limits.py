"""A test that hangs fails by itself, and the others run on.

pytest-timeout is the last resort: it ends the whole process, and with it the report.  Its other
method, a signal, is swallowed by uvloop.  So a test is ended from inside a little earlier: a
coroutine by its own loop, a function by a signal, which ends whatever the main thread waits for.
"""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")

SHARE = 0.8
"""Of the time that pytest-timeout gives a test."""


def seconds_of(item: pytest.Item) -> float:
    """Return how long a test may take; 0 for as long as it likes, as with ``--timeout=0``."""
    given: Any = item.config.getoption("timeout", None)
    if given is None:
        marker = item.get_closest_marker("timeout")
        given = marker.args[0] if marker else item.config.getini("timeout")
    return SHARE * float(given or 0)


def limited(function: Callable[P, Awaitable[T]], seconds: float) -> Callable[P, Awaitable[T]]:
    """Have a coroutine function be cancelled after so many seconds."""

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        async with asyncio.timeout(seconds or None):
            return await function(*args, **kwargs)

    return run


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so many seconds."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
