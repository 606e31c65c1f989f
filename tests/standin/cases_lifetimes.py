"""How long memory, mappings and events live, in one process, in two, and across a fork."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable

import pytest

from asyncvmm._backends import driver as calls
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._errors import BackendError, ClosedError, ForkError
from asyncvmm._fds import OwnedFd
from tests.standin import Ledger, Standin
from tests.standin.conftest import GRANULE, SLOTS
from tests.standin.peer import Peer, join_unmapping

STREAM, SECOND = 0x1000, 0x2000


def test_closing_in_every_order_leaves_nothing_64_times(
    driver: Standin, start_peer: Callable[..., Peer]
) -> None:
    """Planted bug: a creation or import handle that is not released (field report 3)."""
    steps = ("exporter", "consumer", "shrink", "descriptor")
    peer = start_peer()
    for _, order in zip(range(64), itertools.cycle(itertools.permutations(steps)), strict=False):
        exporter = CudaExporterRegion.create(0, GRANULE, 4 * GRANULE, SLOTS)
        peer.tell("attach", exporter.info, 0)
        late = exporter.export(0)
        assert isinstance(late, OwnedFd)
        for segment in (exporter.segments()[0], exporter.grow(2 * GRANULE)):
            peer.map(segment, exporter.export(segment.index))
        assert driver.ledger().handles == 0
        assert driver.ledger().memory == 3 * GRANULE
        for step in order:
            if step == "exporter":
                exporter.close()
            elif step == "consumer":
                peer.tell("close")
            elif step == "descriptor":
                late.close()
            elif exporter.segments():
                exporter.shrink(1)
        assert driver.ledger() == Ledger()
        assert Ledger(*peer.tell("control", "ledger", [])) == Ledger()


def test_memory_returns_when_the_last_process_has_unmapped_it(
    driver: Standin, exporter: CudaExporterRegion, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer()
    peer.tell("attach", exporter.info, 0)
    segment = exporter.grow(2 * GRANULE)
    peer.map(segment, exporter.export(segment.index))
    exporter.shrink(segment.index)
    assert driver.ledger().memory == 3 * GRANULE
    peer.tell("unmap", segment.index)
    assert driver.ledger().memory == GRANULE
    peer.tell("close")


@pytest.mark.parametrize("handle_type", ["posix", "fabric"])
def test_bytes_cross_segment_boundaries_in_another_process(
    driver: Standin,
    start_peer: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
    handle_type: str,
) -> None:
    """Planted bug: one handle is taken for the whole range (field report 22)."""
    monkeypatch.setenv("STANDIN_FABRIC", "0" if handle_type == "fabric" else "800")
    exporter = CudaExporterRegion.create(0, 1, 8 * GRANULE, SLOTS)
    assert exporter.info.handle_type == handle_type
    peer = start_peer()
    peer.tell("attach", exporter.info, 0)
    peer.map(exporter.segments()[0], exporter.export(0))
    for nbytes in (1, GRANULE - 1, GRANULE + 1, 6912):
        segment = exporter.grow(nbytes)
        assert segment.nbytes == -(-nbytes // GRANULE) * GRANULE
        ctypes.memmove(exporter.address + segment.start - 2, b"over", 4)
        peer.map(segment, exporter.export(segment.index))
        assert peer.tell("read", segment.start - 2, 4) == b"over"
    peer.tell("close")
    exporter.close()


@pytest.mark.parametrize("writable", [False, True])
def test_a_stray_write_ends_the_consumer_only(
    driver: Standin, start_peer: Callable[..., Peer], writable: bool
) -> None:
    """Planted bug: consumers map readable and writable; the writable pool is the control."""
    exporter = CudaExporterRegion.create(0, GRANULE, GRANULE, SLOTS, writable=writable)
    peer = start_peer()
    peer.tell("attach", exporter.info, 0)
    peer.map(exporter.segments()[0], exporter.export(0))
    if writable:
        peer.tell("write", 0, b"x")
    else:
        with pytest.raises(EOFError, match=f"-{int(signal.SIGSEGV)}"):
            peer.tell("write", 0, b"x")
    ctypes.memset(exporter.address + 1, ord("y"), 1)
    assert ctypes.string_at(exporter.address, 2) == (b"xy" if writable else b"\0y")
    exporter.close()
    peer.end()


def test_a_killed_exporters_bytes_stay_until_they_are_let_go(
    driver: Standin, exporter: CudaExporterRegion, start_peer: Callable[..., Peer]
) -> None:
    """The exporter's side is closed here, which is all that its death is to a mapping."""
    peer = start_peer()
    peer.tell("attach", exporter.info, 0)
    peer.map(exporter.segments()[0], exporter.export(0))
    peer.tell("keep_alive", True)
    exporter.close()
    peer.tell("close")
    assert driver.ledger().memory == GRANULE
    peer.tell("keep_alive", False)
    assert driver.ledger() == Ledger()


