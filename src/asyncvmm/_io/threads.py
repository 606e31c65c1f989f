"""Slow calls in worker threads, also where no thread can be had.

A process may not have another thread (``ulimit -u``, a container's pids limit), and an interpreter
that ends gives none.  A call is then made at once, where it is asked for: the loop stands still
for as long as it takes, which is better than a pool that cannot grow, or never closes.

An executor does not do: it keeps the work that it could not begin, and does it later, when a
thread can be had and nobody knows of it any more.  And the loop's own is everybody's: a program
that waits in its threads for a queue would keep consumers from coming in.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, ParamSpec, TypeVar

from asyncvmm._logs import Once

P = ParamSpec("P")
T = TypeVar("T")

_once = Once(logging.getLogger("asyncvmm.io"))


class _Work(Generic[T]):
    """A call that is made once, by whoever begins it first; ``outcome`` tells of its end."""

    __slots__ = ("_calls", "outcome")

    def __init__(self, call: Callable[[], T]) -> None:
        self._calls = [call]
        self.outcome: Future[T] = Future()

    def __call__(self) -> None:
        try:
            call = self._calls.pop()
        except IndexError:
            return
        if not self.outcome.set_running_or_notify_cancel():
            return
        try:
            self.outcome.set_result(call())
        except BaseException as error:
            self.outcome.set_exception(error)
            del self  # its frame is in the error's traceback, and would keep both


def begin(call: Callable[[], T], executor: Executor | None = None) -> asyncio.Future[T]:
    """Begin a slow call in a thread of the executor, or of its own; return its outcome to be.

    Where no thread can be had it is over when this returns.
    """
    work = _Work(call)
    try:
        if executor is None:
            threading.Thread(target=work, name="asyncvmm-call").start()
        else:
            executor.submit(work)
    except RuntimeError as error:
        if threading.main_thread().is_alive():  # else the interpreter ends, which is no news
            _once.warning("thread", "no thread can be had, so slow calls keep the loop: %s", error)
        work()  # an executor that comes back to it finds it done
    return asyncio.wrap_future(work.outcome)


async def in_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a slow call returns.  Cancelled, it leaves the call to its end."""
    return await begin(lambda: call(*args, **kwargs))


async def made_in_thread(make: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Return what ``make()`` returns, made in a worker thread.

    A thread cannot be stopped, and what it makes after its waiter has gone would be nobody's: a
    name that stays taken, memory that stays reserved.  So when cancelled this waits for the
    thread, calls ``undo`` (in a thread as well) and is cancelled then.
    """
    work = begin(make)
    cancelled = await _outlasted(work)
    if cancelled is None:
        return work.result()
    if work.exception() is None:
        made = work.result()
        undoing = begin(lambda: undo(made))
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
