"""The regions of GPU memory between two processes, on a real GPU.

Each test of an order has its control: the same run with the wait left out, which must show wrong
data, or the test would prove nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from asyncvmm._backends import driver, events
from asyncvmm._backends.base import Fence
from asyncvmm._backends.contexts import PrimaryContext
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._backends.cuda_exporter import POISON
from asyncvmm._errors import BackendError, PoolMemoryError
from asyncvmm._fds import OwnedFd
from tests.gpu.peer import new_stream, spin, view
from tests.standin.peer import Peer

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and torch sees none here", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MIB = 1 << 20
SPIN = 100_000_000
"""Cycles: about 50 ms on an H200, long enough that a reader that does not wait is early."""
ROUNDS = 10


@pytest.fixture
def exporter() -> Iterator[CudaExporterRegion]:
    """A region of 64 MiB on GPU 0 that may grow to 256 MiB."""
    region = CudaExporterRegion.create(0, 64 * MIB, 256 * MIB, 128)
    yield region
    region.close()


@pytest.fixture(params=["same GPU", "other GPU"])
def device(request: pytest.FixtureRequest) -> int:
    """The consumer's GPU."""
    if request.param == "same GPU":
        return 0
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and torch sees one")
    return 1


def attach(peer: Peer, exporter: CudaExporterRegion, device: int = 0) -> None:
    peer.tell("attach", exporter.info, device)
    for segment in exporter.segments():
        peer.map(segment, exporter.export(segment.index))


def free_bytes() -> int:
    torch.cuda.synchronize(0)
    return int(torch.cuda.mem_get_info(0)[0])


def pool(exporter: CudaExporterRegion, start: int, nbytes: int) -> torch.Tensor:
    return view(exporter.address + start, nbytes, 0)


def release_fence(exporter: CudaExporterRegion, slot: int = 0) -> Fence:
    fence = exporter.release_fence(1, slot)
    assert fence is not None
    return fence


def wait_for(exporter: CudaExporterRegion, fence: Fence) -> None:
    with exporter.watching():
        while not fence.done():
            pass


def test_memory_returns_64_times_in_every_order(peer_on: Callable[[int], Peer]) -> None:
    """Planted bug: a creation or import handle that is not released (field report 3)."""
    orders = itertools.cycle(itertools.permutations(("exporter", "consumer", "descriptor")))
    peer, start = peer_on(0), 0
    for turn, order in zip(range(65), orders, strict=False):
        if turn == 1:  # the first warms both processes up
            start = free_bytes()
        exporter = CudaExporterRegion.create(0, 32 * MIB, 128 * MIB, 4)
        exporter.grow(32 * MIB)
        attach(peer, exporter)
        late = exporter.export(0)
        if turn:
            assert start - free_bytes() >= 64 * MIB
        for step in order:
            if step == "exporter":
                exporter.close()
            elif step == "consumer":
                peer.tell("close")
            elif isinstance(late, OwnedFd):
                late.close()
        if turn:
            assert abs(start - free_bytes()) <= exporter.info.granule, f"turn {turn}, {order}"
    assert events.budget.live == 0


def test_a_killed_consumer_keeps_no_memory(start_peer: Callable[[], Peer]) -> None:
    warm = CudaExporterRegion.create(0, 64 * MIB, 64 * MIB, 4)
    warm.record_ready(0, 0)
    warm.close()
    before, peer = free_bytes(), start_peer()
    exporter = CudaExporterRegion.create(0, 64 * MIB, 64 * MIB, 4)
    attach(peer, exporter)
    exporter.open_release(1, 0, peer.tell("release", 0, [0]))
    peer.process.kill()
    peer.process.wait()
    assert release_fence(exporter).done()
    exporter.forget_peer(1)
    exporter.close()
    # The peer's own context took memory too, which went with it.
    assert before - free_bytes() <= exporter.info.granule


