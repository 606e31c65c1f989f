"""Run a coroutine on the loop the user chose, ended in order by Ctrl-C and by SIGTERM alike."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, TypeVar

from asyncvmm._errors import AsyncVMMError

T = TypeVar("T")


class LoopChoice(StrEnum):
    """Which event loop to run on; ``auto`` is the faster of the two."""

    AUTO = "auto"
    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"


def run(work: Coroutine[Any, Any, T], choice: LoopChoice) -> T:
    """Run ``work`` to its end.  SIGTERM cancels it, as Ctrl-C does, so that it tidies up.

    Raises KeyboardInterrupt after Ctrl-C and asyncio.CancelledError after SIGTERM.
    """
    with asyncio.Runner(loop_factory=_factory(choice)) as runner:
        return runner.run(_interruptible(work))


def _factory(choice: LoopChoice) -> Callable[[], asyncio.AbstractEventLoop]:
    if choice is LoopChoice.ASYNCIO:
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    assert task is not None  # a coroutine that runs always has one
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    except BaseExceptionGroup as group:
        # Peers that were left in the middle complain; that follows from the interruption.
        if task.cancelling() and group.split(AsyncVMMError)[1] is None:
            raise asyncio.CancelledError from group
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
