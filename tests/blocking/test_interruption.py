"""Ctrl-C at any point: nothing is lost, and nothing goes on behind the caller's back."""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from asyncvmm import blocking
from tests.blocking.ends import SECONDS, number_of, open_both, send, until

pytestmark = pytest.mark.usefixtures("each_loop")

LEAST = {"receive": 12, "poll": 12, "poll what is handed over": 2}
"""Fewer places than there are; so that a test which finds none fails."""

FACADE = os.path.dirname(blocking.__file__)


class Interruption:
    """Raises KeyboardInterrupt at the n-th place where a signal's handler could.

    Those are in the facade's own code, after a call has returned from C, at the beginning of a
    function, and where a loop goes back: the interpreter looks for signals nowhere else.
    """

    def __init__(self, place: int) -> None:
        self._place = place
        self.places: list[str] = []
        self.fired = False
        self._names: dict[Any, dict[int, str]] = {}
        self._last: tuple[FrameType | None, str] = (None, "")

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if os.path.dirname(frame.f_code.co_filename) != FACADE:
            return None
        frame.f_trace_opcodes = True
        if event != "opcode":
            if event == "return":
                self._last = (None, "")  # a call that ends in Python is no place
            return self._on_event
        came_from, opcode = self._last
        if frame is came_from and opcode.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
            self.places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            if len(self.places) == self._place:
                self.fired = True
                raise KeyboardInterrupt
        code = frame.f_code
        if code not in self._names:
            self._names[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
        self._last = (frame, self._names[code].get(frame.f_lasti, ""))
        return self._on_event

    def during(self, call: Callable[[], Any]) -> Any:
        """Make the call; return what it returns, or None if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._on_event)
        try:
            return call()
        except KeyboardInterrupt:
            assert self.fired
            return None
        finally:
            sys.settrace(before)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["receive", "poll", "poll what is handed over"])
def test_an_interruption_at_any_place_loses_no_batch(name: str, how: str) -> None:
    """Interrupted at each place in turn: the next call returns that very batch, once.

    Kills the planted bug of a batch that is taken out of the queue by a call whose value is
    dropped, and of one that was taken from the consumer for a caller who has left.
    """
    with open_both(name) as (exporter, (consumer,)):
        for _ in range(2):
            consumer.poll()

        def arrived() -> bool:
            return bool(consumer._handed) or consumer._news

        place = 0
        interrupted = True
        while interrupted:
            place += 1
            ahead = how == "poll what is handed over"
            consumer._wanted = ahead
            send(exporter, place)
            until(arrived)
            interruption = Interruption(place)
            call = consumer.poll if how != "receive" else lambda: consumer.receive(SECONDS)
            batch = interruption.during(call)
            interrupted = interruption.fired
            if batch is None:
                batch = consumer.receive(SECONDS)
            assert number_of(batch) == place
            assert consumer.poll() is None
            consumer.poll()
        assert place > LEAST[how], interruption.places
        exporter.drain(SECONDS)
        assert exporter.statistics().refused == 0


def test_an_interrupted_send_publishes_nothing_later(name: str) -> None:
    """It waited for room; when there is some, nobody takes it.

    Kills the planted bug of work that goes on when its caller has left.
    """

    def interrupt() -> None:
        until(lambda: exporter.statistics().waiting == 1)
        os.kill(os.getpid(), signal.SIGINT)

    with open_both(name, slots=1) as (exporter, (consumer,)):
        send(exporter, 1)
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            send(exporter, 2)
        other.join()
        assert exporter.statistics().waiting == 0
        assert number_of(consumer.receive(SECONDS)) == 1
        exporter.drain(SECONDS)
        assert exporter.statistics().published == 1


def test_an_interrupted_receive_leaves_nobody_waiting(name: str) -> None:
    """And the batch that comes later is for the next call."""

    def interrupt() -> None:
        until(lambda: consumer.statistics().waiting == 1)
        os.kill(os.getpid(), signal.SIGINT)

    with open_both(name) as (exporter, (consumer,)):
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            consumer.receive()
        other.join()
        assert consumer.statistics().waiting == 0
        send(exporter, 1)
        assert number_of(consumer.receive(SECONDS)) == 1


def test_an_interrupted_opening_leaves_nothing(name: str) -> None:
    """Nobody is under the name yet: no thread stays that waits for one."""

    def interrupt() -> None:
        until(lambda: "asyncvmm-blocking" in [each.name for each in threading.enumerate()])
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        blocking.connect(name, device="cpu", rank=0, wait=True).__enter__()
    other.join()


def test_an_interrupted_close_hangs_up_at_once(name: str) -> None:
    """An exporter that waits for the last owners does not go on waiting."""

    def interrupt() -> None:
        until(exporter_is_closing)
        os.kill(os.getpid(), signal.SIGINT)

    with open_both(name, close_timeout=1000) as (exporter, (consumer,)):

        def exporter_is_closing() -> bool:
            return exporter._exporter._closing

        send(exporter, 1)
        batch = consumer.receive(SECONDS)
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            exporter.close()
        other.join()
        assert number_of(batch) == 1