def test_sizes_need_not_be_multiples_of_the_granule(peer_on: Callable[[int], Peer]) -> None:
    """Planted bug: one number for the size asked and the physical one (field report 49)."""
    sizes = (1, 6912, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1)
    peer = peer_on(0)
    for nbytes in sizes:
        exporter = CudaExporterRegion.create(0, nbytes, 32 * MIB, 4)
        granule = exporter.info.granule
        assert exporter.segments()[0].nbytes == -(-nbytes // granule) * granule
        attach(peer, exporter)
        pool(exporter, 0, nbytes).fill_(7)
        torch.cuda.synchronize(0)
        assert peer.tell("bounds", 0, nbytes) == [7, 7]
        for more in sizes:
            segment = exporter.grow(more)
            peer.map(segment, exporter.export(segment.index))
            pool(exporter, segment.start - 500, 1000).fill_(more % 251)
            torch.cuda.synchronize(0)
            assert peer.tell("bounds", segment.start - 500, 1000) == [more % 251, more % 251]
        peer.tell("close")
        exporter.close()


def test_a_view_may_cross_segments_and_a_shrink_gives_memory_back(
    exporter: CudaExporterRegion, peer_on: Callable[[int], Peer], device: int
) -> None:
    """Planted bug: one handle is taken for the whole range (field report 22)."""
    peer = peer_on(device)
    attach(peer, exporter, device)
    before = 0
    for turn in range(3):
        segment = exporter.grow(64 * MIB)
        peer.map(segment, exporter.export(segment.index))
        pool(exporter, 0, 128 * MIB).fill_(turn + 3)
        torch.cuda.synchronize(0)
        assert peer.tell("bounds", 0, 128 * MIB) == [turn + 3, turn + 3]
        exporter.shrink(segment.index)
        peer.tell("unmap", segment.index)
        if turn == 0:  # the first loads kernels in both processes
            before = free_bytes()
        assert before - free_bytes() <= exporter.info.granule


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "control"])
def test_a_reader_waits_for_the_writer(
    exporter: CudaExporterRegion, peer_on: Callable[[int], Peer], device: int, wait: bool
) -> None:
    """Planted bug: the ready event is waited for once per mapping, or not (field report 18)."""
    peer, stream, wrong = peer_on(device), new_stream(0), 0
    attach(peer, exporter, device)
    nbytes = 64 * MIB
    for turn in range(1, ROUNDS + 1):
        with torch.cuda.stream(stream):
            pool(exporter, 0, nbytes).fill_(0)
            spin(SPIN)
            pool(exporter, 0, nbytes).fill_(turn)
        exporter.record_ready(0, stream.cuda_stream)
        peer.tell("open_ready", 0, exporter.ready_handle(0))
        ready = exporter.ready_fence(0)
        assert ready is not None
        assert not ready.done()
        if handle := peer.tell("read_later", 0, 0, nbytes, wait, 0):
            exporter.open_release(1, 0, handle)
        wrong += peer.tell("copied") != [turn, turn]
        wait_for(exporter, release_fence(exporter))
        stream.synchronize()
    assert wrong == 0 if wait else wrong > 0


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "control"])
def test_a_writer_waits_for_the_reader(
    exporter: CudaExporterRegion, peer_on: Callable[[int], Peer], device: int, wait: bool
) -> None:
    """Planted bug: the slot is refilled when the release's message comes (field report 17)."""
    peer, stream, wrong = peer_on(device), new_stream(0), 0
    attach(peer, exporter, device)
    nbytes = 4 * MIB
    for turn in range(1, ROUNDS + 1):
        with torch.cuda.stream(stream):
            pool(exporter, 0, nbytes).fill_(turn)
        exporter.record_ready(0, stream.cuda_stream)
        peer.tell("open_ready", 0, exporter.ready_handle(0))
        if handle := peer.tell("read_later", 0, 0, nbytes, True, SPIN):
            exporter.open_release(1, 0, handle)
        assert not release_fence(exporter).done()
        if wait:
            wait_for(exporter, release_fence(exporter))
        with torch.cuda.stream(stream):
            pool(exporter, 0, nbytes).fill_(255)
        wrong += peer.tell("copied") != [turn, turn]
        stream.synchronize()
    assert wrong == 0 if wait else wrong > 0


def test_closing_under_a_running_read_neither_waits_nor_breaks_it(
    exporter: CudaExporterRegion, peer_on: Callable[[int], Peer]
) -> None:
    """Planted bugs: unmapping under a kernel; an event destroyed early, which looks done.

    Field report 16.
    """
    peer = peer_on(0)
    attach(peer, exporter)
    pool(exporter, 0, 4 * MIB).fill_(9)
    exporter.record_ready(0, torch.cuda.current_stream(0).cuda_stream)
    peer.tell("open_ready", 0, exporter.ready_handle(0))
    exporter.open_release(1, 0, peer.tell("read_later", 0, 0, 4 * MIB, True, 10 * SPIN))
    peer.tell("close")
    assert not release_fence(exporter).done()
    assert peer.tell("copied") == [9, 9]
    peer.tell("join_unmapping")


