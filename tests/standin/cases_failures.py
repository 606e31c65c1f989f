"""Every driver call fails once, in every place: nothing stays behind and the next try works.

Planted bugs these kill: a step missing from an undo, an undo in the wrong order, a table changed
before the call that may fail (field report 8).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from asyncvmm._backends import events
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._errors import BackendError, PoolMemoryError
from asyncvmm._fds import OwnedFd
from tests.standin import Ledger, Standin
from tests.standin.conftest import GRANULE, SLOTS
from tests.standin.peer import join_unmapping

OUT_OF_MEMORY, UNKNOWN = 2, 999
STREAM, OTHER = 0x1000, 0x2000

Act = Callable[[], object]


def descriptors(driver: Standin) -> int:
    return len(os.listdir("/proc/self/fd")) - driver.ledger().descriptors


def create() -> CudaExporterRegion:
    return CudaExporterRegion.create(0, GRANULE, 8 * GRANULE, SLOTS)


@contextlib.contextmanager
def catching(driver: Standin) -> Iterator[list[BackendError]]:
    """Take an error that names the call that failed, if there is one."""
    caught: list[BackendError] = []
    try:
        yield caught
    except BackendError as error:
        caught.append(error)
    assert all(error.call == driver.failed() for error in caught)


def fail_each(
    driver: Standin, code: int, prepare: Callable[[], Act], *, keeps: bool = False
) -> list[str]:
    """Fail the k-th call of the act for every k; return the names of the calls that failed.

    ``keeps``: what was made before the failure may stay with the region, for the next try.
    """
    names: list[str] = []
    for k in itertools.count(1):
        act = prepare()
        before, live, fds = driver.ledger(), events.budget.live, descriptors(driver)
        driver.fail(k, code)
        error: BackendError | None = None
        try:
            act()
        except BackendError as caught:
            error = caught
        failed = driver.failed()
        driver.fail(0, 0)
        driver.reset_thread()
        if not failed:
            assert error is None
            return names
        names.append(failed)
        assert error is not None, f"call {k}, {failed}, failed and nobody said so"
        assert error.call == failed, f"call {k} was {failed}: {error}"
        if not keeps:
            assert driver.ledger() == before, f"call {k}, {failed}, left something behind"
            assert events.budget.live == live
        assert descriptors(driver) == fds, f"call {k}, {failed}, left a descriptor"
        act()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
@pytest.mark.parametrize("fabric", ["0", "800"])
def test_create(driver: Standin, code: int, fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_FABRIC", fabric)
    made: list[CudaExporterRegion] = []

    def prepare() -> Act:
        while made:
            made.pop().close()
        assert driver.ledger() == Ledger()
        return lambda: made.append(create())

    names = fail_each(driver, code, prepare)
    made.pop().close()
    assert {
        "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxPopCurrent",
        "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle",
        "cuMemRelease", "cuDeviceGetUuid", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
    } <= set(names)  # fmt: skip


def test_a_lack_of_memory_says_how_much_there_is(driver: Standin) -> None:
    region = create()
    driver.fail(4, OUT_OF_MEMORY)  # after cuCtxGetCurrent, cuCtxPushCurrent and the capture mode
    with pytest.raises(PoolMemoryError, match="GPU 0") as caught:
        region.grow(GRANULE)
    assert caught.value.call == "cuMemCreate"
    assert caught.value.code == "CUDA_ERROR_OUT_OF_MEMORY"
    assert (caught.value.asked, caught.value.available) == (GRANULE, (1 << 30) - GRANULE)
    region.close()


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
def test_grow(driver: Standin, exporter: CudaExporterRegion, code: int) -> None:
    def prepare() -> Act:
        for segment in exporter.segments()[1:]:
            exporter.shrink(segment.index)
        before = exporter.segments()

        def act() -> None:
            assert exporter.segments() == before
            exporter.grow(2 * GRANULE)

        return act

    fail_each(driver, code, prepare)


@pytest.mark.parametrize("side", ["exporter", "consumer"])
def test_unmapping(
    driver: Standin,
    exporter: CudaExporterRegion,
    consumer: CudaConsumerRegion,
    side: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Planted bug: what fails after the unmap is told as if the segment were mapped still; it is
    then unmapped once more where the next one is to be, which ends the link."""
    mapped = exporter._range.mapped if side == "exporter" else consumer._range.mapped
    names: list[str] = []
    while names[-1:] != [""]:
        segment = exporter.grow(GRANULE)
        if side == "consumer":
            consumer.map(segment, exporter.export(segment.index))
        unmap = exporter.shrink if side == "exporter" else consumer.unmap
        caplog.clear()
        driver.fail(len(names) + 1, UNKNOWN)
        with catching(driver) as caught:
            unmap(segment.index)
        names.append(driver.failed())
        driver.fail(0, 0)
        driver.reset_thread()
        assert bool(caught) == (segment.index in mapped), f"{names[-1]}: {caught}"
        assert caught or names[-1] in caplog.text
        if caught:
            unmap(segment.index)
        if side == "consumer":
            exporter.shrink(segment.index)
    assert {"cuCtxPushCurrent", "cuMemUnmap", "cuCtxPopCurrent"} <= set(names)


