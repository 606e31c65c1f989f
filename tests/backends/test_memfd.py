"""Host memory: what only memfds, seals and a second process can show."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncvmm._backends import mapping, memfd, sealed
from asyncvmm._backends.mapping import PAGE, Mapping
from asyncvmm._backends.memfd import HostConsumerRegion, HostExporterRegion
from asyncvmm._errors import BackendError, PoolMemoryError, RemoteProtocolError
from asyncvmm._fds import OwnedFd
from asyncvmm._types import RegionInfo, SegmentInfo

MIB = 1 << 20
ALL_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0010  # SEAL, SHRINK, GROW, FUTURE_WRITE


def footprint() -> tuple[int, int, list[str]]:
    """Descriptors, reserved bytes, and the lines of our memfds in this process's memory map."""
    gc.collect()  # exceptions hold frames, and frames hold regions
    reserved, placed = 0, []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if "/memfd:asyncvmm-pool" in line:
            placed.append(line)
        elif rights == "---p":
            start, end = (int(each, 16) for each in span.split("-"))
            reserved += end - start
    return len(os.listdir("/proc/self/fd")), reserved, placed


def resident() -> int:
    """Bytes of pools that are mapped here and present.

    From smaps, because the sums in /proc/self/status lag behind on machines of many cores.
    """
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, value, *_ = line.split()
        if not name.endswith(":"):
            ours = "/memfd:asyncvmm-pool" in line
        elif ours and name == "Rss:":
            total += int(value) * 1024
    return total


@pytest.fixture
def exporter() -> Iterator[HostExporterRegion]:
    region = HostExporterRegion.create(2 * PAGE, 8 * PAGE, 4)
    yield region
    region.close()


def attach(exporter: HostExporterRegion) -> HostConsumerRegion:
    consumer = HostConsumerRegion(exporter.info)
    for segment in exporter.segments():
        consumer.map(segment, exporter.export(segment.index))
    return consumer


# --- a second process ----------------------------------------------------------------------------

PEER = """
import ctypes, errno, json, mmap, os, socket, sys
import msgspec
from asyncvmm._backends.memfd import HostConsumerRegion, HostExporterRegion
from asyncvmm._fds import OwnedFd
from asyncvmm._types import RegionInfo, SegmentInfo

sock = socket.socket(fileno=int(sys.argv[1]))

def receive():
    data, fds, _, _ = socket.recv_fds(sock, 65536, 16)
    info, segments = msgspec.msgpack.decode(data, type=tuple[RegionInfo, list[SegmentInfo]])
    region = HostConsumerRegion(info)
    spare = os.dup(fds[0])
    for segment, fd in zip(segments, fds, strict=True):
        region.map(segment, OwnedFd(fd))
    return region, segments, spare

def outcome(call, *args):
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "allowed"
"""


@contextmanager
def peer(script: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """Run ``script`` behind ``PEER`` in a new process that shares a socket with this one."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", PEER + textwrap.dedent(script), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(process.kill)
        theirs.close()
        yield process, ours


def send(sock: socket.socket, exporter: HostExporterRegion) -> None:
    segments = exporter.segments()
    with ExitStack() as stack:
        handles = [stack.enter_context(exporter.export(each.index)) for each in segments]
        packet = msgspec.msgpack.encode((exporter.info, segments))
        socket.send_fds(sock, [packet], [handle.fileno() for handle in handles])


def answer(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return json.loads(output)


ATTACKS = """
region, segments, fd = receive()
size = segments[0].nbytes
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
libc.fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long

def libc_call(name, *args):
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), name)

def reopen():
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    mmap.mmap(again, size)

