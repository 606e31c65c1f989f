"""The primary context of one GPU, and undoing in order.

A thread has its own current context, so nothing here relies on the one that happens to be
current: every call that depends on it is made inside :meth:`PrimaryContext.current`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import ParamSpec, TypeVar

from asyncvmm._backends import driver
from asyncvmm._errors import BackendError, ForkError
from asyncvmm._fds import close_after_fork

P = ParamSpec("P")
T = TypeVar("T")


class PrimaryContext:
    """One reference to a GPU's primary context, the one that torch uses too."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._handle = driver.context_retain(device)
        self._number = int(self._handle)
        self._pid = os.getpid()
        self._retained = True
        self.forked = False
        """True in a child of the process that made it, where no call may be made."""
        close_after_fork(self)

    @property
    def device(self) -> int:
        """The GPU's number in this process."""
        return self._device

    def is_current(self) -> bool:
        """Say whether it is the calling thread's current context."""
        return driver.context_current() == self._number

    def pushed_for(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make it current for one call: the short way, for what every hand-off does."""
        driver.context_push(self._handle)
        try:
            return call(*args, **kwargs)
        finally:
            driver.context_pop()

    @contextmanager
    def pushed(self) -> Iterator[None]:
        """Make the context current on the calling thread for as long as this lasts."""
        driver.context_push(self._handle)
        try:
            yield
        finally:
            driver.context_pop()

    def current(self) -> AbstractContextManager[None]:
        """Do the same, but push nothing where it is current already."""
        return nullcontext() if self.is_current() else self.pushed()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Make it current, and let graphs be captured in other threads meanwhile."""
        with self.current(), driver.relaxed_capture():
            yield

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` while :meth:`working`."""
        with self.working():
            return function(*args, **kwargs)

    def close(self) -> None:
        """Mark a forked child's copy as one through which no call may be made."""
        self.forked = True

    def check(self, what: str) -> None:
        """Raise :class:`asyncvmm.ForkError` in a forked child."""
        if self.forked:
            raise ForkError(what, self._pid, os.getpid())

    def release(self) -> None:
        """Give the reference back; again is a no-op."""
        if self._retained:
            driver.context_release(self._device)
            self._retained = False


class Undo(ExitStack):
    """Steps that undo a creation, newest first, unless :meth:`keep` is called.

    A step that fails is noted on the error that caused the undoing and never replaces it; the
    steps after it are still taken.
    """

    def add(self, step: Callable[..., object], *args: object) -> None:
        """Have ``step(*args)`` called if the creation fails from here on."""

        def exit_(
            kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
        ) -> bool:
            try:
                step(*args)
            except BackendError as failed:
                if error is None:
                    raise
                error.add_note(f"undoing it failed as well: {failed}")
            return False

        self.push(exit_)

    def keep(self) -> None:
        """Keep what was made: no step is taken."""
        self.pop_all()


class Teardown:
    """Steps of a close: each is tried, whatever became of the others."""

    def __init__(self) -> None:
        self.errors: list[BackendError] = []

    def step(self, call: Callable[..., object], *args: object) -> bool:
        """Call it; say whether it worked."""
        try:
            call(*args)
        except BackendError as error:
            self.errors.append(error)
            return False
        return True

    def finish(self) -> None:
        """Raise the first error, if there was one, with the others as its notes."""
        if not self.errors:
            return
        first, *others = self.errors
        for other in others:
            first.add_note(f"closing failed further: {other}")
        raise first
