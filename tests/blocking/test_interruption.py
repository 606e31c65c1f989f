"""Ctrl-C at any point: nothing is lost, and nothing goes on behind the caller's back."""

from __future__ import annotations

import asyncio
import dis
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from asyncvmm import TensorSpec, blocking
from asyncvmm._consumer import leases
from asyncvmm.blocking import _thread
from tests.blocking.conftest import loop_threads
from tests.blocking.ends import SECONDS, number_of, open_both, send, until

pytestmark = pytest.mark.usefixtures("each_loop")

LEAST = {
    "receive": 12,
    "poll": 12,
    "poll what is handed over": 2,
    "open and close": 20,
    "reserve": 20,
    "release": 5,
}
"""Fewer places than there are; so that a test which finds none fails."""

FACADE = os.path.dirname(blocking.__file__)

AGAIN = 5.0
"""Seconds after which a signal counts as lost: far more than ending a call takes."""


@contextmanager
def interrupted(
    when: Callable[[], bool], error: type[BaseException] = KeyboardInterrupt
) -> Iterator[None]:
    """Expect the block to be interrupted by a signal that is sent when something is so."""
    over = threading.Event()

    def handler(*_: object) -> None:
        raise error

    def interrupt() -> None:
        until(when)
        os.kill(os.getpid(), signal.SIGINT)
        # CPython does not see one that comes after its last look and before the system sleeps.
        while not over.wait(AGAIN):
            os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    # A shell that starts this in the background has it ignored.
    before = signal.signal(signal.SIGINT, handler)
    other.start()
    try:
        with pytest.raises(error):
            yield
    finally:
        over.set()
        other.join()
        signal.signal(signal.SIGINT, before)


class Interrupted(BaseException):
    """What the handler of a program's own signal raises."""