print(json.dumps({
    "read": ctypes.string_at(region.address + size - 3, 6).decode(),
    "shrink": outcome(os.ftruncate, fd, 0),
    "enlarge": outcome(os.ftruncate, fd, 2 * size),
    "write": outcome(os.pwrite, fd, b"x", 0),
    "map": outcome(mmap.mmap, fd, size),
    "reopen": outcome(reopen),
    "mprotect": outcome(libc_call, "mprotect", region.address, size, 3),
    "punch": outcome(libc_call, "fallocate", fd, 3, 0, size),
    "remove": outcome(libc_call, "madvise", region.address, size, 9),
}))
"""


def test_a_peer_reads_across_segments_and_its_attacks_fail(exporter: HostExporterRegion) -> None:
    """Field report 52, and why a pool is not one memfd with holes.

    Planted bug: a seal is left out.
    """
    exporter.grow(PAGE)
    ctypes.memmove(exporter.address + 2 * PAGE - 3, b"across", 6)
    with peer(ATTACKS) as (process, sock):
        send(sock, exporter)
        found = answer(process)
    assert found.pop("read") == "across"
    assert found.pop("mprotect") == found.pop("remove") == "EACCES"
    assert set(found.values()) == {"EPERM"}, found
    assert ctypes.string_at(exporter.address + 2 * PAGE - 3, 6) == b"across"


def test_a_stray_write_ends_only_the_peer_that_did_it(exporter: HostExporterRegion) -> None:
    """Planted bug: consumers map a pool writable that is not."""
    ctypes.memmove(exporter.address, b"ours", 4)
    with peer("ctypes.memset(receive()[0].address, 0, 4)") as (process, sock):
        send(sock, exporter)
        assert process.wait(30) == -signal.SIGSEGV
    assert ctypes.string_at(exporter.address, 4) == b"ours"


def test_a_writable_pool_is_written_by_the_peer_and_still_not_resized() -> None:
    exporter = HostExporterRegion.create(PAGE, PAGE, 1, writable=True)
    script = """
    region, segments, fd = receive()
    ctypes.memmove(region.address, b"theirs", 6)
    print(json.dumps([outcome(os.ftruncate, fd, size) for size in (0, 2 * segments[0].nbytes)]))
    """
    with peer(script) as (process, sock):
        send(sock, exporter)
        assert answer(process) == ["EPERM", "EPERM"]
    assert ctypes.string_at(exporter.address, 6) == b"theirs"
    exporter.close()


def test_what_is_mapped_outlives_the_exporter() -> None:
    """Inv. 15: after the exporter was killed its bytes stay, until the last keepalive is gone."""
    script = """
    region = HostExporterRegion.create(4096, 4096, 1)
    ctypes.memmove(region.address, b"legacy", 6)
    data = msgspec.msgpack.encode((region.info, region.segments()))
    handle = region.export(0)
    socket.send_fds(sock, [data], [handle.fileno()])
    sock.recv(1)
    """
    before = footprint()
    with peer(script) as (process, sock):
        data, fds, _, _ = socket.recv_fds(sock, 65536, 16)
        info, segments = msgspec.msgpack.decode(data, type=tuple[RegionInfo, list[SegmentInfo]])
        consumer = HostConsumerRegion(info)
        consumer.map(segments[0], OwnedFd(fds[0]))
        process.kill()
        process.wait(30)
    keep, address = consumer.keepalive(), consumer.address
    consumer.close()
    assert ctypes.string_at(address, 6) == b"legacy"
    del keep
    assert footprint() == before


FORK = """
import gc, subprocess
exporter = HostExporterRegion.create(8192, 16384, 1)
consumer = HostConsumerRegion(exporter.info)
consumer.map(exporter.segments()[0], exporter.export(0))
ctypes.memmove(exporter.address, b"before", 6)
child = os.fork()
if child == 0:
    held = b"memfd" in subprocess.check_output(["ls", "-l", f"/proc/{os.getpid()}/fd"])
    same = ctypes.string_at(consumer.address, 6) == b"before"
    consumer.close()
    exporter.close()
    del consumer, exporter
    gc.collect()
    os._exit(held * 2 + (not same))
