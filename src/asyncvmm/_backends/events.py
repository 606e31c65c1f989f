"""Interprocess events: made, opened, recorded, waited for and asked.

A process can hold 4,096 of them (measured on an H200, driver 580); the driver then says "out of
memory", which misleads, so they are counted here first (field report 7).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

from asyncvmm._backends import driver
from asyncvmm._backends.contexts import PrimaryContext, Undo
from asyncvmm._errors import BackendError, ClosedError, RemoteProtocolError

P = ParamSpec("P")
T = TypeVar("T")

MAX_EVENTS = 4096
"""Interprocess events one process can hold, its own and opened ones together."""

_FIRST_REAL_STREAM = 3
"""Below it are the default stream (0) and its two aliases (1 legacy, 2 per thread): they mean a
stream of whichever context is current."""

_CONTEXT_CODES = frozenset(
    ("CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_CONTEXT_IS_DESTROYED")
)


class Budget:
    """How many interprocess events live in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.live = 0

    def take(self) -> None:
        """Count one more; raise where the driver would run out."""
        with self._lock:
            if self.live >= MAX_EVENTS:
                raise BackendError(
                    f"{self.live:,} interprocess events are in use here and a process can hold no "
                    f"more than {MAX_EVENTS:,}: one for each slot, and one for each slot and "
                    f"consumer; open the exporter with fewer slots or attach fewer consumers",
                    call="cuEventCreate",
                    code="too_many_events",
                )
            self.live += 1

    def give_back(self) -> None:
        """Count one less."""
        with self._lock:
            self.live -= 1


budget = Budget()


class Event:
    """One event with one owner; also the fence of its last record.

    Any thread may use it.  The lock makes sure that :meth:`destroy` never pulls it from under a
    call in another thread, such as the watcher's; nothing under it blocks.
    """

    __slots__ = ("_context", "_counted", "_handle", "_lock", "recorded")

    def __init__(self, context: PrimaryContext, handle: Any, *, counted: bool) -> None:
        self._context = context
        self._handle = handle
        self._counted = counted
        self._lock = threading.Lock()
        self.recorded = False

    @classmethod
    def create(cls, context: PrimaryContext) -> Self:
        """Make a new one on the context's GPU that other processes can open."""
        return cls._counting(context, driver.event_create, interprocess=True)

    @classmethod
    def open(cls, context: PrimaryContext, handle: bytes) -> Self:
        """Open another process's by its 64-byte handle."""
        return cls._counting(context, driver.event_open, handle)

    @classmethod
    def create_local(cls, context: PrimaryContext) -> Self:
        """Make one for this process alone; those do not count."""
        return cls(context, _made(context, driver.event_create, interprocess=False), counted=False)

    @classmethod
    def _counting(
        cls, context: PrimaryContext, make: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
    ) -> Self:
        budget.take()
        try:
            return cls(context, _made(context, make, *args, **kwargs), counted=True)
        except BackendError as error:
            budget.give_back()
            raise _explained(error) from error.__cause__

    def handle(self) -> bytes:
        """Return the 64 bytes by which another process opens it."""
        with self._lock:
            return self._context.call(driver.event_handle, self._alive())

    def record(self, stream: int) -> None:
        """Record it on ``stream``, after what was queued there: one driver call."""
        with self._lock:
            event = self._handle or self._alive()
            try:
                driver.event_record(event, stream)
            except BackendError as error:
                self._again(error, driver.event_record, event, stream)
            self.recorded = True

    def wait(self, stream: int) -> None:
        """Have ``stream`` wait for its last record: one driver call, and the host goes on."""
        with self._lock:
            event = self._handle or self._alive()
            if stream < _FIRST_REAL_STREAM and not self._context.is_current():
                self._context.pushed_for(driver.stream_wait, stream, event)
            else:
                try:
                    driver.stream_wait(stream, event)
                except BackendError as error:
                    self._again(error, driver.stream_wait, stream, event)

    def done(self) -> bool:
        """Say whether its last record is done, at once: one driver call."""
        with self._lock:
            event = self._handle
            if event is None:
                raise BackendError(
                    "the event was destroyed before it was seen done; whether what it stood for "
                    "is over, only the end of its process can tell",
                    call="cuEventQuery",
                    code="destroyed",
                )
            try:
                return driver.event_done(event)
            except BackendError as error:
                return self._again(error, driver.event_done, event)

    # Events and real streams know their context, so nothing is pushed for them unless the driver
    # asks for it.  The default stream is a different one in each context and must never be that
    # of another GPU (field report 43).  The driver refuses to record an event of one context on a
    # stream of another, but any stream may wait for any event: so before a wait the current
    # context is looked at.

    def _again(
        self, error: BackendError, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Try once more with the context pushed if its lack may be what was refused."""
        if error.code not in _CONTEXT_CODES:
            raise error
        return self._context.pushed_for(call, *args, **kwargs)

    def synchronize(self) -> None:
        """Block until its last record is done.  Only for threads that may block.

        Not under the lock, so only for the thread that will destroy the event.
        """
        self._context.call(driver.event_synchronize, self._alive())

    def destroy(self) -> None:
        """Give it back; again is a no-op.  If it fails it may be tried again."""
        with self._lock:
            if self._handle is None:
                return
            with self._context.working():
                driver.event_destroy(self._handle)
                self._handle = None
                if self._counted:
                    budget.give_back()

    def _alive(self) -> Any:
        if self._handle is None:
            raise ClosedError("the event was used after it had been given back")
        return self._handle


def _made(
    context: PrimaryContext, make: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
) -> Any:
    with Undo() as undo:
        with context.working():
            event = make(*args, **kwargs)
            undo.add(context.call, driver.event_destroy, event)
        undo.keep()
    return event


def _explained(error: BackendError) -> BackendError:
    """Say what "out of memory" means where an event is refused."""
    if error.code != driver.OUT_OF_MEMORY:
        return error
    return BackendError(
        f"{error}; {budget.live:,} interprocess events are in use here, and a process can usually "
        f"hold {MAX_EVENTS:,}: something else in it holds the rest, or the GPU is full; open the "
        f"exporter with fewer slots",
        call=error.call,
        code=error.code,
    )


def check_event(slot: int, slots: int, handle: bytes) -> None:
    """Refuse an event that a peer gave for a slot that is none, or that is no event."""
    if not 0 <= slot < slots:
        raise RemoteProtocolError(f"an event came for slot {slot} of {slots}")
    if len(handle) != driver.EVENT_HANDLE_BYTES:
        raise RemoteProtocolError(
            f"an event's handle has {driver.EVENT_HANDLE_BYTES} bytes, {len(handle)} came"
        )


def check_same(slot: int, known: bytes, handle: bytes) -> None:
    """Refuse a second event for one slot; the same one again is fine."""
    if known != handle:
        raise RemoteProtocolError(f"a second, different event came for slot {slot}")
