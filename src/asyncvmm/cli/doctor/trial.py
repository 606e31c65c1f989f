"""The trial of two processes: share GPU memory and events with a child, and hand off to it.

The child (``python -m asyncvmm.cli.doctor.trial NUMBER DEVICE``, a socket's number and a GPU's)
maps the pool read-only as a consumer does, waits for each ready event on its stream, copies what
it sees there, records its release event, and at the end tries to write, which must fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from asyncvmm._backends import driver
from asyncvmm._backends.contexts import PrimaryContext
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._backends.driver_memory import HandleType, memory_fill
from asyncvmm._backends.memfd import POISON
from asyncvmm._errors import BackendError
from asyncvmm._fds import OwnedFd
from asyncvmm._types import RegionInfo, SegmentInfo

NBYTES = 2 << 20
ROUNDS = 100
WARM = 20
PATIENCE = 60.0
"""Seconds for any answer: a first context may take many on a machine with several GPUs."""

SPAN = 4096
"""Bytes that the child copies and compares in each round."""


class Outcome(NamedTuple):
    """What came of a trial."""

    create: float
    share: float
    """Seconds: export here, import and map there."""
    handoff: float
    """Median seconds of an event there and one back, host messages included."""
    right: bool
    """The child saw what was written."""
    read_only: str
    """The driver's answer to a write of the child; empty if it let it pass."""


def run(device: int, kind: HandleType) -> Outcome:
    """Carry the trial out; raise BackendError with the call that failed, here or there."""
    begun = time.perf_counter()
    region = CudaExporterRegion.create(device, NBYTES, NBYTES, 1, handle_type=kind)
    create = time.perf_counter() - begun
    with contextlib.closing(region), _child(device) as ask:
        ask(["begin"], None)
        region.poison(0, NBYTES)
        begun = time.perf_counter()
        handle = region.export(0)
        segment = region.segments()[0]
        if isinstance(handle, OwnedFd):
            with handle:
                ask(["map", region.info, segment, b""], handle)
        else:
            ask(["map", region.info, segment, handle], None)
        share = time.perf_counter() - begun
        context = PrimaryContext(device)
        try:
            with context.working():
                stream = driver.stream_create()
                try:
                    handoff = _hand_off(region, ask, int(stream))
                finally:
                    driver.stream_destroy(stream)
        finally:
            context.release()
        right = ask(["look"], None)
        return Outcome(create, share, handoff, right == [POISON], ask(["write"], None))


def _hand_off(region: CudaExporterRegion, ask: Any, stream: int) -> float:
    region.record_ready(0, stream)
    region.open_release(0, 0, ask(["events", region.ready_handle(0)], None))
    times = []
    for _ in range(WARM + ROUNDS):
        begun = time.perf_counter()
        region.record_ready(0, stream)
        ask(["go"], None)
        fence = region.release_fence(0, 0)
        while fence is not None and not fence.done():
            if time.perf_counter() - begun > PATIENCE:
                raise BackendError(
                    "the event that the other process recorded is never done here",
                    call="cuEventQuery",
                    code="never_done",
                )
        times.append(time.perf_counter() - begun)
    return statistics.median(times[WARM:])


@contextlib.contextmanager
def _child(device: int) -> Iterator[Any]:
    """Yield a function that asks the other process, and raises what it raised."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near:
        with far:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(far.fileno()), str(device)],
                pass_fds=[far.fileno()],
                stderr=subprocess.DEVNULL,  # what it meets it says in its answers
            )
        near.settimeout(PATIENCE)

        def ask(words: list[object], fd: OwnedFd | None) -> Any:
            fds = [fd.fileno()] if fd else []
            socket.send_fds(near, [msgspec.msgpack.encode(words)], fds)
            answer = near.recv(1 << 16)
            if not answer:
                raise BackendError(
                    f"the other process ended at {words[0]!r}", call=str(words[0]), code="died"
                )
            error, value = msgspec.msgpack.decode(answer)
            if error:
                raise BackendError(
                    f"in the other process: {error[0]}", call=error[1], code=error[2]
                )
            return value

        try:
            yield ask
        except (TimeoutError, BrokenPipeError, ConnectionResetError) as error:
            raise BackendError(
                f"the other process does not answer ({type(error).__name__})",
                call="recv",
                code="no_answer",
            ) from error
        finally:
            near.close()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Child:
    """The other process: a consumer reduced to its calls of the driver."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._seen = ctypes.create_string_buffer(SPAN)

    def begin(self, _: list[int]) -> None:
        self._context = PrimaryContext(self._device)
        driver.context_push(self._context._handle)
        self._stream = int(driver.stream_create())

    def map(self, fds: list[int], info: Any, segment: Any, handle: bytes) -> None:
        self._region = CudaConsumerRegion(msgspec.convert(info, RegionInfo), self._device)
        shared = OwnedFd(fds[0]) if fds else handle
        self._region.map(msgspec.convert(segment, SegmentInfo), shared)

    def events(self, _: list[int], ready: bytes) -> bytes:
        self._region.open_ready(0, ready)
        self._region.wait_ready(0, self._stream)
        return self._region.record_release(0, [self._stream])

    def go(self, _: list[int]) -> None:
        self._region.wait_ready(0, self._stream)
        self._region.record_release(0, [self._stream])

    def look(self, _: list[int]) -> list[int]:
        """Return the different bytes at the pool's beginning."""
        driver.copy(ctypes.addressof(self._seen), self._region.address, SPAN, self._stream)
        driver.stream_synchronize(self._stream)
        return sorted(set(self._seen.raw))

    def write(self, _: list[int]) -> str:
        """Write into the pool; return what the driver says to that.  The last thing it can do."""
        try:
            memory_fill(self._region.address, 0, SPAN, self._stream)
            driver.stream_synchronize(self._stream)
        except BackendError as error:
            return error.code
        return ""


def main() -> None:
    """Serve the socket until it ends."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        child = _Child(int(sys.argv[2]))
        while True:
            data, fds, _, _ = socket.recv_fds(channel, 1 << 16, 1)
            if not data:
                return
            word, *rest = msgspec.msgpack.decode(data)
            try:
                answer = [None, getattr(child, word)(fds, *rest)]
            except BackendError as error:
                answer = [[str(error), error.call, error.code], None]
            channel.send(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
