"""Work that one thread has an event loop do in another, and waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from asyncvmm._errors import ClosedError

T = TypeVar("T")


class Over:
    """Said once, on the loop, and waited for by one thread.

    A lock alone: ``threading.Event`` is Python code around one, and where a signal's handler raises
    in the middle of that it stays locked, and the loop would stand still before it for ever.
    """

    __slots__ = ("_gate", "said")

    def __init__(self) -> None:
        self.said = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def say(self) -> None:
        """Let the waiting thread go on; again is a no-op."""
        if not self.said:
            self.said = True
            self._gate.release()

    def wait(self, limit: float = -1) -> bool:
        """Wait for it, for ``limit`` seconds at most if that is not negative; say whether it is."""
        return self.said or self._gate.acquire(timeout=limit) or self.said


class Call(Generic[T]):
    """One piece of work: begun and cancelled on the loop, waited for elsewhere."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._unwanted = False
        self.over = Over()

    def begin(self) -> None:
        """Begin, on the loop, unless it was cancelled before."""
        if self._unwanted:
            self.over.say()
            return
        self._task = asyncio.get_running_loop().create_task(self._do())
        self._task.add_done_callback(lambda _: self.over.say())

    async def _do(self) -> T:
        return await self._work()

    def cancel(self) -> None:
        """Cancel it, on the loop; what it can do without waiting is done before that."""
        self._unwanted = True
        if self._task is not None:
            asyncio.get_running_loop().call_soon(self._task.cancel)
        else:
            self.over.say()

    def outcome(self, *, late: str) -> T:
        """Return or raise what came of it; TimeoutError with the text ``late`` if it was too late.

        What came of it in the last moment counts, not that the time was up.
        """
        if self._task is None or self._task.cancelled():
            if late:
                raise TimeoutError(late)
            raise ClosedError("it was closed in another thread meanwhile")
        return self._task.result()
