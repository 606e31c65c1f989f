"""A consumer on a GPU in another process that does one thing after another as it is told."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from asyncvmm._backends import driver
from asyncvmm._backends.cuda import CudaConsumerRegion
from asyncvmm._types import RegionInfo
from tests.standin.peer import Told, main


class _Bytes:
    """A range of device memory that torch can see."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def view(address: int, nbytes: int, device: int) -> torch.Tensor:
    """Return bytes of a pool as a tensor on ``device``, wherever the memory lives."""
    return torch.as_tensor(_Bytes(address, nbytes), device=f"cuda:{device}")


def new_stream(device: int) -> torch.cuda.Stream:
    """Make a stream on a GPU."""
    return torch.cuda.Stream(device)


def spin(cycles: int) -> None:
    """Keep the current stream busy; 20 million cycles are about 10 ms on an H200."""
    if cycles:
        torch.cuda._sleep(cycles)


class GpuTold(Told):
    """What the other process can do."""

    device = 0
    stream: torch.cuda.Stream
    copy: torch.Tensor

    def attach(self, info: Any, device: int) -> None:
        torch.cuda.set_device(device)
        torch.zeros(1, device=f"cuda:{device}")
        self.device = device
        self.stream = new_stream(device)
        self.region = CudaConsumerRegion(msgspec.convert(info, RegionInfo), device)

    def read_later(self, slot: int, start: int, nbytes: int, wait: bool, cycles: int) -> bytes:
        """Queue a wait, a spin and a copy of the bytes, release behind them, return at once."""
        source = view(self.region.address + start, nbytes, self.device)
        if wait:
            self.region.wait_ready(slot, self.stream.cuda_stream)
        with torch.cuda.stream(self.stream):
            spin(cycles)
            self.copy = source.clone()
        return self.region.record_release(slot, [self.stream.cuda_stream])

    def copied(self) -> list[int]:
        """Return the least and the greatest byte of the last copy."""
        self.stream.synchronize()
        return [int(self.copy.min()), int(self.copy.max())]

    def release_behind_spin(self, cycles: int, slots: int) -> list[bytes]:
        """Queue a spin and release slots 0 to ``slots`` behind it."""
        with torch.cuda.stream(self.stream):
            spin(cycles)
        return [
            self.region.record_release(slot, [self.stream.cuda_stream]) for slot in range(slots)
        ]

    def bounds(self, start: int, nbytes: int) -> list[int]:
        """Return the least and the greatest byte of a range now."""
        found = view(self.region.address + start, nbytes, self.device)
        return [int(found.min()), int(found.max())]

    def stray_write(self) -> str:
        """Write through the view; return what torch says to it."""
        try:
            view(self.region.address, 256, self.device).fill_(1)
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            return str(error)
        return ""

    def active_contexts(self) -> list[int]:
        """Return the numbers of the GPUs whose primary context is open in this process."""
        return [
            number
            for number in range(driver.device_count())
            if driver.load().cuDevicePrimaryCtxGetState(driver.device_get(number))[2]
        ]


if __name__ == "__main__":
    main(GpuTold())
