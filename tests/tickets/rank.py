"""What a rank does in its own process with the tickets it is handed; plain data in and out."""

from __future__ import annotations

import asyncio
import pickle
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.asyncio

import asyncvmm
from asyncvmm import Ticket
from tests.process.puppet import Me


def sums(tensors: dict[str, Any]) -> dict[str, float]:
    """Return a number for each tensor that tells its content."""
    return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}


async def read(consumer: asyncvmm.Consumer, tickets: dict[str, Ticket]) -> dict[str, Any]:
    """Reconstruct tickets; return what they hold, and how many buffers that took."""
    found = {name: await consumer.reconstruct(ticket) for name, ticket in tickets.items()}
    buffers = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    return {"sums": sums(found), "buffers": len(buffers)}


async def reconstruct(me: Me, tickets: dict[str, bytes]) -> dict[str, Any]:
    """Reconstruct tickets that were pickled one by one."""
    return await read(me.consumer, {name: pickle.loads(data) for name, data in tickets.items()})


async def reconstruct_from_file(me: Me, path: str) -> dict[str, Any]:
    """Reconstruct tickets that were pickled into a file."""
    data = await asyncio.to_thread(Path(path).read_bytes)
    return await read(me.consumer, pickle.loads(data))


async def reconstruct_from_zmq(me: Me, address: str) -> dict[str, Any]:
    """Reconstruct tickets that come over ZeroMQ."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull:
        pull.connect(address)
        tickets = await pull.recv_pyobj()
        return await read(me.consumer, tickets)


def reconstruct_from_queue(name: str, tickets: Queue[Any], answers: Queue[Any]) -> None:
    """Be a process that gets tickets over a multiprocessing.Queue until there are no more."""

    async def main() -> None:
        async with asyncvmm.connect(name, device="cpu", rank=0) as consumer:
            while (found := await asyncio.to_thread(tickets.get)) is not None:
                answers.put(await read(consumer, found))

    asyncio.run(main())


kept: list[asyncvmm.Owner] = []


async def borrow(me: Me, ticket: bytes) -> dict[str, float]:
    """Borrow the owner of a ticket and keep it until the process ends."""
    kept.append(await me.consumer.borrow(pickle.loads(ticket)))
    return sums(dict(kept[-1].items()))


async def refused(me: Me, ticket: bytes) -> str:
    """Return the name of the error that a ticket raises."""
    try:
        await me.consumer.reconstruct(pickle.loads(ticket))
    except asyncvmm.AsyncVMMError as error:
        return type(error).__name__
    return ""


async def acknowledge(me: Me, ticket: bytes, count: int, group: tuple[int, int, int]) -> None:
    """Acknowledge unread for a group."""
    found = pickle.loads(ticket)
    me.consumer.acknowledge(found.owner, count=count, group=asyncvmm.AttentionGroup(*group))


async def export(me: Me, count: int) -> list[bytes]:
    """Export owners from another process, as pickled tickets."""
    x = torch.arange(100)
    return [pickle.dumps((await me.exporter.export({"x": x}))["x"]) for _ in range(count)]
