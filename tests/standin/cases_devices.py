"""Which GPU, which context, which handle type.  Devices 0 and 1 are visible unless said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from asyncvmm._backends import driver as calls
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._backends.cuda_consumer import check_reach
from asyncvmm._backends.handle_types import AskedType
from asyncvmm._errors import ArgumentError, BackendError, RemoteProtocolError
from asyncvmm._types import RegionInfo
from tests.standin import Ledger, Standin
from tests.standin.conftest import GRANULE, SLOTS
from tests.standin.peer import Peer

UUIDS = [f"GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae{number:02x}" for number in range(3)]


def test_a_uuid_is_that_of_the_physical_gpu(driver: Standin) -> None:
    """Planted bug: the number on the wire (field report 40)."""
    driver.devices("1,0")
    assert [calls.device_uuid(0), calls.device_uuid(1)] == [UUIDS[1], UUIDS[0]]


@pytest.mark.parametrize(
    ("visible", "own", "exporter", "code"),
    [
        ("0,1", 0, 0, ""),
        ("0,1", 1, 0, ""),
        ("1,0", 0, 0, ""),
        ("1,0", 1, 0, ""),
        ("0", 0, 0, ""),
        ("1", 0, 0, "not_visible"),
        ("1,2", 0, 0, "not_visible"),
        ("", 0, 0, "not_visible"),
        ("2,1,0", 2, 0, ""),
    ],
)
@pytest.mark.parametrize("peers", ["all", "none"])
def test_gpus_are_matched_by_uuid(
    driver: Standin,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    own: int,
    exporter: int,
    code: str,
    peers: str,
) -> None:
    """Planted bugs: own number compared with the exporter's; a peer asked about itself."""
    monkeypatch.setenv("STANDIN_PEERS", peers)
    driver.devices(visible)
    same = visible.split(",")[own : own + 1] == [str(exporter)]
    expected = code or ("" if same or peers == "all" else "no_peer_access")
    if not expected:
        check_reach(UUIDS[exporter], own)
        return
    with pytest.raises(BackendError) as caught:
        check_reach(UUIDS[exporter], own)
    assert caught.value.code == expected
    assert UUIDS[exporter] in str(caught.value)
    if expected == "not_visible":
        assert "CUDA_VISIBLE_DEVICES" in str(caught.value)


def test_a_consumer_opens_a_context_on_its_own_gpu_only(
    driver: Standin, start_peer: Callable[..., Peer]
) -> None:
    """Planted bug: the context of the exporter's number, or of device 0 (field report 39)."""
    exporter = CudaExporterRegion.create(1, GRANULE, 4 * GRANULE, SLOTS)
    assert (driver.contexts(0), driver.contexts(1)) == (0, 1)
    peer = start_peer(STANDIN_DEVICES="2,1")  # the exporter's GPU is number 1 there too
    peer.tell("attach", exporter.info, 0)
    peer.map(exporter.segments()[0], exporter.export(0))
    exporter.record_ready(0, 0)
    peer.tell("open_ready", 0, exporter.ready_handle(0))
    peer.tell("wait_ready", 0, 0)
    exporter.open_release(1, 0, peer.tell("release", 0, [0]))
    assert [peer.tell("control", "contexts", [number]) for number in (0, 1)] == [1, 0]
    peer.tell("close")
    assert Ledger(*peer.tell("control", "ledger", []))[:7] == (0,) * 7
    exporter.close()


def test_no_context_is_current_afterwards(driver: Standin) -> None:
    exporter = CudaExporterRegion.create(1, GRANULE, 4 * GRANULE, SLOTS)
    exporter.record_ready(0, 0)
    with exporter.watching():
        assert driver.depth() == 1
    assert driver.depth() == 0
    exporter.close()


def test_the_default_stream_is_that_of_the_pools_gpu(driver: Standin) -> None:
    """Planted bug: the wait goes to the default stream of whichever GPU is current, and the
    release behind it is done before what it should have waited for (field report 43)."""
    pool = CudaExporterRegion.create(0, GRANULE, GRANULE, SLOTS)
    consumer = CudaConsumerRegion(pool.info, 0)
    elsewhere = CudaExporterRegion.create(1, GRANULE, GRANULE, SLOTS)
    driver.hold()
    pool.record_ready(0, 0x1000)
    driver.hold(False)
    consumer.open_ready(0, pool.ready_handle(0))
    with elsewhere.watching():
        consumer.wait_ready(0, 0)
    pool.open_release(1, 0, consumer.record_release(0, [0]))
    fence = pool.release_fence(1, 0)
    assert fence is not None
    assert not fence.done()
    driver.finish()
    assert fence.done()
    with elsewhere.watching():
        pool.record_ready(0, 0)  # the stand-in refuses an event and a stream of two GPUs
    for region in (consumer, pool, elsewhere):
        region.close()


