"""Several threads at once, each with a stream of its own."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import uvloop

import asyncvmm
from asyncvmm import Broadcast, TensorSpec, blocking
from asyncvmm._errors import LocalProtocolError
from asyncvmm.blocking import _thread
from asyncvmm.testing import FakeDevice, FakePort
from tests.blocking.conftest import loop_threads
from tests.blocking.ends import SECONDS, Doing, number_of, open_both, send, until

pytestmark = pytest.mark.usefixtures("each_loop")


class ThreadsPort(FakePort):
    """A fake GPU on which every thread has a current stream of its own, as torch has it."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self.streams: dict[int, int] = {}

    def current_stream(self) -> int:
        """Return the calling thread's stream; 0, the default one, where it chose none."""
        return self.streams.get(threading.get_ident(), 0)

    def stream_of(self, stream: object) -> int:
        """Do the same for None."""
        return self.current_stream() if stream is None else super().stream_of(stream)

    def choose(self, stream: int) -> None:
        """Make a stream the calling thread's current one."""
        self.streams[threading.get_ident()] = stream


def test_every_batch_goes_to_one_of_many_threads(name: str) -> None:
    """Three threads send, two receive, one polls, and every owner is let go of in yet another.

    Kills: a batch that two threads get, one that is left in the queue with everybody asleep, and
    a release that is lost because it is said in another thread.
    """
    each, senders = 60, 3
    total = each * senders
    seen = Counter[int]()
    done = threading.Semaphore(0)

    def note(batch: asyncvmm.Batch | None) -> None:
        if batch is not None:
            seen[Doing(lambda: number_of(batch)).value()] += 1
            done.release()

    def read(call: Callable[[], asyncvmm.Batch | None]) -> None:
        with suppress(asyncvmm.ClosedError):
            while True:
                note(call())

    with open_both(name) as (exporter, (consumer,)):
        calls = (consumer.receive, consumer.receive, consumer.poll)
        readers = [Doing(partial(read, call)) for call in calls]

        def produce(first: int) -> None:
            acks = [send(exporter, number) for number in range(first, first + each)]
            assert all(ack.result(SECONDS).complete for ack in acks)

        for thread in [Doing(partial(produce, at * each)) for at in range(senders)]:
            thread.value()
        for _ in range(total):
            assert done.acquire(timeout=SECONDS)
        consumer.close()
        for thread in readers:
            thread.value()
        assert seen == Counter(range(total))
        exporter.drain(SECONDS)
        assert exporter.statistics().slots.free == 8


def test_work_is_ordered_on_the_stream_of_the_thread_that_calls(name: str) -> None:
    """Copies, readiness, releases and loans that are given up: never on the loop thread's stream.

    Kills the planted bugs of a current stream that is asked for on the loop's thread.
    """
    device = FakeDevice()
    port = ThreadsPort(device)
    port.choose(11)

    def last(kind: str) -> tuple[int, ...]:
        return [fence for fence in device.fences if fence.kind == kind][-1].streams

    def read() -> None:
        port.choose(22)
        with consumer.receive(SECONDS) as batch:
            batch[0]["x"].sum()

    with open_both(name, _port=port, slots=1) as (exporter, (consumer,)):
        ack = send(exporter, 1)
        assert last("ready") == (11,)
        Doing(read).value()
        assert device.waits == [(0, 22)]
        assert ack.result(SECONDS).complete
        assert last("release") == (22,)
        exporter.send({"x": torch.ones(3)}, stream=33)
        assert last("ready") == (33,)
        Doing(read).value()
        with exporter.reserve({"x": TensorSpec((3,), "int8")}, timeout=SECONDS) as owner:
            port.choose(44)
            owner.publish()
            assert last("ready") == (44,)
        Doing(read).value()
        with exporter.reserve({"x": TensorSpec((3,), "int8")}, timeout=SECONDS):
            port.choose(55)
        assert last("ready") == (55,)
        exporter.export({"x": torch.ones(3)}, timeout=SECONDS)
        assert last("ready") == (55,)


def test_all_share_one_thread_which_ends_with_the_last(name: str) -> None:
    """Kills: a thread per object, and one that outlives them or ends too early."""
    with open_both(name, 2) as (exporter, consumers):
        loops = [each for each in loop_threads() if not each.rpartition("_")[2].isdigit()]
        assert loops == ["asyncvmm-blocking"]
        consumers[0].close()
        send(exporter, 1, to=1)
        assert number_of(consumers[1].receive(SECONDS)) == 1
    assert loop_threads() == []


def test_a_loop_that_cannot_be_made_is_said_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills the planted bug of an opening that waits for a thread which has died."""

    def fail() -> None:
        raise OSError("no descriptor for an epoll is left")

    with monkeypatch.context() as patch:
        patch.setattr(_thread, "_loop_factory", lambda: fail)
        with pytest.raises(OSError, match="no descriptor"):
            blocking.connect(name, rank=0).__enter__()
    with open_both(name):
        pass


def test_uvloop_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asyncio's own loop where it is not."""
    monkeypatch.undo()  # of the fixture that chooses
    assert _thread._loop_factory() is uvloop.new_event_loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert _thread._loop_factory() is asyncio.new_event_loop


