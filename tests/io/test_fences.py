"""The fence watcher: one thread, lanes in order, one wake-up for many."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from asyncvmm import _errors as errors
from asyncvmm._io import fences
from asyncvmm._io.fences import FenceWatcher
from tests.patience import PROMPTLY


class HandFence:
    """A fence that the test finishes by hand, and that counts how often it is asked."""

    def __init__(self) -> None:
        self.ready = False
        self.error: Exception | None = None
        self.asked = 0
        self.asked_by = set[int]()
        self._loop = asyncio.get_running_loop()
        self._wanted = 0
        self._enough = asyncio.Event()

    def done(self) -> bool:
        self.asked += 1
        self.asked_by.add(threading.get_ident())
        if self.asked == self._wanted:
            self._loop.call_soon_threadsafe(self._enough.set)
        if self.error is not None:
            raise self.error
        return self.ready

    async def until_asked_again(self, times: int) -> None:
        """Wait until the thread has asked that many times more."""
        self._enough.clear()
        self._wanted = self.asked + times
        async with asyncio.timeout(PROMPTLY):
            await self._enough.wait()


class Told:
    """What ``on_done`` heard, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[object, Exception | None]]] = []
        self._news = asyncio.Event()

    def __call__(self, finished: list[tuple[object, Exception | None]]) -> None:
        assert finished
        self.calls.append(finished)
        self._news.set()

    @property
    def tokens(self) -> list[Any]:
        return [token for call in self.calls for token, _ in call]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PROMPTLY):
            while not condition():
                self._news.clear()
                await self._news.wait()


