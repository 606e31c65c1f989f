"""Work that one thread has an event loop do in another, and waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from asyncvmm._errors import ClosedError

T = TypeVar("T")


class Call(Generic[T]):
    """One piece of work: begun and cancelled on the loop, waited for elsewhere."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._unwanted = False
        self.over = threading.Event()

    def begin(self) -> None:
        """Begin, on the loop, unless it was cancelled before."""
        if self._unwanted:
            self.over.set()
            return
        self._task = asyncio.get_running_loop().create_task(self._do())
        self._task.add_done_callback(lambda _: self.over.set())

    async def _do(self) -> T:
        return await self._work()

    def cancel(self) -> None:
        """Cancel it, on the loop; what it can do without waiting is done before that."""
        self._unwanted = True
        if self._task is not None:
            asyncio.get_running_loop().call_soon(self._task.cancel)
        else:
            self.over.set()

    def outcome(self, *, late: str) -> T:
        """Return or raise what came of it; TimeoutError with the text ``late`` if it was too late.

        What came of it in the last moment counts, not that the time was up.
        """
        if self._task is None or self._task.cancelled():
            if late:
                raise TimeoutError(late)
            raise ClosedError("it was closed in another thread meanwhile")
        return self._task.result()
