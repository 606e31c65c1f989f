"""The order that events give, what a steady hand-off costs, and how many events there are."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from asyncvmm._backends import events
from asyncvmm._backends.base import Fence
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._errors import ArgumentError, BackendError, ClosedError, RemoteProtocolError
from tests.standin import Standin
from tests.standin.conftest import GRANULE, SLOTS
from tests.standin.peer import Peer

STREAM, SECOND, THIRD = 0x1000, 0x2000, 0x3000


def fence_of(exporter: CudaExporterRegion, slot: int = 0) -> Fence:
    fence = exporter.release_fence(1, slot)
    assert fence is not None
    return fence


@pytest.mark.parametrize("wait", [True, False])
def test_a_release_waits_for_the_ready_event_of_another_process(
    driver: Standin,
    exporter: CudaExporterRegion,
    start_peer: Callable[..., Peer],
    wait: bool,
) -> None:
    """Planted bug: the wait is left out; the run without it shows that the test would see it.

    The second batch of the same slot has to be waited for as well (field report 18).
    """
    peer = start_peer()
    peer.tell("attach", exporter.info, 0)
    for batch in range(3):
        driver.hold()
        exporter.record_ready(0, STREAM)
        if batch == 0:
            peer.tell("open_ready", 0, exporter.ready_handle(0))
        if wait:
            peer.tell("wait_ready", 0, SECOND)
        handle = peer.tell("release", 0, [SECOND])
        assert len(handle) == (0 if batch else 64)
        if batch == 0:
            exporter.open_release(1, 0, handle)
        ready = exporter.ready_fence(0)
        assert ready is not None
        assert not ready.done()
        assert fence_of(exporter).done() is not wait
        driver.finish()
        assert ready.done()
        assert fence_of(exporter).done()


def test_an_exporter_sees_that_a_consumers_stream_still_reads(
    driver: Standin, exporter: CudaExporterRegion, start_peer: Callable[..., Peer]
) -> None:
    """Planted bug: the release is taken as done when its message comes (field report 17)."""
    peer = start_peer()
    peer.tell("attach", exporter.info, 0)
    peer.tell("control", "hold", [True])
    exporter.open_release(1, 0, peer.tell("release", 0, [STREAM]))
    assert not fence_of(exporter).done()
    peer.tell("control", "finish", [])
    assert fence_of(exporter).done()


def test_the_events_of_a_killed_consumer_answer_done(
    driver: Standin, exporter: CudaExporterRegion, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer()
    peer.tell("attach", exporter.info, 0)
    peer.tell("control", "hold", [True])
    exporter.open_release(1, 0, peer.tell("release", 0, [STREAM]))
    fence = fence_of(exporter)
    peer.process.kill()
    peer.end()
    assert fence.done()
    exporter.forget_peer(1)
    exporter.forget_peer(1)
    with pytest.raises(BackendError, match="destroyed"):
        fence.done()
    with pytest.raises(RemoteProtocolError, match="slot 0"):
        exporter.release_fence(1, 0)


@pytest.mark.parametrize("late", [STREAM, SECOND, THIRD])
def test_a_release_stands_behind_all_streams(
    driver: Standin, exporter: CudaExporterRegion, consumer: CudaConsumerRegion, late: int
) -> None:
    """Planted bug: only the first, or only the last, of the streams is recorded."""
    driver.hold()
    exporter.record_ready(0, 0x9000)
    driver.hold(False)
    consumer.open_ready(0, exporter.ready_handle(0))
    consumer.wait_ready(0, late)
    exporter.open_release(1, 0, consumer.record_release(0, [STREAM, SECOND, THIRD, STREAM]))
    assert not fence_of(exporter).done()
    driver.finish()
    assert fence_of(exporter).done()
    assert driver.ledger().events == 3  # ready, release, and one to join streams, used twice


def test_a_steady_hand_off_is_four_calls(
    driver: Standin, exporter: CudaExporterRegion, consumer: CudaConsumerRegion
) -> None:
    """Planted bug: a synchronise, an import or a new event for each batch (field report 60)."""

    def hand_off(stream: int) -> bytes:
        exporter.record_ready(0, stream)
        consumer.wait_ready(0, stream)
        handle = consumer.record_release(0, [stream])
        if not handle:
            assert fence_of(exporter).done()
        return handle

    consumer.open_ready(0, exporter.ready_handle(0))
    exporter.open_release(1, 0, hand_off(STREAM))
    driver.journal()
    for _ in range(100):
        hand_off(STREAM)
        assert driver.journal() == [
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuEventRecord",
            "cuEventQuery",
        ]
    with exporter.watching():  # the context is current, as in a thread where torch has worked
        driver.journal()
        hand_off(0)
        assert driver.journal() == [
            "cuEventRecord",
            "cuCtxGetCurrent",  # a stream may wait for an event of another context
            "cuStreamWaitEvent",
            "cuEventRecord",
            "cuEventQuery",
        ]


def test_two_hundred_releases_need_one_event(
    driver: Standin, exporter: CudaExporterRegion, consumer: CudaConsumerRegion
) -> None:
    """Planted bug: an event per read (field report 7)."""
    for turn in range(200):
        consumer.record_release(turn % SLOTS, [STREAM, SECOND])
    assert driver.ledger().events == SLOTS + 1


def test_the_budget_is_counted_before_the_driver_runs_out(
    driver: Standin, exporter: CudaExporterRegion, consumer: CudaConsumerRegion
) -> None:
    """Planted bug: opened events are not counted, and the driver says "out of memory"."""
    handle = consumer.record_release(0, [STREAM])
    peers = (events.MAX_EVENTS - 1) // SLOTS
    for peer in range(peers):
        for slot in range(SLOTS):
            exporter.open_release(peer, slot, handle)
    for slot in range(3):
        exporter.record_ready(slot, STREAM)
    assert events.budget.live == driver.ledger().events + driver.ledger().opened == 4096
    before = driver.calls()
    for call in (
        lambda: exporter.record_ready(3, STREAM),
        lambda: exporter.open_release(peers, 0, handle),
        lambda: consumer.record_release(1, [STREAM]),
    ):
        with pytest.raises(BackendError, match="fewer slots or attach fewer consumers") as caught:
            call()
        assert caught.value.code == "too_many_events"
    assert driver.calls() == before
    exporter.forget_peer(0)
    exporter.record_ready(3, STREAM)
    assert events.budget.live == 4096 - SLOTS + 1


def test_the_drivers_own_limit_is_explained(driver: Standin, exporter: CudaExporterRegion) -> None:
    driver.fail(4, 2)
    with pytest.raises(BackendError, match="0 interprocess events are in use here") as caught:
        exporter.record_ready(0, STREAM)
    assert caught.value.call == "cuEventCreate"
    assert events.budget.live == 0


def test_a_peers_events_are_checked(
    driver: Standin, exporter: CudaExporterRegion, consumer: CudaConsumerRegion
) -> None:
    """Planted bug: a negative slot indexes from the end; a second event takes the first's place."""
    exporter.record_ready(0, STREAM)
    exporter.record_ready(1, STREAM)
    ready, other = exporter.ready_handle(0), exporter.ready_handle(1)
    for slot in (-1, SLOTS):
        with pytest.raises(RemoteProtocolError, match=f"slot {slot}"):
            consumer.open_ready(slot, ready)
        with pytest.raises(RemoteProtocolError, match=f"slot {slot}"):
            exporter.open_release(1, slot, ready)
        with pytest.raises(ArgumentError, match=f"no slot {slot}"):
            exporter.record_ready(slot, STREAM)
        with pytest.raises(ArgumentError, match=f"no slot {slot}"):
            consumer.record_release(slot, [STREAM])
    opens: tuple[Callable[[bytes], None], ...] = (
        lambda handle: consumer.open_ready(0, handle),
        lambda handle: exporter.open_release(1, 0, handle),
    )
    for open_ in opens:
        with pytest.raises(RemoteProtocolError, match="64 bytes, 63 came"):
            open_(ready[:63])
        with pytest.raises(BackendError, match="cuIpcOpenEventHandle"):
            open_(b"x" * 64)
        open_(ready)
        live = driver.ledger().opened
        open_(ready)
        assert driver.ledger().opened == live
        with pytest.raises(RemoteProtocolError, match="second, different"):
            open_(other)
    with pytest.raises(RemoteProtocolError, match="slot 2 was sent without"):
        consumer.wait_ready(2, STREAM)
    with pytest.raises(RemoteProtocolError, match="slot 2 was released without"):
        exporter.release_fence(1, 2)
    assert exporter.ready_fence(2) is None