@pytest.mark.parametrize("side", ["exporter", "consumer"])
def test_the_mapping_ends_with_the_last_keepalive(driver: Standin, side: str) -> None:
    exporter = CudaExporterRegion.create(0, GRANULE, GRANULE, SLOTS)
    consumer = CudaConsumerRegion(exporter.info, 0)
    consumer.map(exporter.segments()[0], exporter.export(0))
    region = exporter if side == "exporter" else consumer
    first, second = region.keepalive(), region.keepalive()
    exporter.close()
    consumer.close()
    assert driver.ledger().mappings == 1
    del first
    assert driver.ledger().mappings == 1
    del second
    assert driver.ledger() == Ledger()


def test_a_region_that_is_forgotten_gives_itself_back(driver: Standin) -> None:
    region = CudaExporterRegion.create(0, GRANULE, GRANULE, SLOTS)
    consumer = CudaConsumerRegion(region.info, 0)
    consumer.map(region.segments()[0], region.export(0))
    del region, consumer
    gc.collect()
    assert driver.ledger() == Ledger()


def test_a_mapping_outlives_the_reads_that_are_still_queued(
    driver: Standin, exporter: CudaExporterRegion
) -> None:
    """Planted bugs: close waits in the loop; or it unmaps under a running kernel, or destroys an
    event that the exporter then sees as done (inv. 4, inv. 10)."""
    consumer = CudaConsumerRegion(exporter.info, 0)
    consumer.map(exporter.segments()[0], exporter.export(0))
    driver.hold()
    exporter.open_release(1, 0, consumer.record_release(0, [STREAM]))
    fence = exporter.release_fence(1, 0)
    assert fence is not None
    consumer.close()
    assert driver.ledger().mappings == 2
    assert not fence.done()
    with pytest.raises(ClosedError):
        consumer.record_release(0, [STREAM])
    driver.finish()
    join_unmapping()
    assert driver.ledger().mappings == 1
    assert fence.done()


def test_an_exporter_waits_for_what_it_recorded(driver: Standin) -> None:
    """Planted bug: close returns while the producer's kernel still writes to the pool."""
    exporter = CudaExporterRegion.create(0, GRANULE, GRANULE, SLOTS)
    driver.hold()
    exporter.record_ready(0, STREAM)
    finished: list[bool] = []

    def finish_once_waited_for() -> None:
        while not driver.calls("cuEventSynchronize") > before:
            pass
        finished.append(True)
        driver.finish()

    before = driver.calls("cuEventSynchronize")
    thread = threading.Thread(target=finish_once_waited_for)
    thread.start()
    exporter.close()
    held = driver.ledger()
    thread.join()
    assert held == Ledger()
    assert finished == [True]