def test_threads_that_open_and_close_at_once_do_not_disturb_each_other(name: str) -> None:
    """Kills the planted bug of a thread that is ended under somebody who has just begun."""

    def session(own: str) -> None:
        for _ in range(5):
            with open_both(own) as (exporter, (consumer,)):
                send(exporter, 1)
                assert number_of(consumer.receive(SECONDS)) == 1

    for thread in [Doing(partial(session, f"{name}-{at}")) for at in range(3)]:
        thread.value()


def test_a_call_in_the_loops_own_thread_is_refused(name: str) -> None:
    """It would wait for itself; a destructor may run there.

    Kills the planted bug of a process that hangs because of a destructor.
    """

    async def call() -> list[Exception]:
        found: list[Exception] = []
        for use in (consumer.receive, exporter.statistics, blocking.connect(name).__enter__):
            try:
                use()
            except LocalProtocolError as error:
                found.append(error)
        return found

    with open_both(name) as (exporter, (consumer,)):
        assert len(exporter._run(call)) == 3


def test_tickets_are_made_and_redeemed(name: str) -> None:
    """The same tickets as the async twins', through the same channels."""
    features = {"a": torch.arange(3), "b": torch.ones(2)}
    with open_both(name, slots=2) as (exporter, (consumer,)):
        tickets = exporter.export(features, key="k", timeout=SECONDS)
        carried = pickle.loads(pickle.dumps(tickets))
        assert consumer.reconstruct(carried["a"], timeout=SECONDS).tolist() == [0, 1, 2]
        assert consumer.reconstruct(carried["b"]).tolist() == [1.0, 1.0]
        assert tickets.acknowledgement.result(SECONDS).complete
        single = exporter.export_nowait({"a": torch.arange(3)})
        with consumer.borrow(single["a"], timeout=SECONDS) as owner:
            assert owner["a"].tolist() == [0, 1, 2]
        unread, withdrawn = exporter.export_all([{"a": torch.ones(1)}] * 2, timeout=SECONDS)
        with pytest.raises(TimeoutError):
            exporter.export(features, timeout=0.01)
        consumer.acknowledge(unread["a"])
        assert exporter.cancel(withdrawn["a"])
        assert not exporter.cancel(withdrawn["a"])
        exporter.drain(SECONDS)
        assert exporter.statistics().slots.free == 2


@pytest.mark.parametrize("polling", [False, True])
def test_a_consumer_may_go_on_with_the_next_exporter(name: str, polling: bool) -> None:
    """The loss is told once, and then batches of the next one come.

    Kills the planted bug of a poll that never learns of the next exporter.
    """

    def following() -> int:
        if not polling:
            return number_of(consumer.receive(SECONDS))
        found: list[int] = []

        def look() -> bool:
            batch = consumer.poll()
            found.extend([] if batch is None else [number_of(batch)])
            return bool(found)

        until(look)
        return found[0]

    def fail() -> None:
        with blocking.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter:
            send(exporter, 1)
            assert following() == 1
            raise ZeroDivisionError

    opening = blocking.connect(
        name, device="cpu", rank=0, wait=True, reconnect=True, timeout=SECONDS
    )
    first = Doing(opening.__enter__)
    with blocking.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter:
        consumer = first.value()
        send(exporter, 0)
        assert following() == 0
    with pytest.raises(ZeroDivisionError):
        Doing(fail).value()
    with pytest.raises(asyncvmm.PeerLostError):
        following()
    with blocking.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter:
        send(exporter, 2)
        assert following() == 2
        consumer.close()


def test_a_poll_learns_what_keeps_it_out_of_the_next_exporter(name: str) -> None:
    """Kills the planted bug of a search whose failure nobody is told of."""

    def poll() -> bool:
        return bool(consumer.poll())

    first = blocking.open_exporter(name, device="cpu", pool_bytes="64KiB", route=Broadcast(2))
    with first:
        opening = blocking.connect(name, device="cpu", rank=1, reconnect=True)
        consumer = opening.__enter__()
        assert consumer.poll() is None
    with (
        blocking.open_exporter(name, device="cpu", pool_bytes="64KiB"),
        pytest.raises(asyncvmm.RankError),
    ):
        until(poll)
    consumer.close()


def test_the_facade_lacks_nothing_that_the_async_twins_have() -> None:
    """Methods and arguments, so that what is added there is added here.

    Kills the planted bug of an option that only one of the two has.
    """
    pairs: list[tuple[Any, Any, set[str]]] = [
        (asyncvmm.Exporter, blocking.Exporter, set()),
        (asyncvmm.Consumer, blocking.Consumer, {"receive_nowait", "aclose"}),
        (asyncvmm.WritableOwner, blocking.WritableOwner, set()),
        (asyncvmm.Acknowledgement, blocking.Acknowledgement, set()),
    ]
    for ours, theirs, other in pairs:
        public = {each for each in dir(ours) if not each.startswith("_")} - other
        foreign = [base for base in ours.__mro__ if not base.__module__.startswith("asyncvmm")]
        inherited = {each for base in foreign for each in dir(base)}
        for each in public - inherited:
            assert hasattr(theirs, each), f"{theirs.__name__}.{each}"
            if callable(getattr(ours, each)):
                lacking = _arguments(getattr(ours, each)) - _arguments(getattr(theirs, each))
                assert lacking == set(), f"{theirs.__name__}.{each}"
    assert _arguments(asyncvmm.open_exporter) == _arguments(blocking.open_exporter)
    assert _arguments(asyncvmm.connect) == _arguments(blocking.connect) - {"timeout"}


def _arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)
