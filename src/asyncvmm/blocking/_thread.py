"""The one thread of a process that runs an event loop for code that has none.

Work goes there and its outcome stays with it: only "it is over" comes back.  So whoever stops
waiting, out of time or interrupted, cancels the work, learns how it ended, and nothing that was
done meanwhile is lost (inv. 9).  anyio's BlockingPortal is not used for this: a call through it
takes two wake-ups each way, three to four times as long, and a value that comes while its waiter
gives up is dropped.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, ParamSpec, Protocol, TypeVar

from asyncvmm._errors import ArgumentError, ClosedError, LocalProtocolError
from asyncvmm._fds import close_after_fork
from asyncvmm.blocking._call import Call

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("asyncvmm.blocking")

EXIT_SECONDS = 1.0
"""How long what is still open may take to leave in order when the interpreter exits."""


class Opened(Protocol):
    """What stands on the thread and is to be told of its end."""

    async def leave(self) -> None:
        """Leave in order but without waiting for others: the interpreter exits."""

    def forked(self) -> None:
        """Be of no use from now on: this is a forked child's copy."""


class LoopThread:
    """A daemon thread with an event loop, for as long as somebody uses it."""

    def __init__(self) -> None:
        self.opened: set[Opened] = set()
        self.users: set[object] = set()
        """Who needs it: openings, and calls that are under way."""
        self.forked = False
        self._exiting = False
        self.made_in = os.getpid()
        self._begun: Future[asyncio.AbstractEventLoop] = Future()
        self._unwanted = False
        self._thread = threading.Thread(target=self._serve, name="asyncvmm-blocking", daemon=True)
        close_after_fork(self)

    def start(self) -> None:
        """Start it; if that is interrupted, it is to be stopped."""
        self._thread.start()
        self._loop = self._begun.result()

    def _serve(self) -> None:
        _here.is_loop = True
        try:
            loop = _loop_factory()()
        except BaseException as error:
            self._begun.set_exception(error)
            return
        # Not asyncio.Runner: it ends its executor in a new thread, and an interpreter that exits
        # gives none.
        with closing(loop), _Executor(thread_name_prefix="asyncvmm-blocking") as executor:
            loop.set_default_executor(executor)
            loop.run_until_complete(self._live())
            loop.run_until_complete(loop.shutdown_asyncgens())

    async def _live(self) -> None:
        self._stopped = asyncio.Event()
        self._begun.set_result(asyncio.get_running_loop())
        if not self._unwanted:  # looked at after that, for stop() sets it before it looks
            await self._stopped.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def run(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        timeout: float | None = None,
        waits_for: str = "the event loop",
    ) -> T:
        """Have ``work()`` awaited on the loop and return its value, or raise its error.

        After ``timeout`` seconds it is cancelled and TimeoutError raised; likewise if the waiting
        thread is interrupted, by whatever a signal's handler raises.  In both cases it has ended
        when this returns.
        """
        _refuse_on_loop()
        limit = seconds(timeout)
        call = Call(work)
        late = ""
        try:
            self._keep_for(call)
            self._loop.call_soon_threadsafe(call.begin)
            if not call.over.wait(-1 if limit is None else limit):
                late = f"waited {timeout} s for {waits_for}"
                self._end(call)
            return call.outcome(late=late)
        except ClosedError:
            self.leave_quietly()
            raise
        except BaseException:
            self._end(call)
            raise
        finally:
            self.users.discard(call)  # so that it is no user even if the next is interrupted
            let_go(call)

    def _end(self, call: Call[Any]) -> None:
        if call in self.users and not call.over.said:
            self._loop.call_soon_threadsafe(call.cancel)
            call.over.wait()

    def _keep_for(self, call: Call[Any]) -> None:
        """Keep the loop running for a call, whatever is closed meanwhile."""
        with _shared.lock:
            if _shared.thread is not self:
                raise ClosedError("it was closed, and the thread of its loop has ended")
            self.users.add(call)

    def stop(self) -> None:
        """End the loop and its thread, however far it has come; again is a no-op."""
        self._unwanted = True
        if self._begun.done() and self._begun.exception() is None:
            with suppress(RuntimeError):  # the loop is closed
                self._begun.result().call_soon_threadsafe(self._stopped.set)
        # One whose start was interrupted may not be alive yet: it ends as soon as it begins.
        if self._thread.is_alive():
            self._thread.join()

    def leave_quietly(self) -> None:
        """End this thread without a word if everything was closed by the interpreter's exit.

        Only threads that the exit does not wait for are left by then, and of those Python
        prints what they raise.
        """
        if self._exiting:
            raise SystemExit

    async def leave_all(self) -> None:
        """Have everything that is still open leave, as far as it does within the time."""
        self._exiting = True
        await asyncio.gather(*map(_leave, self.opened))

    def close(self) -> None:
        """Mark a forked child's copy: its thread is not there."""
        self.forked = True
        for each in self.opened:
            each.forked()


async def _leave(opened: Opened) -> None:
    try:
        async with asyncio.timeout(EXIT_SECONDS):
            await opened.leave()
    except Exception as error:
        logger.warning("%r did not leave in order when the interpreter exited: %r", opened, error)


_here = threading.local()


def _refuse_on_loop() -> None:
    if getattr(_here, "is_loop", False):
        raise LocalProtocolError(
            "this was called in the thread of asyncvmm's own loop, by a destructor perhaps, and "
            "would wait for itself; call it in a thread of yours"
        )


class _Executor(ThreadPoolExecutor):
    """Threads for the loop's slow calls, which must also be made while the interpreter exits."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have it done in a thread, or at once when executors take no work any more."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: Future[T] = Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except Exception as error:
                done.set_exception(error)
            return done


class _Shared:
    """The thread that all share, if there is one."""

    def __init__(self) -> None:
        # Re-entrant: a destructor may close something inside another's critical section.
        self.lock = threading.RLock()
        self.thread: LoopThread | None = None


_shared = _Shared()


def take(user: object) -> LoopThread:
    """Return the process's loop thread, which stays until ``user`` lets go; the first starts it."""
    _refuse_on_loop()
    with _shared.lock:
        thread = _shared.thread
        if thread is not None:
            thread.users.add(user)
            return thread
        thread = _shared.thread = LoopThread()
        try:
            thread.users.add(user)
            thread.start()
        except BaseException:
            let_go(user)  # within the lock: nobody else is to find half a thread
            raise
        return thread


def let_go(user: object) -> None:
    """Need the thread no more; the last ends it.  Again is a no-op."""
    with _shared.lock:
        thread = _shared.thread
        if thread is not None:
            thread.users.discard(user)
            if not thread.users:
                thread.stop()
                _shared.thread = None


@atexit.register
def _leave_all() -> None:
    """Leave in order what is still open when the interpreter exits, without hanging.

    By now every thread that the interpreter waits for has ended.
    """
    thread = _shared.thread
    if thread is not None:
        thread.run(thread.leave_all)
        _shared.thread = None
        thread.stop()


def _after_fork_in_child() -> None:
    global _shared
    _shared = _Shared()  # the lock may have been held, and the thread is not here


os.register_at_fork(after_in_child=_after_fork_in_child)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def seconds(timeout: object) -> float | None:
    """Check a timeout and return one that the interpreter can wait for."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ArgumentError(
            f"timeout={timeout!r} is no time; give seconds of 0 or more, or None for no limit"
        )
    return min(timeout, threading.TIMEOUT_MAX)
