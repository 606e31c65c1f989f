"""NIXL: the floor's messages, and a one-sided READ by the consumer instead of shared memory.

The producer keeps a ring of registered memory; the consumer reads each payload into memory of its
own and polls the transfer, for NIXL has no other way to wait.  It runs without an event loop.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.setting import Setting
from benchmarks.transports.floor import Floor, FloorConsumer, FloorProducer

if importlib.util.find_spec("nixl_cu13") is None:
    raise ImportError("nixl_cu13 is not installed: pip install --no-deps nixl-cu13")

_PLACE = struct.Struct("<QQ")
_PACKET = 1 << 17


class _Agent:
    """An agent and its registered memory."""

    def __init__(self, name: str, device: str, nbytes: int) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        self.kind = "VRAM" if device.startswith("cuda") else "DRAM"
        self.index = torch.device(device).index or 0
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        place = [(self.memory.data_ptr(), nbytes, self.index, "")]
        self.agent.register_memory(place, self.kind)

    def at(self, address: int, nbytes: int, index: int) -> Any:
        """Describe a range of memory."""
        return self.agent.get_xfer_descs([(address, nbytes, index)], self.kind)


class ProducerMemory:
    """A ring that others may read."""

    def __init__(self, setting: Setting) -> None:
        self._payload = setting.payload
        self._on_gpu = setting.on_gpu
        self._nixl = _Agent("producer", setting.device, setting.payload.total * setting.depth)

    def offer(self, sock: socket.socket) -> None:
        """Give a consumer what it needs."""
        place = _PLACE.pack(self._nixl.memory.data_ptr(), self._nixl.index)
        sock.send(place + self._nixl.agent.get_agent_metadata())

    def fill(self, slot: int, features: Sequence[torch.Tensor]) -> None:
        """Copy the features into a slot."""
        at = slot * self._payload.total
        for feature in features:
            self._nixl.memory[at : at + feature.nbytes].copy_(feature, non_blocking=True)
            at += feature.nbytes

    def publish(self, slot: int) -> None:
        """Wait for the copy: a READ knows of no stream."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def finish(self, slot: int, consumer: int) -> None:
        """An answer is enough: the READ was over."""


class ConsumerMemory:
    """Memory of the consumer's own that payloads are read into."""

    def __init__(self, setting: Setting, sock: socket.socket) -> None:
        self._payload = setting.payload
        self._nixl = _Agent(f"consumer-{os.getpid()}", setting.consumer_device, self._payload.total)
        packet = sock.recv(_PACKET)
        self._address, self._index = _PLACE.unpack(packet[: _PLACE.size])
        self._peer = self._nixl.agent.add_remote_agent(packet[_PLACE.size :])
        memory = self._nixl.memory
        self._views = list(memory.split(self._payload.nbytes))
        self._local = self._nixl.at(memory.data_ptr(), self._payload.total, self._nixl.index)

    def views(self, slot: int) -> list[torch.Tensor]:
        """Read the slot and wait until that is done."""
        agent, total = self._nixl.agent, self._payload.total
        remote = self._nixl.at(self._address + slot * total, total, self._index)
        transfer = agent.initialize_xfer("READ", self._local, remote, self._peer, b"")
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise RuntimeError(f"a NIXL READ ended as {state}")
        return self._views

    def done(self, slot: int) -> None:
        """Nothing of the producer's is in use."""


class NIXLProducer(FloorProducer):
    """Copies into the ring, then announces by a packet."""

    def memory(self) -> Any:
        return ProducerMemory(self.setting)


class NIXLConsumer(FloorConsumer):
    """Reads, looks, answers."""

    def memory(self, sock: socket.socket) -> Any:
        return ConsumerMemory(self.setting, sock)


class NIXL(Floor):
    """NIXL with its UCX backend."""

    name = "nixl"
    about = "one copy into registered memory, a READ by the consumer, one packet each way; blocking"
    producer = NIXLProducer
    consumer = NIXLConsumer