def test_threads_without_a_context_can_use_a_pool(driver: Standin) -> None:
    """Planted bug: the constructor's thread is the only one that works (field report 43)."""
    exporter = CudaExporterRegion.create(1, GRANULE, 4 * GRANULE, SLOTS)
    driver.strict_streams(True)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            segment = exporter.grow(GRANULE)
            for stream in (0, 0x1000):
                exporter.record_ready(0, stream)
            exporter.shrink(segment.index)
            exporter.close()
        except BaseException as error:  # handed to the test's thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


REFUSALS = {
    "800": "CUDA_ERROR_NOT_PERMITTED",
    "801": "CUDA_ERROR_NOT_SUPPORTED",
    "1": "CUDA_ERROR_INVALID_VALUE",
    "off": "not_supported",
}


@pytest.mark.parametrize("answer", ["0", *REFUSALS])
@pytest.mark.parametrize("asked", ["auto", "fabric", "posix"])
def test_handle_types(
    driver: Standin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: AskedType,
    answer: str,
) -> None:
    """Planted bugs: the attribute is believed; a refusal leaks; a fallback without a word
    (field reports 45 and 56)."""
    monkeypatch.setenv("STANDIN_FABRIC", answer)
    caplog.set_level(logging.INFO, "asyncvmm.backends")
    if asked == "fabric" and answer != "0":
        with pytest.raises(BackendError) as caught:
            CudaExporterRegion.create(0, GRANULE, GRANULE, 1, handle_type=asked)
        assert caught.value.code == REFUSALS[answer]
        missing = "FABRIC_SUPPORTED" if answer == "off" else "/dev/nvidia-caps-imex-channels/chan"
        assert missing in str(caught.value)
        assert caplog.records == []
        return
    region = CudaExporterRegion.create(0, GRANULE, GRANULE, 1, handle_type=asked)
    expected = "posix" if asked == "posix" or answer != "0" else "fabric"
    assert region.info.handle_type == expected
    assert isinstance(region.export(0), bytes) == (expected == "fabric")
    (record,) = caplog.records
    assert f"by {expected} handles" in record.getMessage()
    if asked == "auto" and answer != "0":
        assert "fabric was refused" in record.getMessage()
    region.close()


def test_nothing_works_and_both_reasons_are_given(
    driver: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_FABRIC", "800")
    monkeypatch.setenv("STANDIN_POSIX", "off")
    with pytest.raises(BackendError, match=r"fabric: .*; posix: .*POSIX_FILE_DESCRIPTOR"):
        CudaExporterRegion.create(0, GRANULE, GRANULE, 1)


def test_another_error_is_no_refusal(driver: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: out of memory during the trial of FABRIC makes a POSIX pool."""
    monkeypatch.setenv("STANDIN_FABRIC", "999")
    with pytest.raises(BackendError) as caught:
        CudaExporterRegion.create(0, GRANULE, GRANULE, 1)
    assert caught.value.code == "CUDA_ERROR_UNKNOWN"


def test_what_can_never_work_is_refused_before_the_driver_is_asked(driver: Standin) -> None:
    with pytest.raises(ArgumentError, match="handle_type"):
        CudaExporterRegion.create(0, 1, 1, 1, handle_type="memfd")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(BackendError, match="no GPU of that number") as caught:
        CudaExporterRegion.create(7, 1, 1, 1)
    assert caught.value.call == "cuDeviceGet"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "host"},
        {"handle_type": "memfd"},
        {"granule": 0},
        {"granule": -GRANULE},
        {"max_nbytes": 0},
        {"max_nbytes": GRANULE + 1},
        {"slots": 0},
        {"slots": 1025},
    ],
)
def test_a_pool_that_cannot_be_is_refused(driver: Standin, change: dict[str, object]) -> None:
    good = {
        "kind": "cuda",
        "max_nbytes": GRANULE,
        "granule": GRANULE,
        "slots": 1,
        "handle_type": "posix",
        "device": UUIDS[0],
    }
    before = driver.calls()
    with pytest.raises(RemoteProtocolError):
        CudaConsumerRegion(RegionInfo(**{**good, **change}), 0)  # type: ignore[arg-type]  # plain fields
    assert driver.calls() == before
