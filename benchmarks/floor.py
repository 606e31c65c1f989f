"""The floor of a GPU hand-off: the same driver calls and two blocking sockets, no library.

One process copies (or, for ``zero-copy``, does not copy) a payload into memory that another has
mapped, records an interprocess event and sends one small packet; the other makes its stream wait,
records its own event and answers with one small packet; the first learns from the host that this
event is done.  Nothing can hand over a tensor for less on the same machine, so results of the
library are given as ratios to this, measured side by side in one run.

``python -m benchmarks.floor`` prints the floor alone.
"""

from __future__ import annotations

import array
import ctypes
import multiprocessing
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

_MESSAGE = struct.Struct("<IQQ")


def checked(result: tuple[Any, ...]) -> Any:
    """Return what a driver call returned; raise if it failed."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a driver call failed: {result[0]}")
    return result[1] if len(result) > 1 else None


def _location(device: int) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _map(handle: Any, nbytes: int, device: int, *, writable: bool) -> int:
    address = int(checked(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
    checked(driver.cuMemMap(address, nbytes, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location = _location(device)
    flags = driver.CUmemAccess_flags
    access.flags = (
        flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if writable
        else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    )
    checked(driver.cuMemSetAccess(address, nbytes, [access], 1))
    return address


class _Array:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _view(address: int, nbytes: int, device: int) -> torch.Tensor:
    return torch.as_tensor(_Array(address, nbytes), device=f"cuda:{device}")


def _events(count: int) -> list[Any]:
    flags = driver.CUevent_flags
    value = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_INTERPROCESS)
    return [checked(driver.cuEventCreate(value)) for _ in range(count)]


def _handle(event: Any) -> bytes:
    return ctypes.string_at(checked(driver.cuIpcGetEventHandle(event)).getPtr(), 64)


def _open(handle: bytes) -> Any:
    ipc = driver.CUipcEventHandle()
    ctypes.memmove(ipc.getPtr(), handle, 64)
    return checked(driver.cuIpcOpenEventHandle(ipc))


_POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Floor:
    """Both ends of the bare hand-off; this process is the producer."""

    def __init__(self, nbytes: int, slots: int, device: int, peer_device: int) -> None:
        self.slots = slots
        self.nbytes = nbytes
        self._device = device
        torch.zeros(1, device=f"cuda:{device}")
        granule = 2 << 20
        total = -(-nbytes * slots // granule) * granule
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = _location(device)
        prop.requestedHandleTypes = _POSIX
        handle = checked(driver.cuMemCreate(total, prop, 0))
        self.address = _map(handle, total, device, writable=True)
        fd = int(checked(driver.cuMemExportToShareableHandle(handle, _POSIX, 0)))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        context = multiprocessing.get_context("spawn")
        self._peer = context.Process(
            target=_consume, args=(theirs, peer_device, total, slots), daemon=True
        )
        self._peer.start()
        theirs.close()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        ours.sendmsg([b"pool"], rights)
        checked(driver.cuMemRelease(handle))
        self._sock = ours
        self.ready = _events(slots)
        ours.send(b"".join(_handle(event) for event in self.ready))
        handles = ours.recv(64 * slots)
        self.released = [_open(handles[64 * i : 64 * i + 64]) for i in range(slots)]
        self.targets = [_view(self.address + i * nbytes, nbytes, device) for i in range(slots)]

    def send(self, slot: int, source: torch.Tensor | None, stream: int) -> None:
        """Copy, record, send one packet."""
        if source is not None:
            self.targets[slot].copy_(source, non_blocking=True)
        driver.cuEventRecord(self.ready[slot], stream)
        self._sock.send(_MESSAGE.pack(slot, slot * self.nbytes, self.nbytes))

    def receive(self) -> int:
        """Wait for one packet; return its slot."""
        return int(_MESSAGE.unpack(self._sock.recv(_MESSAGE.size))[0])

    def wait(self, slot: int) -> None:
        """Learn from the host that the consumer's event of a slot is done."""
        while driver.cuEventQuery(self.released[slot])[0] != driver.CUresult.CUDA_SUCCESS:
            pass

    def closed_loop(self, source: torch.Tensor | None, rounds: int) -> list[float]:
        """Return the seconds of each round with one payload in flight."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        times = []
        for turn in range(rounds):
            slot = turn % self.slots
            begin = time.perf_counter()
            self.send(slot, source, stream)
            self.wait(self.receive())
            times.append(time.perf_counter() - begin)
        return times

    def pipelined(self, source: torch.Tensor | None, rounds: int) -> float:
        """Return the seconds for ``rounds`` payloads with every slot in flight."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        begin = time.perf_counter()
        for turn in range(rounds):
            if turn >= self.slots:
                self.wait(self.receive())
            self.send(turn % self.slots, source, stream)
        for _ in range(min(self.slots, rounds)):
            self.wait(self.receive())
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the consumer and let go."""
        self._sock.close()
        self._peer.join()


def _consume(sock: socket.socket, device: int, total: int, slots: int) -> None:
    torch.cuda.set_device(device)
    torch.zeros(1, device=f"cuda:{device}")
    _, ancillary, _, _ = sock.recvmsg(16, socket.CMSG_SPACE(4))
    fd = array.array("i", ancillary[0][2])[0]
    handle = checked(driver.cuMemImportFromShareableHandle(fd, _POSIX))
    address = _map(handle, total, device, writable=False)
    handles = sock.recv(64 * slots)
    ready = [_open(handles[64 * i : 64 * i + 64]) for i in range(slots)]
    released = _events(slots)
    sock.send(b"".join(_handle(event) for event in released))
    stream = torch.cuda.current_stream(device).cuda_stream
    while message := sock.recv(_MESSAGE.size):
        slot, offset, nbytes = _MESSAGE.unpack(message)
        driver.cuStreamWaitEvent(stream, ready[slot], 0)
        _view(address + offset, nbytes, device)
        driver.cuEventRecord(released[slot], stream)
        sock.send(message)


def quantile(times: list[float], q: float) -> float:
    """Return the q-quantile in microseconds, leaving out the first tenth as warm-up."""
    kept = sorted(times[len(times) // 10 :])
    return kept[min(len(kept) - 1, int(len(kept) * q))] * 1e6


def main(write: Callable[[str], object] = sys.stdout.write) -> None:
    """Print the floor for some sizes."""
    peer = 1 if torch.cuda.device_count() > 1 else 0
    for nbytes in (16 << 10, 2 << 20, 36 << 20):
        floor = Floor(nbytes, 8, 0, peer)
        source = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
        for name, what in (("copy", source), ("zero-copy", None)):
            times = floor.closed_loop(what, 1000)
            seconds = floor.pipelined(what, 1000)
            write(
                f"{nbytes:>9} B {name:<9} closed p50 {quantile(times, 0.5):7.1f} us p99 "
                f"{quantile(times, 0.99):7.1f} us, pipelined {1000 / seconds:9.0f}/s\n"
            )
        floor.close()


if __name__ == "__main__":
    main()