@pytest.mark.parametrize("fabric", ["0", "800"])
def test_export(driver: Standin, fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_FABRIC", fabric)
    region = create()
    given: list[OwnedFd | bytes] = []

    def prepare() -> Act:
        for handle in given:
            if isinstance(handle, OwnedFd):
                handle.close()
        given.clear()
        return lambda: given.append(region.export(0))

    names = fail_each(driver, UNKNOWN, prepare)
    assert {"cuMemRetainAllocationHandle", "cuMemExportToShareableHandle"} <= set(names)
    prepare()
    region.close()


@pytest.mark.parametrize("fabric", ["0", "800"])
def test_attach_and_map(driver: Standin, fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_FABRIC", fabric)
    exporter = create()
    attached: list[CudaConsumerRegion] = []

    def attach() -> Act:
        while attached:
            attached.pop().close()
        return lambda: attached.append(CudaConsumerRegion(exporter.info, 0))

    def map_() -> Act:
        attach()()
        segment = exporter.segments()[0]
        handles = [exporter.export(0), exporter.export(0)]
        kept = attached[0]

        def act() -> None:
            kept.map(segment, handles.pop())

        return act

    def unused(handles: list[OwnedFd | bytes]) -> None:
        for handle in handles:
            if isinstance(handle, OwnedFd):
                handle.close()

    names = fail_each(driver, UNKNOWN, attach)
    assert {"cuDeviceGetUuid", "cuDevicePrimaryCtxRetain", "cuMemAddressReserve"} <= set(names)
    attach()

    for k in itertools.count(1):
        region = CudaConsumerRegion(exporter.info, 0)
        handles = [exporter.export(0), exporter.export(0)]
        before = driver.ledger()
        driver.fail(k, UNKNOWN)
        with catching(driver):
            region.map(exporter.segments()[0], handles.pop())
        failed = driver.failed()
        driver.fail(0, 0)
        driver.reset_thread()
        if failed:
            assert driver.ledger() == before, f"call {k}, {failed}, left something behind"
            region.map(exporter.segments()[0], handles.pop())
        unused(handles)
        region.close()
        if not failed:
            break
    exporter.close()


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
def test_events(
    driver: Standin, exporter: CudaExporterRegion, consumer: CudaConsumerRegion, code: int
) -> None:
    """Planted bug: an event whose record failed is forgotten, and another one made."""

    def ready() -> Act:
        exporter._ready.clear()
        return lambda: exporter.record_ready(0, STREAM)

    def ready_handle() -> Act:
        exporter._ready_handles.clear()
        return lambda: exporter.ready_handle(0)

    def open_ready() -> Act:
        consumer._ready.clear()
        return lambda: consumer.open_ready(0, exporter.ready_handle(0))

    def release() -> Act:
        consumer._releases.clear()
        return lambda: consumer.record_release(0, [STREAM, OTHER])

    def open_release() -> Act:
        exporter.forget_peer(1)
        handle = next(iter(consumer._releases.values())).handle()
        return lambda: exporter.open_release(1, 0, handle)

    assert fail_each(driver, code, ready, keeps=True).count("cuEventRecord") == 1
    fail_each(driver, code, ready_handle)
    fail_each(driver, code, open_ready, keeps=True)
    assert fail_each(driver, code, lambda: lambda: consumer.wait_ready(0, STREAM)) == [
        "cuStreamWaitEvent"
    ]
    names = fail_each(driver, code, release, keeps=True)
    assert names.count("cuEventRecord") == 2
    assert names.count("cuStreamWaitEvent") == 1
    fail_each(driver, code, open_release)
    fence = exporter.release_fence(1, 0)
    assert fence is not None
    assert fail_each(driver, code, lambda: fence.done) == ["cuEventQuery"]
    fail_each(driver, code, lambda: lambda: exporter.poison(0, 1))


def test_a_failed_record_made_one_event(driver: Standin, exporter: CudaExporterRegion) -> None:
    """Planted bug: each try makes another event until the budget is gone."""
    for _ in range(3):
        names = driver.calls()
        exporter.ready_handle(0)
        assert driver.calls() >= names
        driver.fail(1, UNKNOWN)
        with pytest.raises(BackendError, match="cuEventRecord answered CUDA_ERROR_UNKNOWN"):
            exporter.record_ready(0, STREAM)
    assert driver.ledger().events == 1


@pytest.mark.parametrize("side", ["exporter", "consumer"])
def test_close(driver: Standin, side: str) -> None:
    """A close that fails says so, keeps what it could not give back, and goes on when asked.

    A call that fails while the device is asked whether it still reads costs nothing but time: the
    end then comes in a thread.
    """
    for k in itertools.count(1):
        exporter = create()
        consumer = CudaConsumerRegion(exporter.info, 0)
        for segment in (exporter.segments()[0], exporter.grow(GRANULE)):
            consumer.map(segment, exporter.export(segment.index))
        exporter.record_ready(0, STREAM)
        consumer.open_ready(0, exporter.ready_handle(0))
        consumer.wait_ready(0, STREAM)
        exporter.open_release(1, 0, consumer.record_release(0, [STREAM, OTHER]))
        region, rest = (exporter, consumer) if side == "exporter" else (consumer, exporter)
        driver.fail(k, UNKNOWN)
        with catching(driver):
            region.close()
        join_unmapping()
        failed = driver.failed()
        driver.fail(0, 0)
        driver.reset_thread()
        region.close()
        rest.close()
        assert driver.ledger() == Ledger(), f"call {k}, {failed}, cost something"
        assert events.budget.live == 0
        if not failed:
            break


def test_an_undo_that_fails_does_not_hide_the_first_error(
    driver: Standin, exporter: CudaExporterRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bug: ExitStack lets the undo's error replace the one that explains."""
    from asyncvmm._backends import driver_memory

    def broken(address: int, nbytes: int) -> None:
        raise BackendError("cuMemUnmap answered nothing good", call="cuMemUnmap", code="")

    def refused(*args: object, **kwargs: object) -> None:
        raise BackendError("cuMemSetAccess was refused", call="cuMemSetAccess", code="")

    with monkeypatch.context() as patch:
        patch.setattr(driver_memory, "memory_set_access", refused)
        patch.setattr(driver_memory, "memory_unmap", broken)
        with pytest.raises(BackendError, match="cuMemSetAccess") as caught:
            exporter.grow(GRANULE)
    assert any("cuMemUnmap answered nothing good" in note for note in caught.value.__notes__)
    with exporter.watching():
        driver_memory.memory_unmap(exporter.address + GRANULE, GRANULE)
