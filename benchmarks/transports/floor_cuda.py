"""The floor's memory on a GPU: the driver calls that no hand-off can do without."""

from __future__ import annotations

import array
import ctypes
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver

from benchmarks.setting import Setting

_GRANULE = 2 << 20
_HANDLE = 64
_POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


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
    return ctypes.string_at(checked(driver.cuIpcGetEventHandle(event)).getPtr(), _HANDLE)


def _open(handles: bytes) -> list[Any]:
    opened = []
    for start in range(0, len(handles), _HANDLE):
        ipc = driver.CUipcEventHandle()
        ctypes.memmove(ipc.getPtr(), handles[start : start + _HANDLE], _HANDLE)
        opened.append(checked(driver.cuIpcOpenEventHandle(ipc)))
    return opened


def _start(device: int) -> int:
    """Have a context on this device, and return the current stream."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=f"cuda:{device}")
    return int(torch.cuda.current_stream(device).cuda_stream)


def _size(setting: Setting) -> int:
    return -(-setting.payload.total * setting.depth // _GRANULE) * _GRANULE


def _index(device: str) -> int:
    return torch.device(device).index or 0


class ProducerMemory:
    """Slots of one size in exported memory, and one interprocess event for each."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        device = _index(setting.device)
        self._stream = _start(device)
        self._total = _size(setting)
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = _location(device)
        prop.requestedHandleTypes = _POSIX
        handle = checked(driver.cuMemCreate(self._total, prop, 0))
        address = _map(handle, self._total, device, writable=True)
        self._fd = int(checked(driver.cuMemExportToShareableHandle(handle, _POSIX, 0)))
        checked(driver.cuMemRelease(handle))
        payload = setting.payload
        self._targets = [
            [
                _view(address + slot * payload.total + i * payload.nbytes, payload.nbytes, device)
                for i in range(payload.count)
            ]
            for slot in range(setting.depth)
        ]
        self._ready = _events(setting.depth)
        self._released: list[list[Any]] = []

    def offer(self, sock: socket.socket) -> None:
        """Give a consumer the memory and the events, and get its own."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._fd]))]
        sock.sendmsg([b"pool"], rights)
        sock.send(b"".join(_handle(event) for event in self._ready))
        self._released.append(_open(sock.recv(_HANDLE * self._setting.depth)))

    def fill(self, slot: int, features: Sequence[torch.Tensor]) -> None:
        """Queue the copy by its driver call; several in one launch of torch's, which is less."""
        targets = self._targets[slot]
        if len(targets) == 1:
            address, source = targets[0].data_ptr(), features[0]
            driver.cuMemcpyAsync(address, source.data_ptr(), source.nbytes, self._stream)
        else:
            torch._foreach_copy_(targets, list(features), non_blocking=True)

    def publish(self, slot: int) -> None:
        """Record that the slot is ready."""
        driver.cuEventRecord(self._ready[slot], self._stream)

    def finish(self, slot: int, consumer: int) -> None:
        """Learn from the host that the consumer's event is done."""
        event = self._released[consumer][slot]
        while driver.cuEventQuery(event)[0] != driver.CUresult.CUDA_SUCCESS:
            pass


class ConsumerMemory:
    """The same slots, mapped read-only for the consumer's own device."""

    def __init__(self, setting: Setting, sock: socket.socket) -> None:
        device = self._device = _index(setting.consumer_device)
        self._stream = _start(device)
        _, ancillary, _, _ = sock.recvmsg(16, socket.CMSG_SPACE(4))
        fd = array.array("i", ancillary[0][2])[0]
        handle = checked(driver.cuMemImportFromShareableHandle(fd, _POSIX))
        os.close(fd)
        self._address = _map(handle, _size(setting), device, writable=False)
        checked(driver.cuMemRelease(handle))
        self._ready = _open(sock.recv(_HANDLE * setting.depth))
        self._released = _events(setting.depth)
        sock.send(b"".join(_handle(event) for event in self._released))
        self._payload = setting.payload

    def views(self, slot: int) -> list[torch.Tensor]:
        """Have the stream wait for the slot, and make a new view of each feature."""
        driver.cuStreamWaitEvent(self._stream, self._ready[slot], 0)
        payload = self._payload
        start = self._address + slot * payload.total
        return [
            _view(start + index * payload.nbytes, payload.nbytes, self._device)
            for index in range(payload.count)
        ]

    def done(self, slot: int) -> None:
        """Record that the slot was read."""
        driver.cuEventRecord(self._released[slot], self._stream)