_, status = os.waitpid(child, 0)
ctypes.memmove(exporter.address, b"after!", 6)
seen = ctypes.string_at(consumer.address, 6).decode()
again = HostConsumerRegion(exporter.info)
again.map(exporter.segments()[0], exporter.export(0))
print(json.dumps([os.waitstatus_to_exitcode(status), seen, again.address != consumer.address]))
"""


def test_a_forked_child_may_drop_everything_and_the_parent_goes_on() -> None:
    with peer(FORK) as (process, _):
        assert answer(process) == [0, "after!", True]


LIMITS = """
import resource
from asyncvmm._errors import BackendError

def attempt(kind, soft, *sizes):
    old = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, old[1]))
    try:
        HostExporterRegion.create(*sizes, 1).close()
        return "allowed"
    except BackendError as error:
        return [error.call, error.code]
    finally:
        resource.setrlimit(kind, old)

free = os.dup(0)  # the lowest number that is free
os.close(free)
before = os.listdir("/proc/self/fd")
space = int(open("/proc/self/statm").read().split()[0]) * 4096
print(json.dumps([
    attempt(resource.RLIMIT_FSIZE, 1 << 20, 2 << 20, 2 << 20),
    attempt(resource.RLIMIT_AS, space + (64 << 20), 4096, 1 << 30),
    attempt(resource.RLIMIT_NOFILE, free, 4096, 4096),
    attempt(resource.RLIMIT_NOFILE, free + 1, 4096, 4096),
    os.listdir("/proc/self/fd") == before,
]))
"""


def test_real_limits_name_the_call_that_met_them() -> None:
    with peer(LIMITS) as (process, _):
        assert answer(process) == [
            ["ftruncate", "EFBIG"],
            ["mmap", "ENOMEM"],
            ["memfd_create", "EMFILE"],
            "allowed",
            True,
        ]


# --- what a consumer maps ------------------------------------------------------------------------


def sealed_file(size: int, seals: int, *, allow: bool = True) -> int:
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if allow else 0))
    os.ftruncate(fd, size)
    if allow:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def ordinary_file(tmp_path: Path) -> int:
    path = tmp_path / "ordinary"
    path.write_bytes(bytes(2 * PAGE))
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


FOREIGN: dict[str, tuple[Callable[[Path], int], str, str]] = {
    "unsealed": (
        lambda _: sealed_file(2 * PAGE, 0),
        "unsealed",
        "SEAL, F_SEAL_SHRINK, F_SEAL_GROW",
    ),
    "sealing not allowed": (lambda _: sealed_file(2 * PAGE, 0, allow=False), "unsealed", "SHRINK"),
    "no seal": (lambda _: sealed_file(2 * PAGE, ALL_SEALS - 1), "unsealed", "F_SEAL_SEAL:"),
    "no shrink": (lambda _: sealed_file(2 * PAGE, ALL_SEALS - 2), "unsealed", "F_SEAL_SHRINK:"),
    "no grow": (lambda _: sealed_file(2 * PAGE, ALL_SEALS - 4), "unsealed", "F_SEAL_GROW:"),
    "no future write": (lambda _: sealed_file(2 * PAGE, 7), "unsealed", "F_SEAL_FUTURE_WRITE:"),
    "a file on disk": (ordinary_file, "unsealed", "F_SEAL_SEAL"),
    "too small": (lambda _: sealed_file(PAGE, ALL_SEALS), "size", f"{PAGE:,} bytes"),
    "too large": (lambda _: sealed_file(3 * PAGE, ALL_SEALS), "size", f"{3 * PAGE:,} bytes"),
    "a device": (lambda _: os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC), "size", "mode"),
    "an eventfd": (lambda _: os.eventfd(0, os.EFD_CLOEXEC), "size", "mode"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_descriptor_is_refused_closed_and_not_mapped(
    kind: str, tmp_path: Path, exporter: HostExporterRegion
) -> None:
    """Field report 52.  Planted bug: a seal, or the size is not looked at."""
    make, code, words = FOREIGN[kind]
    consumer = HostConsumerRegion(exporter.info)
    before = footprint()
    handle = OwnedFd(make(tmp_path))
    with pytest.raises(BackendError, match=words) as caught:
        consumer.map(exporter.segments()[0], handle)
    assert caught.value.code == code
    assert handle.number == -1
    del caught
    assert footprint() == before
    consumer.map(exporter.segments()[0], exporter.export(0))  # and the range can still be used


def test_a_writable_consumer_does_not_ask_for_the_write_seal() -> None:
    exporter = HostExporterRegion.create(PAGE, PAGE, 1, writable=True)
    consumer = attach(exporter)
    ctypes.memmove(consumer.address, b"both", 4)
    assert ctypes.string_at(exporter.address, 4) == b"both"
    reader = HostConsumerRegion(msgspec.structs.replace(exporter.info, writable=False))
    with pytest.raises(BackendError, match="F_SEAL_FUTURE_WRITE"):
        reader.map(exporter.segments()[0], exporter.export(0))
    exporter.close()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "cuda"},
        {"handle_type": "posix"},
        {"granule": 0},
        {"granule": -PAGE},
        {"granule": PAGE // 2},
        {"max_nbytes": 0},
        {"max_nbytes": -PAGE},
        {"max_nbytes": PAGE + 256},
    ],
)
def test_a_pool_that_does_not_fit_this_process_is_refused(change: dict[str, Any]) -> None:
    info = RegionInfo(kind="host", max_nbytes=PAGE, granule=PAGE, slots=1)
    with pytest.raises(RemoteProtocolError):
        HostConsumerRegion(msgspec.structs.replace(info, **change))


def test_more_address_space_than_there_is_is_an_error_of_mmap() -> None:
    with pytest.raises(BackendError) as caught:
        HostConsumerRegion(RegionInfo(kind="host", max_nbytes=1 << 60, granule=PAGE, slots=1))
    assert (caught.value.call, caught.value.code) == ("mmap", "ENOMEM")


# --- nothing leaks -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))], ids=str)
def test_any_order_of_letting_go_ends_with_nothing(order: tuple[int, ...]) -> None:
    """Planted bug: a finalizer that unmaps twice, or a region that waits for its peer."""
    before = footprint()
    exporter = HostExporterRegion.create(PAGE, 4 * PAGE, 1)
    consumer = attach(exporter)
    ctypes.memmove(exporter.address, b"here", 4)
    keeps = {exporter.address: exporter.keepalive(), consumer.address: consumer.keepalive()}
    ours, theirs = keeps
    steps: list[Callable[[], object]] = [
        exporter.close,
        consumer.close,
        lambda: keeps.pop(ours),
        lambda: keeps.pop(theirs),
    ]
    for step in order:
        steps[step]()
        for address in keeps:
            assert ctypes.string_at(address, 4) == b"here"
    assert footprint() == before


def test_mappings_stay_flat_over_growth_and_shrinking(exporter: HostExporterRegion) -> None:
    """Field report 60.  Planted bug: the range of a segment given back is not reserved again as
    one, so that the memory map fills up."""
    consumer = attach(exporter)
    lines = len(Path("/proc/self/maps").read_text().splitlines())
    before = footprint()
    for _ in range(64):
        segment = exporter.grow(2 * PAGE)
        consumer.map(segment, exporter.export(segment.index))
        exporter.shrink(segment.index)
        consumer.unmap(segment.index)
    assert footprint() == before
    assert abs(len(Path("/proc/self/maps").read_text().splitlines()) - lines) < 8
    assert exporter.grow(PAGE).index == 65  # never an index twice


def test_memory_is_there_at_creation_and_returns_after_a_shrink() -> None:
    """Field report 55.  Planted bug: pages come at first touch, or stay after a shrink."""
    exporter = HostExporterRegion.create(MIB, 16 * MIB, 1)
    assert resident() == MIB
    segment = exporter.grow(8 * MIB)
    assert resident() == 9 * MIB
    with exporter.export(segment.index) as handle:
        status = os.fstat(handle.fileno())
        assert status.st_blocks * 512 == status.st_size == 8 * MIB
    exporter.shrink(segment.index)
    assert resident() == MIB
    assert segment_files() == 1
    exporter.close()
    assert resident() == segment_files() == 0


def segment_files() -> int:
    """Count the memfds that this process keeps alive by a descriptor or a mapping."""
    found = {int(line.split()[4]) for line in footprint()[2]}
    for name in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd", name)
        if link.is_symlink() and os.readlink(link).startswith("/memfd:asyncvmm-pool"):
            found.add(link.stat().st_ino)
    return len(found)


def test_a_kernel_without_populate_gets_its_pages_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the answer EINVAL is taken for done."""

    def old_kernel(address: int, nbytes: int, advice: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(mapping, "_c_madvise", old_kernel)
    exporter = HostExporterRegion.create(MIB, MIB, 1)
    assert resident() == MIB
    exporter.close()


def test_growth_from_many_threads_never_overlaps() -> None:
    """Planted bug: two threads find the same gap, because nothing makes them take turns."""
    exporter = HostExporterRegion.create(PAGE, 33 * PAGE, 1)
    with ThreadPoolExecutor(8) as pool:
        grown = list(pool.map(exporter.grow, [PAGE] * 32))
    assert sorted(each.start for each in grown) == [n * PAGE for n in range(1, 33)]
    assert sorted(each.index for each in grown) == list(range(1, 33))
    exporter.close()


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1 << 50, 1 << 60, (1 << 63) - 1, 1 << 70])
def test_a_pool_that_is_not_there_says_so_and_keeps_nothing(size: int) -> None:
    """Field report 55."""
    before = footprint()
    with pytest.raises(PoolMemoryError) as caught:
        HostExporterRegion.create(size, size, 1)
    assert caught.value.asked >= size
    assert 0 < caught.value.available < 1 << 50
    assert caught.value.where
    del caught
    assert footprint() == before


