"""The floor's memory on the host: a memfd that every side maps."""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import socket
from collections.abc import Sequence

import torch

from benchmarks.setting import Payload, Setting

_LARGE = 1 << 20
"""Bytes.  From here on torch's copy, which takes several threads, is the faster one."""


def _map(fd: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(memoryview(mmap.mmap(fd, nbytes)), dtype=torch.uint8)


def _features(base: torch.Tensor, payload: Payload, slot: int) -> list[torch.Tensor]:
    start = slot * payload.total
    return [
        base[start + index * payload.nbytes : start + (index + 1) * payload.nbytes]
        for index in range(payload.count)
    ]


class ProducerMemory:
    """Slots of one size, all pages present."""

    def __init__(self, setting: Setting) -> None:
        self._nbytes = setting.payload.total * setting.depth
        self._fd = os.memfd_create("floor", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self._nbytes)
        base = _map(self._fd, self._nbytes)
        base.zero_()
        self._targets = [_features(base, setting.payload, slot) for slot in range(setting.depth)]

    def offer(self, sock: socket.socket) -> None:
        """Give a consumer what it needs."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._fd]))]
        sock.sendmsg([b"pool"], rights)

    def fill(self, slot: int, features: Sequence[torch.Tensor]) -> None:
        """Copy the features into a slot, as the library does."""
        for target, source in zip(self._targets[slot], features, strict=True):
            if source.nbytes < _LARGE:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            else:
                target.copy_(source)

    def publish(self, slot: int) -> None:
        """Host copies are done when they return."""

    def finish(self, slot: int, consumer: int) -> None:
        """An answer is enough: host reads are done when it comes."""


class ConsumerMemory:
    """The same slots on the other side."""

    def __init__(self, setting: Setting, sock: socket.socket) -> None:
        _, ancillary, _, _ = sock.recvmsg(16, socket.CMSG_SPACE(4))
        fd = array.array("i", ancillary[0][2])[0]
        self._payload = setting.payload
        self._memory = mmap.mmap(fd, setting.payload.total * setting.depth)
        os.close(fd)

    def views(self, slot: int) -> list[torch.Tensor]:
        """Make a new view of each feature."""
        payload = self._payload
        start = slot * payload.total
        return [
            torch.frombuffer(
                self._memory,
                dtype=torch.uint8,
                count=payload.nbytes,
                offset=start + index * payload.nbytes,
            )
            for index in range(payload.count)
        ]

    def done(self, slot: int) -> None:
        """Host reads are over when they return."""