class Interruption:
    """Raises Interrupted at the n-th place where a signal's handler could.

    Those are in the facade's own code and in the files ``also`` given, after a call has
    returned from C, at the beginning of a function, and where a loop goes back: the interpreter
    looks for signals nowhere else.
    """

    def __init__(self, place: int, also: tuple[str, ...] = ()) -> None:
        self.place = place
        self._also = also
        self.places: list[str] = []
        self.fired = False
        self._names: dict[Any, dict[int, str]] = {}
        self._last: tuple[FrameType | None, str] = (None, "")

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if os.path.dirname(file) != FACADE and file not in self._also:
            return None
        frame.f_trace_opcodes = True
        if event != "opcode":
            if event == "return":
                self._last = (None, "")  # a call that ends in Python is no place
            return self._on_event
        came_from, opcode = self._last
        if frame is came_from and opcode.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
            self.places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            if len(self.places) == self.place:
                self.fired = True
                raise Interrupted
        code = frame.f_code
        if code not in self._names:
            self._names[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
        self._last = (frame, self._names[code].get(frame.f_lasti, ""))
        return self._on_event

    def during(self, call: Callable[[], Any]) -> Any:
        """Make the call; return what it returns, or None if it was interrupted."""
        before = sys.gettrace()
        # Python 3.12 tells of opcodes only if some frame had asked for it when tracing began.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._on_event)
        try:
            return call()
        except Interrupted:
            assert self.fired
            return None
        finally:
            sys.settrace(before)


def each_place(also: tuple[str, ...] = ()) -> Iterator[Interruption]:
    """Interrupt at each place in turn, until there is none any more; ``also`` as there."""
    for place in itertools.count(1):
        interruption = Interruption(place, also)
        yield interruption
        if not interruption.fired:
            return


@pytest.mark.slow
@pytest.mark.parametrize("how", ["receive", "poll", "poll what is handed over"])
def test_an_interruption_at_any_place_loses_no_batch(name: str, how: str) -> None:
    """Interrupted at each place in turn: the next call returns that very batch, once.

    Kills the planted bug of a batch that is taken out of the queue by a call whose value is
    dropped, of one that was taken from the consumer for a caller who has left, and of a loop that
    stands still behind what an interrupted thread has locked.
    """
    with open_both(name) as (exporter, (consumer,)):
        for _ in range(2):
            consumer.poll()

        def arrived() -> bool:
            return bool(consumer._handed) or consumer._news

        for interruption in each_place((threading.__file__,)):
            ahead = how == "poll what is handed over"
            consumer._wanted = ahead
            send(exporter, interruption.place)
            until(arrived)
            call = consumer.poll if how != "receive" else lambda: consumer.receive(SECONDS)
            batch = interruption.during(call)
            if batch is None:
                batch = consumer.receive(SECONDS)
            assert number_of(batch) == interruption.place
            assert consumer.poll() is None
            consumer.poll()
        assert interruption.place > LEAST[how], interruption.places
        exporter.drain(SECONDS)
        assert exporter.statistics().refused == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_an_interrupted_send_publishes_nothing_later(name: str, error: type[BaseException]) -> None:
    """It waited for room; when there is some, nobody takes it.

    Kills the planted bug of work that goes on when its caller has left, whatever the handler of
    the signal raised.
    """

    with open_both(name, slots=1) as (exporter, (consumer,)):
        send(exporter, 1)
        with interrupted(lambda: exporter.statistics().waiting == 1, error):
            send(exporter, 2)
        assert exporter.statistics().waiting == 0
        assert number_of(consumer.receive(SECONDS)) == 1
        exporter.drain(SECONDS)
        assert exporter.statistics().published == 1


def test_an_interrupted_receive_leaves_nobody_waiting(name: str) -> None:
    """And the batch that comes later is for the next call."""
    with open_both(name) as (exporter, (consumer,)):
        with interrupted(lambda: consumer.statistics().waiting == 1):
            consumer.receive()
        assert consumer.statistics().waiting == 0
        send(exporter, 1)
        assert number_of(consumer.receive(SECONDS)) == 1


def test_an_interrupted_opening_leaves_nothing(name: str) -> None:
    """Nobody is under the name yet: no thread stays that waits for one."""
    with interrupted(lambda: loop_threads() != []):
        blocking.connect(name, device="cpu", rank=0, wait=True).__enter__()


def test_an_interrupted_start_of_the_thread_leaves_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came while the opening waited for the new thread's first sign, which is there by now.

    Kills the planted bug of a thread that nobody knows of and that runs for ever.
    """
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    opening = blocking.open_exporter(name, pool_bytes="64KiB", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            opening.__enter__()
    assert loop_threads() == []
    blocking.open_exporter(name, pool_bytes="64KiB", device="cpu").__enter__().close()


def test_an_interruption_of_letting_go_leaves_no_user(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came when a call was over, before the thread was told that nobody needs it for that.

    Kills the planted bug of a call that stays a user, so that the thread never ends.
    """
    let_go = _thread.let_go

    def interrupted_let_go(user: object) -> None:
        monkeypatch.setattr(_thread, "let_go", let_go)
        raise KeyboardInterrupt

    with open_both(name) as (exporter, _):
        monkeypatch.setattr(_thread, "let_go", interrupted_let_go)
        with pytest.raises(KeyboardInterrupt):
            exporter.drain(SECONDS)
    assert loop_threads() == []


@pytest.mark.slow
def test_an_interruption_at_any_place_of_opening_or_closing_leaves_nothing(name: str) -> None:
    """Interrupted at each place in turn: no thread stays, and the name is free at once.

    Kills the planted bugs of a thread that is started and not noted, and of a closing that is
    left in the middle.
    """

    def open_and_close() -> None:
        opening = blocking.open_exporter(name, pool_bytes="64KiB", device="cpu")
        exporter = opening.__enter__()
        try:
            return exporter.close()
        except BaseException:
            exporter.close()  # as leaving a with block does, once more
            raise

    for interruption in each_place():
        interruption.during(open_and_close)
        until(lambda: loop_threads() == [])
        assert _thread._shared.thread is None
    assert interruption.place > LEAST["open and close"], interruption.places


@pytest.mark.slow
def test_an_interruption_at_any_place_of_a_release_holds_back_no_other(name: str) -> None:
    """Interrupted at each place in turn: what is released after that goes back.

    Kills the planted bug of a sweep that is noted as due and was never asked of the loop.
    """
    files = (leases.__file__, asyncio.base_events.__file__)
    with open_both(name, slots=64) as (exporter, (consumer,)):
        for interruption in each_place(files):
            send(exporter, interruption.place)
            interruption.during(consumer.receive(SECONDS).release)
            ack = send(exporter, interruption.place)
            consumer.receive(SECONDS).release()
            ack.result(SECONDS)
        assert interruption.place > LEAST["release"], interruption.places


@pytest.mark.slow
def test_an_interruption_at_any_place_of_a_reservation_leaves_no_slot(name: str) -> None:
    """Interrupted at each place in turn: the slot is free once the block is left.

    Kills the planted bugs of a reservation that is not given back where its entering, or its
    leaving, was interrupted.
    """
    with open_both(name, slots=1) as (exporter, _):

        def reserve() -> None:
            with exporter.reserve({"x": TensorSpec((4,), torch.float32)}, timeout=SECONDS):
                pass

        for interruption in each_place():
            interruption.during(reserve)
            assert exporter.statistics().slots.free == 1, interruption.places[-1]
        assert interruption.place > LEAST["reserve"], interruption.places


@pytest.mark.parametrize("opening", [blocking.open_exporter, blocking.connect])
def test_an_interruption_as_a_block_is_left_closes_all_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch, opening: Any
) -> None:
    """It came before the closing had begun.  Planted bug: then nobody closes, for good."""
    kind: Any = blocking.Exporter
    more: dict[str, Any] = {"pool_bytes": "64KiB"}
    if opening is blocking.connect:
        kind, more = blocking.Consumer, {"rank": 0}

    real = kind.__exit__

    def interrupted_exit(*_: object) -> None:
        monkeypatch.setattr(kind, "__exit__", real)
        raise Interrupted

    def leave() -> None:
        with opening(name, device="cpu", **more):
            monkeypatch.setattr(kind, "__exit__", interrupted_exit)

    with ExitStack() as stack:
        if kind is blocking.Consumer:
            stack.enter_context(blocking.open_exporter(name, device="cpu", pool_bytes="64KiB"))
        with pytest.raises(Interrupted):
            leave()
    assert loop_threads() == []


def test_an_interrupted_close_hangs_up_at_once(name: str) -> None:
    """An exporter that waits for the last owners does not go on waiting."""
    with open_both(name, close_timeout=1000) as (exporter, (consumer,)):
        send(exporter, 1)
        batch = consumer.receive(SECONDS)
        with interrupted(lambda: exporter._exporter._closing):
            exporter.close()
        assert number_of(batch) == 1
