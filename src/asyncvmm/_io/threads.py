"""Worker threads that make things somebody must give back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def made_in_thread(make: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Return what ``make()`` returns, made in a worker thread.

    A thread cannot be stopped, and what it makes after its waiter has gone would be nobody's: a
    name that stays taken, memory that stays reserved.  So when cancelled this waits for the
    thread, calls ``undo`` (in a thread as well) and is cancelled then.
    """
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(None, make)
    cancelled = await _outlasted(work)
    if cancelled is None:
        return work.result()
    if work.exception() is None:
        undoing = loop.run_in_executor(None, undo, work.result())
        await _outlasted(undoing)
        undoing.result()
    raise cancelled


async def _outlasted(work: asyncio.Future[T]) -> asyncio.CancelledError | None:
    """Wait until the work is done, come what may; return the last cancellation meanwhile."""
    cancelled = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