class Failing:
    """Stands in for ``checked``: counts the calls, and the k-th one fails with ``code``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at = -1
        self.code = errno.EIO
        self._real = mapping.checked
        for module in (mapping, memfd, sealed):
            monkeypatch.setattr(module, "checked", self)

    def arm(self, fail_at: int, code: int = errno.EIO) -> None:
        self.calls, self.fail_at, self.code = [], fail_at, code

    def __call__(self, call: str, function: Callable[..., object], /, *args: object) -> object:
        self.calls.append(call)
        if len(self.calls) - 1 == self.fail_at:
            return self._real(call, self._fail)
        return self._real(call, function, *args)

    def _fail(self) -> None:
        raise OSError(self.code, os.strerror(self.code))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


COMMIT = ["memfd_create", "ftruncate", "posix_fallocate", "mmap", "madvise", "F_ADD_SEALS"]


@pytest.mark.parametrize(("step", "name"), [*enumerate(["mmap", *COMMIT])])
def test_creation_is_all_or_nothing(failing: Failing, step: int, name: str) -> None:
    """Planted bug: one of the steps is not undone when the next one fails."""
    HostExporterRegion.create(PAGE, 2 * PAGE, 1).close()
    assert failing.calls == ["mmap", *COMMIT]
    before = footprint()
    failing.arm(step)
    with pytest.raises(BackendError) as caught:
        HostExporterRegion.create(PAGE, 2 * PAGE, 1)
    assert (caught.value.call, caught.value.code) == (name, "EIO")
    del caught
    assert footprint() == before


@pytest.mark.parametrize(("step", "name"), [*enumerate(COMMIT)])
def test_growth_is_all_or_nothing(
    failing: Failing, exporter: HostExporterRegion, step: int, name: str
) -> None:
    """Planted bug: the segment is entered before it is there."""
    segments, before = exporter.segments(), footprint()
    failing.arm(step)
    with pytest.raises(BackendError) as caught:
        exporter.grow(PAGE)
    assert (caught.value.call, caught.value.code) == (name, "EIO")
    assert len(os.listdir("/proc/self/fd")) == before[0]  # closed, not left to who drops the error
    del caught
    assert exporter.segments() == segments
    assert footprint() == before
    failing.arm(-1)
    assert exporter.grow(PAGE) == SegmentInfo(1, 2 * PAGE, PAGE)
    assert failing.calls == COMMIT


def test_a_shrink_that_fails_leaves_the_segment(
    failing: Failing, exporter: HostExporterRegion
) -> None:
    segment = exporter.grow(PAGE)
    segments, before = exporter.segments(), footprint()
    failing.arm(0)
    with pytest.raises(BackendError):
        exporter.shrink(segment.index)
    assert exporter.segments() == segments
    assert footprint() == before
    exporter.poison(segment.start, segment.nbytes)
    exporter.export(segment.index).close()


@pytest.mark.parametrize("step", range(3))
def test_mapping_is_all_or_nothing(
    failing: Failing, exporter: HostExporterRegion, step: int
) -> None:
    consumer = HostConsumerRegion(exporter.info)
    segment, before = exporter.segments()[0], footprint()
    handle = exporter.export(0)
    failing.arm(step)
    with pytest.raises(BackendError) as caught:
        consumer.map(segment, handle)
    assert caught.value.call == ["fstat", "F_GET_SEALS", "mmap"][step]
    del caught
    assert footprint() == before
    consumer.map(segment, exporter.export(0))
    failing.arm(0)
    with pytest.raises(BackendError):
        consumer.unmap(0)
    assert ctypes.string_at(consumer.address, 1) == b"\0"
    consumer.unmap(0)
    assert footprint() == before


def test_growth_asks_for_room_first(
    monkeypatch: pytest.MonkeyPatch, failing: Failing, exporter: HostExporterRegion
) -> None:
    """Planted bug: only creation looks, and growth meets the kernel's out-of-memory killer."""

    def full(asked: int) -> None:
        raise PoolMemoryError(asked, 7, "a full machine")

    monkeypatch.setattr(memfd, "check_room", full)
    failing.arm(-1)
    with pytest.raises(PoolMemoryError) as caught:
        exporter.grow(1)
    assert (caught.value.asked, caught.value.available) == (PAGE, 7)
    assert failing.calls == []