def test_a_stray_write_ends_the_consumers_context_only(
    exporter: CudaExporterRegion, start_peer: Callable[[], Peer], device: int
) -> None:
    """Planted bug: consumers map readable and writable (field report 52)."""
    stray, other = start_peer(), start_peer()
    for peer in (stray, other):
        attach(peer, exporter, device)
    pool(exporter, 0, MIB).fill_(5)
    torch.cuda.synchronize(0)
    assert stray.tell("stray_write") != ""
    pool(exporter, MIB, MIB).fill_(5)
    torch.cuda.synchronize(0)
    assert [int(pool(exporter, 0, 2 * MIB).min()), other.tell("bounds", 0, 2 * MIB)] == [5, [5, 5]]


def test_a_writable_pool_can_be_written(peer_on: Callable[[int], Peer]) -> None:
    exporter = CudaExporterRegion.create(0, 2 * MIB, 2 * MIB, 4, writable=True)
    peer = peer_on(0)
    attach(peer, exporter)
    assert peer.tell("stray_write") == ""
    assert int(pool(exporter, 0, 256).min()) == 1
    peer.tell("close")
    exporter.close()


@pytest.mark.parametrize("watching", [True, False], ids=["watching", "control"])
def test_graphs_are_captured_beside_a_watcher(
    exporter: CudaExporterRegion, peer_on: Callable[[int], Peer], watching: bool
) -> None:
    """Planted bug: queries in the default capture mode (field report 42)."""
    peer = peer_on(0)
    attach(peer, exporter)
    for slot, handle in enumerate(peer.tell("release_behind_spin", 20 * SPIN, 100)):
        exporter.open_release(1, slot, handle)
    fences = [release_fence(exporter, slot) for slot in range(100)]
    stop, asked = threading.Event(), 0

    def watch() -> None:
        nonlocal asked
        with exporter.watching() if watching else contextlib.nullcontext():
            while not stop.is_set():
                for fence in fences:
                    with contextlib.suppress(BackendError):  # the control's are refused
                        fence.done()
                        asked += 1

    thread, failed, x = threading.Thread(target=watch), 0, torch.ones(1 << 16, device="cuda:0")
    torch.cuda.synchronize(0)
    thread.start()
    for _ in range(20):
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(50):
                    x.mul_(1.0)
            graph.replay()
        except RuntimeError:
            failed += 1
            torch.cuda.set_stream(torch.cuda.default_stream(0))  # the capture's may be left
    stop.set()
    thread.join()
    torch.cuda.synchronize(0)
    assert (failed == 0 and asked > 0) if watching else failed > 0
    wait_for(exporter, fences[-1])


def test_a_refused_handle_type_leaves_no_error_behind() -> None:
    """Planted bug: a probe through the runtime, whose last error stays (field reports 44, 45)."""
    refusal = ""
    try:
        CudaExporterRegion.create(0, 1, 1, 1, handle_type="fabric").close()
    except BackendError as error:
        refusal = str(error)
    if not refusal:
        pytest.skip("FABRIC handles can be made here")
    assert "IMEX" in refusal or "FABRIC_SUPPORTED" in refusal
    x = torch.ones(1000, device="cuda:0")
    assert int((x + x).sum()) == 2000
    region = CudaExporterRegion.create(0, 1, 1, 1)
    assert region.info.handle_type == "posix"
    region.close()


def test_too_much_memory_is_refused_with_numbers() -> None:
    """Planted bug: the range of a pool that could not be made stays reserved (field report 8)."""
    before, total = free_bytes(), int(torch.cuda.mem_get_info(0)[1])
    for _ in range(3):
        with pytest.raises(PoolMemoryError) as caught:
            CudaExporterRegion.create(0, 2 * total, 2 * total, 4)
        assert caught.value.call == "cuMemCreate"
        assert 0 < caught.value.available <= total
    assert abs(before - free_bytes()) <= 2 * MIB