@contextmanager
def watcher(
    told: Told, watching: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[FenceWatcher]:
    """Open a watcher and close it, whatever the test does."""
    opened = FenceWatcher(asyncio.get_running_loop(), watching, told)
    try:
        yield opened
    finally:
        opened.close()


async def test_done_fences_are_told_with_their_tokens() -> None:
    """Kills: a completion that is found but never told."""
    told = Told()
    with watcher(told) as fences_:
        for number in range(50):
            fence = HandFence()
            fence.ready = True
            fences_.watch(number % 3, fence, number)
        await told.until(lambda: len(told.tokens) == 50)
        assert sorted(told.tokens) == list(range(50))
        assert fences_.pending == 0
        for lane in range(3):
            in_lane = [token for token in told.tokens if token % 3 == lane]
            assert in_lane == sorted(in_lane)


async def test_a_lane_is_asked_by_its_oldest_fence_first() -> None:
    """Kills: asking all pending fences, which costs a driver call for each every time."""
    told = Told()
    lane = [HandFence() for _ in range(5)]
    other = HandFence()
    with watcher(told) as fences_:
        for number, fence in enumerate(lane):
            fences_.watch("lane", fence, number)
        fences_.watch("other", other, "other")
        await lane[0].until_asked_again(5)
        assert [fence.asked for fence in lane[1:]] == [0, 0, 0, 0]
        assert other.asked > 0
        # The second is done before the first is: it must wait for its turn.
        lane[1].ready = True
        await lane[0].until_asked_again(3)
        assert told.calls == []
        lane[0].ready = True
        await told.until(lambda: len(told.tokens) == 2)
        assert told.tokens == [0, 1]
        assert lane[4].asked == 0
        assert fences_.pending == 4


async def test_a_long_lane_that_is_done_is_asked_few_times() -> None:
    """Kills: asking every fence of a lane although they finish in order."""
    told = Told()
    lane = [HandFence() for _ in range(64)]
    with watcher(told) as fences_:
        for number, fence in enumerate(lane):
            fences_.watch("lane", fence, number)
        await lane[0].until_asked_again(2)
        before = sum(fence.asked for fence in lane[1:])
        for fence in reversed(lane):
            fence.ready = True
        await told.until(lambda: len(told.tokens) == 64)
        assert told.tokens == list(range(64))
        assert sum(fence.asked for fence in lane[1:]) - before <= 8


async def test_a_lane_that_stands_still_does_not_hold_up_another() -> None:
    """Kills: one queue for all lanes; a nap that a new fence does not cut short."""
    told = Told()
    stuck, quick = HandFence(), HandFence()
    quick.ready = True
    with watcher(told) as fences_:
        fences_.watch("stuck", stuck, "stuck")
        await stuck.until_asked_again(3)
        for number in range(20):
            fences_.watch("quick", quick, number)
            await told.until(lambda so_far=number: len(told.tokens) == so_far + 1)  # type: ignore[misc]  # a lambda's default
        assert told.tokens == list(range(20))


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every write to an eventfd."""
    seen: list[int] = []
    write = os.eventfd_write

    def counted(fd: int, value: int) -> None:
        seen.append(value)
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", counted)
    return seen


async def test_many_completions_wake_the_loop_once(writes: list[int]) -> None:
    """Kills: a wake-up for each completion."""
    told = Told()
    first, last = HandFence(), HandFence()
    rest = HandFence()
    rest.ready = True
    with watcher(told) as fences_:
        fences_.watch("lane", first, 0)
        for number in range(1, 256):
            fences_.watch("lane", rest, number)
        fences_.watch("lane", last, 256)
        first.ready = True
        # The loop is kept busy, so that it cannot hear in between.  Asked twice, since what a look
        # finds is told at the end of it.
        while last.asked < 2:
            pass
        await told.until(lambda: len(told.tokens) == 256)
        assert len(told.calls) == len(writes) == 1
        assert told.tokens == list(range(256))


async def test_completions_of_a_busy_loop_are_told_together(writes: list[int]) -> None:
    """Kills: a second write to the eventfd while the loop has not read the first."""
    told = Told()
    lane = [HandFence() for _ in range(10)]
    with watcher(told) as fences_:
        for number, fence in enumerate(lane):
            fences_.watch("lane", fence, number)
        for fence, following in itertools.pairwise(lane):
            fence.ready = True
            asked = following.asked
            while following.asked < asked + 2:  # each is found in a look of its own, and told
                pass
        await told.until(lambda: len(told.tokens) == 9)
        assert len(told.calls) == len(writes) == 1


async def test_fence_that_raises_is_told_and_its_lane_goes_on() -> None:
    """Kills: a thread that dies with the first fence that cannot be asked."""
    told = Told()
    broken, whole = HandFence(), HandFence()
    broken.error = errors.BackendError("the driver is gone", call="cuEventQuery", code="999")
    whole.ready = True
    with watcher(told) as fences_:
        fences_.watch("lane", broken, "broken")
        fences_.watch("lane", whole, "whole")
        await told.until(lambda: len(told.tokens) == 2)
        assert [pair for call in told.calls for pair in call] == [
            ("broken", broken.error),
            ("whole", None),
        ]
        assert broken.asked == 1


async def test_an_error_is_told_of_the_fence_that_raised_it() -> None:
    """The one asked ahead of its turn raises.  Kills: that error told of the lane's oldest."""
    told = Told()
    first, pending, broken = lane = [HandFence() for _ in range(3)]
    broken.error = errors.BackendError("the driver is gone", call="cuEventQuery", code="999")
    with watcher(told) as fences_:
        for number, fence in enumerate(lane):
            fences_.watch("lane", fence, number)
        await first.until_asked_again(2)
        first.ready = True
        await told.until(lambda: bool(told.tokens))
        assert told.calls == [[(0, None)]]
        assert broken.asked == 1
        pending.ready = True
        await told.until(lambda: len(told.tokens) == 3)
        assert [pair for call in told.calls[1:] for pair in call] == [(1, None), (2, broken.error)]


async def test_what_is_done_while_the_loop_takes_the_rest_is_told() -> None:
    """Kills: a loop that says only after it took everything that it is to be woken again."""

    class Taken(deque[tuple[object, Exception | None]]):
        def popleft(self) -> tuple[object, Exception | None]:
            found = super().popleft()
            if found[0] == "first":
                fences_._tell([("late", None)])  # as the thread does between two steps of the loop
            return found

    told = Told()
    fence = HandFence()
    with watcher(told) as fences_:
        fences_._done = Taken()
        fences_._pending += 1
        fences_.watch("lane", fence, "first")
        fence.ready = True
        await told.until(lambda: told.tokens == ["first", "late"])
        assert fences_.pending == 0


async def test_watching_is_entered_once_in_the_asking_thread() -> None:
    """Kills: the relaxed capture mode set on the loop's thread, or for each look."""
    entered: list[int] = []
    left: list[int] = []

    @contextmanager
    def watching() -> Iterator[None]:
        entered.append(threading.get_ident())
        yield
        left.append(threading.get_ident())

    told = Told()
    fence = HandFence()
    with watcher(told, watching) as fences_:
        assert entered == []
        for number in range(3):
            fences_.watch("lane", fence, number)
            await fence.until_asked_again(2)
        assert left == []
    assert entered == left == list(fence.asked_by)
    assert threading.get_ident() not in fence.asked_by


async def test_watching_that_cannot_be_entered_is_told_for_each_fence() -> None:
    """Kills: a thread that dies at its start while everybody waits for ever."""
    failure = errors.BackendError("no driver")

    def watching() -> AbstractContextManager[None]:
        raise failure

    told = Told()
    with watcher(told, watching) as fences_:
        fences_.watch("a", HandFence(), 1)
        fences_.watch("a", HandFence(), 2)
        await told.until(lambda: len(told.tokens) == 2)
        fences_.watch("b", HandFence(), 3)
        await told.until(lambda: len(told.tokens) == 3)
        assert {error for call in told.calls for _, error in call} == {failure}
        assert fences_.pending == 0


async def test_no_thread_before_the_first_fence_and_none_after_close() -> None:
    """Kills: a thread or a descriptor for host memory, which has no fences; one that stays."""
    told = Told()
    names = [thread.name for thread in threading.enumerate()]
    with watcher(told) as fences_:
        assert [thread.name for thread in threading.enumerate()] == names
        fences_.watch("lane", HandFence(), 1)
        fences_.watch("lane", HandFence(), 2)
        assert len(threading.enumerate()) == len(names) + 1
    assert [thread.name for thread in threading.enumerate()] == names


async def test_close_drops_what_is_pending() -> None:
    """Kills: a token told after close; a close that waits for fences or works only once."""
    told = Told()
    done, never = HandFence(), HandFence()
    with watcher(told) as fences_:
        fences_.watch("lane", done, 1)
        fences_.watch("lane", never, 2)
        done.ready = True
        while never.asked < 2:  # found and told, and the loop did not hear of it yet
            pass
        fences_.close()
        fences_.close()
        await asyncio.sleep(0.005)
        assert told.calls == []
        assert fences_.pending == 0
        with pytest.raises(errors.ClosedError):
            fences_.watch("lane", done, 3)


async def test_stop_does_not_wait_and_close_may_run_elsewhere() -> None:
    """Kills: a join on the loop's thread, and a close that touches the loop."""
    told = Told()
    asked, go_on = threading.Event(), threading.Event()

    class SlowFence:
        def done(self) -> bool:
            asked.set()
            return go_on.wait(PROMPTLY)

    with watcher(told) as fences_:
        fences_.watch("lane", SlowFence(), 1)
        assert asked.wait(PROMPTLY)
        fences_.stop()
        fences_.stop()
        assert fences_.pending == 0
        closing = asyncio.create_task(asyncio.to_thread(fences_.close))
        go_on.set()
        await closing
        assert told.calls == []


async def test_close_from_on_done() -> None:
    """Kills: a wake-up that goes on with what its own callback closed."""
    told = Told()
    fence = HandFence()
    fence.ready = True
    opened: list[FenceWatcher] = []

    def on_done(finished: list[tuple[object, Exception | None]]) -> None:
        opened[0].close()
        told(finished)

    opened.append(FenceWatcher(asyncio.get_running_loop(), nullcontext, on_done))
    opened[0].watch("lane", fence, 1)
    await told.until(lambda: told.tokens == [1])


async def test_idle_thread_asks_nothing_and_keeps_nothing_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: looking on while nothing is pending; naps that go on after the last fence; a local of
    the thread that pins a token."""
    naps = itertools.count()
    monkeypatch.setattr(fences, "monotonic", lambda: next(naps) * 1e-3)

    class Token:
        pass

    told = Told()
    fence = HandFence()
    fence.ready = True
    token = Token()
    gone = weakref.ref(token)
    with watcher(told) as fences_:
        fences_.watch("lane", fence, token)
        await told.until(lambda: len(told.tokens) == 1)
        asked = fence.asked
        del token
        told.calls.clear()
        gc.collect()
        async with asyncio.timeout(PROMPTLY):
            while gone() is not None:  # noqa: ASYNC110 - the thread tells nobody that it lies down
                await asyncio.sleep(0.001)
        before = next(naps)
        await asyncio.sleep(0.01)
        assert fence.asked == asked
        assert next(naps) - before <= 2  # this count, and the last look before it lies down


@pytest.mark.slow
async def test_no_wake_up_is_lost_in_many_short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: queue.SimpleQueue.get(timeout) as the nap, which hangs on CPython 3.11 and 3.12.

    A nap that is over before it began is the case; the shortest one meets it most.
    """
    monkeypatch.setattr(fences, "FIRST_NAP", 1e-6)
    monkeypatch.setattr(fences, "LONGEST_NAP", 1e-6)
    told = Told()
    with watcher(told) as fences_:
        for number in range(1500):
            fence = HandFence()
            fences_.watch(number % 2, fence, number)
            if number % 3:
                await asyncio.sleep(0)
            fence.ready = True
            await told.until(lambda so_far=number: len(told.tokens) == so_far + 1)  # type: ignore[misc]  # a lambda's default


def test_watcher_may_outlive_its_loop() -> None:
    """Close in order after the loop is gone, as at the end of a program."""
    import uvloop

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):

        async def opened() -> FenceWatcher:
            told = Told()
            fences_ = FenceWatcher(asyncio.get_running_loop(), nullcontext, told)
            fences_.watch("lane", HandFence(), 1)
            return fences_

        with asyncio.Runner(loop_factory=new_loop) as runner:
            fences_ = runner.run(opened())
        fences_.close()