def test_a_watcher_does_not_break_a_capture(
    driver: Standin, exporter: CudaExporterRegion, consumer: CudaConsumerRegion
) -> None:
    """Planted bug: the query runs in the thread's default capture mode (field report 42).

    The run without ``watching`` shows that the test would see it.
    """
    exporter.open_release(1, 0, consumer.record_release(0, [STREAM]))
    fence, answers = fence_of(exporter), list[object]()

    def watch() -> None:
        with exporter.watching():
            answers.append(fence.done())
            consumer.open_ready(0, exporter.ready_handle(0))

    driver.capture(True)
    with pytest.raises(BackendError, match="CAPTURE_UNSUPPORTED"):
        fence.done()
    assert driver.broken_captures() == 1
    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    exporter.shrink(exporter.grow(GRANULE).index)
    consumer.record_release(1, [STREAM])
    assert answers == [True]
    assert driver.broken_captures() == 1
    driver.capture(False)


def test_a_fence_outlives_nothing(driver: Standin) -> None:
    """Planted bug: a query on an event that was destroyed, which is a crash in the driver."""
    exporter = CudaExporterRegion.create(0, GRANULE, GRANULE, SLOTS)
    exporter.record_ready(0, STREAM)
    fence = exporter.ready_fence(0)
    assert fence is not None
    exporter.close()
    queries = driver.calls("cuEventQuery")
    with pytest.raises(BackendError, match="destroyed"):
        fence.done()
    assert driver.calls("cuEventQuery") == queries
    with pytest.raises(ClosedError):
        exporter.record_ready(0, STREAM)


def test_destroying_waits_for_a_query_in_another_thread(
    driver: Standin, exporter: CudaExporterRegion, consumer: CudaConsumerRegion
) -> None:
    """Planted bug: no lock, so the watcher asks an event that the loop has just destroyed."""
    handle = consumer.record_release(0, [STREAM])
    stop, wrong = threading.Event(), list[BaseException]()

    def watch() -> None:
        try:
            with exporter.watching():
                while not stop.is_set():
                    try:
                        fence_of(exporter).done()
                    except RemoteProtocolError:
                        continue
                    except BackendError as error:
                        if error.code != "destroyed":
                            raise
        except BaseException as error:  # handed to the test's thread
            wrong.append(error)

    thread = threading.Thread(target=watch)
    driver.slow_queries(500)
    thread.start()
    for _ in range(20):
        exporter.open_release(1, 0, handle)
        asked = driver.calls("cuEventQuery")
        while driver.calls("cuEventQuery") == asked and thread.is_alive():
            pass
        exporter.forget_peer(1)
    stop.set()
    thread.join()
    assert wrong == []
    assert driver.pulled() == 0