def test_real_streams_need_no_push(
    exporter: CudaExporterRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread without a context, record, wait and query stay one driver call each."""
    stream, pushes = new_stream(0), 0
    exporter.record_ready(0, stream.cuda_stream)
    fence = exporter.ready_fence(0)
    assert isinstance(fence, events.Event)
    pushed = PrimaryContext.pushed

    def counted(self: PrimaryContext) -> contextlib.AbstractContextManager[None]:
        nonlocal pushes
        pushes += 1
        return pushed(self)

    monkeypatch.setattr(PrimaryContext, "pushed", counted)
    current: list[int] = []

    def work() -> None:
        current.append(driver.context_current())
        exporter.record_ready(0, stream.cuda_stream)
        fence.wait(stream.cuda_stream)
        current.append(int(fence.done()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert current[0] == 0
    assert len(current) == 2
    assert pushes == 0
    stream.synchronize()


def test_poison_covers_a_boundary(exporter: CudaExporterRegion) -> None:
    segment = exporter.grow(2 * MIB)
    pool(exporter, segment.start - 1000, 2000).fill_(1)
    torch.cuda.synchronize(0)
    exporter.poison(segment.start - 256, 512)
    found = pool(exporter, segment.start - 1000, 2000).tolist()
    assert found == [1] * 744 + [POISON] * 512 + [1] * 744


def test_another_current_device_does_not_matter(peer_on: Callable[[int], Peer]) -> None:
    """Planted bug: events and streams of whichever GPU is current (field report 43)."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and torch sees one")
    peer = peer_on(1)
    with torch.cuda.device(0):
        exporter = CudaExporterRegion.create(1, 2 * MIB, 8 * MIB, 4)
        attach(peer, exporter, 1)
        view(exporter.address, MIB, 1).fill_(6)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                exporter.grow(MIB)
                exporter.record_ready(0, 0)
            except BaseException as error:  # handed to the test's thread
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert errors == []
        exporter.record_ready(1, 0)
        peer.tell("open_ready", 1, exporter.ready_handle(1))
        exporter.open_release(1, 1, peer.tell("read_later", 1, 0, MIB, True, 0))
        assert peer.tell("copied") == [6, 6]
        wait_for(exporter, release_fence(exporter, 1))
        peer.tell("close")
        exporter.close()


def test_an_event_is_not_recorded_on_another_gpus_default_stream() -> None:
    """The driver itself refuses it, which a record relies on (field report 43)."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and torch sees one")
    streams = (0, 1, 2)  # the default stream, and its aliases by name
    exporter = CudaExporterRegion.create(1, 2 * MIB, 2 * MIB, len(streams))
    event = events.Event.create(exporter._range.context)
    with torch.cuda.device(0):
        for stream in streams:
            with pytest.raises(BackendError) as caught:
                driver.event_record(event._handle, stream)
            assert caught.value.code in events._CONTEXT_CODES
            exporter.record_ready(stream, stream)
    event.destroy()
    exporter.close()


def compute_processes() -> set[tuple[int, str]]:
    """Return (pid, GPU UUID) of every process with a context, as nvidia-smi sees it."""
    found = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = (line.split(", ") for line in found.stdout.splitlines())
    return {(int(row[0]), row[1]) for row in rows}


def test_a_consumer_opens_a_context_on_its_own_gpu_only(
    exporter: CudaExporterRegion, peer_on: Callable[[int], Peer], device: int
) -> None:
    """Planted bug: the exporter's GPU is made current to map or open events (field report 39)."""
    peer = peer_on(device)
    attach(peer, exporter, device)
    exporter.record_ready(0, 0)
    peer.tell("open_ready", 0, exporter.ready_handle(0))
    exporter.open_release(1, 0, peer.tell("read_later", 0, 0, MIB, True, 0))
    peer.tell("copied")
    assert peer.tell("active_contexts") == [device]
    if shutil.which("nvidia-smi") is None:
        return
    apps = compute_processes()
    if (os.getpid(), exporter.info.device) in apps:  # else its pids are of another namespace
        mine = {uuid for pid, uuid in apps if pid == peer.process.pid}
        assert mine == {driver.device_uuid(device)}


def test_a_pool_of_a_gpu_that_is_not_there_is_refused(exporter: CudaExporterRegion) -> None:
    """Field report 40: a GPU that is not visible here is an error of its own."""
    unknown = msgspec.structs.replace(
        exporter.info, device="GPU-00000000-0000-0000-0000-000000000000"
    )
    with pytest.raises(BackendError, match="CUDA_VISIBLE_DEVICES") as caught:
        CudaConsumerRegion(unknown, 0)
    assert caught.value.code == "not_visible"