def test_populate_that_fails_is_no_old_kernel(
    monkeypatch: pytest.MonkeyPatch, exporter: HostExporterRegion
) -> None:
    """Planted bug: every failure is taken for EINVAL, and touching the pages is a bus error."""

    def no_pages(address: int, nbytes: int, advice: int) -> int:
        ctypes.set_errno(errno.EFAULT)
        return -1

    monkeypatch.setattr(mapping, "_c_madvise", no_pages)
    with pytest.raises(BackendError) as caught:
        exporter.grow(1)
    assert (caught.value.call, caught.value.code) == ("madvise", "EFAULT")


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC])
@pytest.mark.parametrize("step", [COMMIT.index("posix_fallocate"), COMMIT.index("madvise")])
def test_a_kernel_out_of_memory_is_the_same_error(
    failing: Failing, exporter: HostExporterRegion, step: int, code: int
) -> None:
    failing.arm(step, code)
    with pytest.raises(PoolMemoryError) as caught:
        exporter.grow(PAGE)
    assert (caught.value.asked, caught.value.available) == (PAGE, 0)
    assert COMMIT[step] in caught.value.where


def test_a_place_that_lost_its_reservation_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 6.12 may unmap what lies in the way and then fail.

    Planted bug: the hole stays, and the next mapping of anybody lies where ours ends it.
    """
    before = footprint()
    reserved = Mapping(4 * PAGE)
    real = mapping._mmap

    def drops_and_fails(
        address: int | None, nbytes: int, protection: int, flags: int, fd: int
    ) -> int:
        if fd < 0:
            return real(address, nbytes, protection, flags, fd)
        mapping._c_munmap(address, nbytes)
        raise OSError(errno.ENOMEM, "full")

    monkeypatch.setattr(mapping, "_mmap", drops_and_fails)
    with pytest.raises(BackendError, match="ENOMEM"):
        reserved.place(PAGE, PAGE, 0, mapping.READ)
    assert footprint()[1] - before[1] == 4 * PAGE
    del reserved
    assert footprint() == before
