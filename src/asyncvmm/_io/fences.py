"""Wait for many fences without blocking the loop and without a timer on it.

One thread asks, for neither loop has timers below 1 ms and nothing may be queued on the GPU to
wait for.  Fences of one lane finish in order, so only the oldest of each lane is asked.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from time import monotonic
from typing import Protocol, TypeAlias

from asyncvmm._errors import ClosedError
from asyncvmm._fds import OwnedFd

FIRST_NAP = 20e-6
"""Seconds.  Asking every 20-50 us cost 35 us on one GPU in the best case, and nothing more."""

LONGEST_NAP = 4e-3
"""Seconds.  One wake-up costs 40-80 us of CPU on a small virtual machine, whatever it waits on:
with one fence pending, naps of 1 ms took 5 % of a core there, 2 ms took 2-4 %, 4 ms below 2 %.
A nap is that long only after 64 ms without news."""

_NAP_SHARE = 16
"""A nap is a 16th of the time since anything last happened, and so is the delay it adds: an event
that takes 0.3 ms (one hand-off between two processes that share a GPU) is seen within 20 us."""

NAP_PER_FENCE = 4e-6
"""Seconds.  Who has many in flight does not need each at once, and a thread that wakes takes the
interpreter from the loop: with 64 pending a nap is a quarter of a millisecond."""

_SHORT_NAP = 0.5e-3
"""Seconds.  A nap up to this is not cut short by a new fence: it would only be asked too early."""

_PR_SET_TIMERSLACK = 29  # linux/prctl.h


class Fence(Protocol):
    """Anything that can say whether it is done."""

    def done(self) -> bool:
        """Say whether it is done, at once; raises if that can no longer be known."""


_Entry: TypeAlias = tuple[Hashable, Fence, object]


class FenceWatcher:
    """Asks pending fences from one thread and tells the loop, once for many.

    Methods are for the loop's thread.  ``watching()`` is entered once, in the watcher's
    thread.  ``on_done`` gets ``(token, error)`` pairs, of one lane in the order of
    :meth:`watch`; ``error`` is what the fence raised, and its lane goes on.
    """

    __slots__ = (
        "_closed", "_done", "_gate", "_inbox", "_lanes", "_listening", "_loop", "_on_done",
        "_pending", "_signalled", "_thread", "_waiting", "_wake", "_watching",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        watching: Callable[[], AbstractContextManager[None]],
        on_done: Callable[[list[tuple[object, Exception | None]]], None],
    ) -> None:
        self._loop = loop
        self._watching = watching
        self._on_done = on_done
        self._pending = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake: OwnedFd | None = None
        # Loop to thread, with a gate that is locked while there is no news; taking it with a
        # timeout is a nap that a new fence cuts short.  Not queue.SimpleQueue: on 3.11 and 3.12
        # its get(timeout) waits for ever if the time is over just before it begins to wait.
        self._inbox: deque[_Entry | None] = deque()
        self._gate = threading.Lock()
        self._gate.acquire()
        self._listening = True  # the thread is idle or in a long nap: news must open the gate
        # Thread to loop, with an eventfd that is written only if the loop was not told yet.
        self._done: deque[tuple[object, Exception | None]] = deque()
        self._signalled = False
        # The thread's own: what is pending, by lane, and how many that is.
        self._waiting = 0
        self._lanes: dict[Hashable, deque[tuple[Fence, object]]] = {}

    @property
    def pending(self) -> int:
        """Fences watched and not told of yet."""
        return self._pending

    def watch(self, lane: Hashable, fence: Fence, token: object) -> None:
        """Tell of ``token`` once ``fence`` is done.

        Fences of one lane must finish in the order they are given here.
        """
        if self._closed:
            raise ClosedError("the fence watcher is closed; nothing can be watched any more")
        if self._thread is None:
            self._start()
        self._pending += 1
        self._send((lane, fence, token))

    def stop(self) -> None:
        """Drop what is pending and tell no more; never blocks; again is a no-op."""
        if self._closed:
            return
        self._closed = True
        self._pending = 0
        if self._wake is not None:
            if not self._loop.is_closed() and self._wake.number >= 0:
                self._loop.remove_reader(self._wake.number)
            self._send(None)

    def close(self) -> None:
        """Stop, then join the thread; again is a no-op.

        Waits for the one fence that is being asked: after :meth:`stop` a worker thread may call
        it.
        """
        self.stop()
        if self._wake is not None and self._thread is not None:
            self._thread.join()
            self._wake.close()

    def _send(self, entry: _Entry | None) -> None:
        self._inbox.append(entry)
        # Only this side opens the gate and only the thread shuts it, so it stays as seen here.
        if (self._listening or entry is None) and self._gate.locked():
            self._gate.release()

    def _start(self) -> None:
        wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        # A daemon, so that an exporter that was never closed does not keep the process alive.
        thread = threading.Thread(target=self._main, name="asyncvmm-fences", daemon=True)
        thread.start()
        self._wake, self._thread = wake, thread
        self._loop.add_reader(wake.number, self._on_wake)

    def _on_wake(self) -> None:
        if self._wake is None or self._closed:
            return
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake.fileno())
        # Before the deque is emptied: a completion appended from here on signals again.
        self._signalled = False
        done = self._done
        finished = [done.popleft() for _ in range(len(done))]
        self._pending -= len(finished)
        if finished:
            self._on_done(finished)

    # The thread

    def _main(self) -> None:
        closing = False
        # The kernel rounds this thread's naps up by 50 us unless told otherwise; where it cannot
        # be told, naps are longer and nothing else changes.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        try:
            with self._watching():
                self._ask_until_closed()
                closing = True
        except Exception as error:
            if closing:
                raise  # to threading.excepthook; nobody waits for a fence any more
            # No fence can be asked any more: say so for each, else somebody waits for ever.
            self._refuse_until_closed(error)

    def _ask_until_closed(self) -> None:
        since = monotonic()
        while True:
            quiet = (monotonic() - since) / _NAP_SHARE
            nap = min(max(FIRST_NAP + self._waiting * NAP_PER_FENCE, quiet), LONGEST_NAP)
            self._listening = not self._waiting or nap > _SHORT_NAP
            # Looked at after saying so: what comes from here on opens the gate.
            if not self._inbox:
                self._gate.acquire(timeout=nap if self._waiting else -1)
            else:
                self._gate.acquire(blocking=False)  # opened for what is about to be taken
            if self._inbox:
                since = monotonic()
                if not self._take():
                    return
            if self._ask():
                since = monotonic()

    def _take(self) -> bool:
        """Put what the loop sent into its lanes; False if the last of it was the word to stop."""
        while self._inbox:
            entry = self._inbox.popleft()
            if entry is None:
                return False
            lane, fence, token = entry
            self._lanes.setdefault(lane, deque()).append((fence, token))
            self._waiting += 1
        return True

    def _ask(self) -> bool:
        """Ask each lane how far it has come; True if any fence was done."""
        finished: list[tuple[object, Exception | None]] = []
        for lane, waiting in tuple(self._lanes.items()):
            self._ask_lane(waiting, finished)
            if not waiting:
                del self._lanes[lane]
        if finished:
            self._waiting -= len(finished)
            self._tell(finished)
        return bool(finished)

    @staticmethod
    def _ask_lane(
        waiting: deque[tuple[Fence, object]], finished: list[tuple[object, Exception | None]]
    ) -> None:
        """Move what is done from a lane to ``finished``.

        They finish in order, so one that is done stands for all before it: a lane of 64 is asked
        some six times and not 64 times, each of which could take the interpreter from the loop.
        """
        step = 1
        while waiting:
            step = min(step, len(waiting))
            try:
                done = waiting[step - 1][0].done()
            except Exception as error:
                if step > 1:
                    step = 1  # the ones before it are to be asked first
                    continue
                finished.append((waiting.popleft()[1], error))
                continue
            if done:
                finished.extend((waiting.popleft()[1], None) for _ in range(step))
                step *= 2
            elif step == 1:
                return
            else:
                step = 1

    def _refuse_until_closed(self, error: Exception) -> None:
        more = True
        self._listening = True
        while more:
            for waiting in self._lanes.values():
                self._tell([(token, error) for _, token in waiting])
            self._lanes.clear()
            if not self._inbox:
                self._gate.acquire()
            more = self._take()

    def _tell(self, finished: list[tuple[object, Exception | None]]) -> None:
        self._done.extend(finished)
        if not self._signalled and self._wake is not None:
            self._signalled = True
            os.eventfd_write(self._wake.fileno(), 1)