def refuse_release(consumer: CudaConsumerRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver refuse the record of a release."""

    def refuse(event: object, stream: int) -> None:
        raise BackendError("not now", call="cuEventRecord", code="CUDA_ERROR_UNKNOWN")

    with monkeypatch.context() as patch:
        patch.setattr(calls, "event_record", refuse)
        with pytest.raises(BackendError, match="not now"):
            consumer.record_release(0, [STREAM])


@pytest.mark.parametrize("refused", [False, True])
def test_reads_without_a_release_are_waited_for(
    driver: Standin,
    exporter: CudaExporterRegion,
    monkeypatch: pytest.MonkeyPatch,
    refused: bool,
) -> None:
    """Planted bugs: a batch whose release was never recorded is unmapped under its kernel; so is
    one whose release the driver refused to record."""
    consumer = CudaConsumerRegion(exporter.info, 0)
    exporter.record_ready(0, STREAM)
    consumer.open_ready(0, exporter.ready_handle(0))
    consumer.wait_ready(0, STREAM)
    consumer.note_read(0)
    if refused:
        refuse_release(consumer, monkeypatch)
    before = driver.calls("cuCtxSynchronize")
    consumer.close()
    join_unmapping()
    assert driver.calls("cuCtxSynchronize") == before + 1
    assert driver.ledger().ranges == 1


def test_a_release_that_was_refused_still_has_an_event_to_give(
    exporter: CudaExporterRegion, consumer: CudaConsumerRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bug: the handle goes with the try that failed, and the exporter never gets it."""
    refuse_release(consumer, monkeypatch)
    exporter.open_release(1, 0, consumer.record_release(0, [STREAM]))
    assert exporter.release_fence(1, 0) is not None


def test_a_pool_of_which_nobody_can_tell_whether_it_is_read_is_waited_for(
    driver: Standin, exporter: CudaExporterRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bug: a question that the driver refused is taken for "not in use"."""
    consumer = CudaConsumerRegion(exporter.info, 0)
    driver.hold()
    consumer.record_release(0, [STREAM])
    asked = calls.event_done

    def refuse_once(event: object) -> bool:
        monkeypatch.setattr(calls, "event_done", asked)
        raise BackendError("not now", call="cuEventQuery", code="CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(calls, "event_done", refuse_once)
    consumer.close()
    mapped = driver.ledger().ranges
    driver.finish()
    join_unmapping()
    assert mapped == 2
    assert driver.ledger().ranges == 1


def test_a_pool_stays_mapped_where_a_capture_forbids_to_wait(
    driver: Standin,
    exporter: CudaExporterRegion,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted bug: a wait that was refused is taken for one that is over."""
    consumer = CudaConsumerRegion(exporter.info, 0)
    exporter.record_ready(0, STREAM)
    consumer.open_ready(0, exporter.ready_handle(0))
    consumer.wait_ready(0, STREAM)
    consumer.note_read(0)

    def refused() -> None:
        code = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        raise BackendError("a graph is being captured", call="cuCtxSynchronize", code=code)

    mapping = consumer._range
    with monkeypatch.context() as patch:
        patch.setattr(calls, "context_synchronize", refused)
        consumer.close()
        join_unmapping()
    assert driver.ledger().ranges == 2
    assert "stays mapped until this process ends" in caplog.text
    mapping._tear_down()


@pytest.mark.parametrize("side", ["exporter", "consumer"])
def test_a_forked_child_never_calls_the_driver(driver: Standin, side: str) -> None:
    """Planted bugs: the child unmaps what the parent uses; it gets the driver's error, not ours."""
    exporter = CudaExporterRegion.create(0, GRANULE, 2 * GRANULE, SLOTS)
    consumer = CudaConsumerRegion(exporter.info, 0)
    consumer.map(exporter.segments()[0], exporter.export(0))
    exporter.record_ready(0, STREAM)
    consumer.open_ready(0, exporter.ready_handle(0))
    segment = exporter.segments()[0]
    uses: list[Callable[[], object]] = [
        lambda: exporter.address,
        lambda: exporter.export(0),
        lambda: exporter.grow(1),
        lambda: exporter.shrink(0),
        lambda: exporter.record_ready(0, STREAM),
        lambda: exporter.ready_handle(0),
        lambda: exporter.open_release(1, 0, b"x" * 64),
        lambda: exporter.forget_peer(1),
        lambda: exporter.watching().__enter__(),
        lambda: exporter.poison(0, 1),
        exporter.keepalive,
        lambda: consumer.address,
        lambda: consumer.map(segment, b""),
        lambda: consumer.unmap(0),
        lambda: consumer.open_ready(0, b"x" * 64),
        lambda: consumer.wait_ready(0, STREAM),
        lambda: consumer.record_release(0, [STREAM]),
        consumer.keepalive,
    ]
    child = os.fork()
    if child == 0:
        wrong = 0
        for use in uses:
            try:
                use()
            except ForkError:
                continue
            wrong += 1
        for region in (exporter, consumer):
            region.close()
        uses.clear()
        del exporter, consumer, region
        gc.collect()
        os._exit(wrong + 100 * driver.forked_calls())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert driver.ledger().mappings == 2
    uses.clear()
    for each in (exporter, consumer) if side == "exporter" else (consumer, exporter):
        each.close()
