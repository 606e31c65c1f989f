"""The GPU's floor on the stand-in driver, with host tensors laid over its memory."""

from __future__ import annotations

import ctypes
import socket
from typing import Any

import torch
from cuda.bindings import driver

from benchmarks.transports import floor_cuda
from benchmarks.transports.floor import Floor, FloorConsumer, FloorProducer
from benchmarks.transports.floor_cuda import checked

_STREAM = 0x1000


def _start(device: int) -> int:
    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device))))
    checked(driver.cuCtxPushCurrent(context))
    return _STREAM


def _view(address: int, nbytes: int, device: int) -> torch.Tensor:
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


floor_cuda._start = _start
floor_cuda._view = _view


class StandinProducer(FloorProducer):
    def memory(self) -> Any:
        return floor_cuda.ProducerMemory(self.setting)


class StandinConsumer(FloorConsumer):
    def memory(self, sock: socket.socket) -> Any:
        return floor_cuda.ConsumerMemory(self.setting, sock)


class StandinFloor(Floor):
    name = "standin_floor"
    producer = StandinProducer
    consumer = StandinConsumer
