"""What a blocking consumer and a blocking exporter have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from asyncvmm._errors import ClosedError, ForkError
from asyncvmm.blocking._thread import LoopThread, let_go

T = TypeVar("T")


class Facade:
    """Has the async object's methods done on the loop's thread, while that may be."""

    _what: ClassVar[str]

    def __init__(self, thread: LoopThread, user: object) -> None:
        self._thread = thread
        self._user = user  # in whose name the thread is needed
        self._closed = False
        thread.opened.add(self)

    async def leave(self) -> None:
        """Not for users: leave when the interpreter exits."""
        raise NotImplementedError

    def forked(self) -> None:
        """Not for users: this is a forked child's copy now."""

    def _check(self) -> None:
        if self._thread.forked:
            raise ForkError(self._what, self._thread.made_in, os.getpid())
        if self._closed:
            raise ClosedError(f"this {self._what} was closed")

    def _run(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        timeout: float | None = None,
        waits_for: str = "the event loop",
    ) -> T:
        self._check()
        return self._thread.run(work, timeout, waits_for)

    def _close(self, leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Leave by ``leave``, once; in a forked child there is nothing to leave."""
        if self._closed or self._thread.forked:
            return
        self._closed = True
        try:
            self._thread.run(leave)
        except BaseException:
            self._thread.run(self.leave)  # it may not have begun; again is a no-op
            raise
        finally:
            try:
                self._thread.opened.discard(self)
                let_go(self._user)
            except BaseException:
                let_go(self._user)  # it may have been left in the middle, or not begun
                raise
