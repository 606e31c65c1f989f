"""What one hand-off in steady state costs, counted on both sides of two processes.

Closed loop, per owner and side: one ``send`` and one ``recv`` on the socket, which is the minimum
for an answer that has to come back, and on asyncio the turns of the loop that carry them: one to
be woken for the packet and one for the task that waited.  Nothing is opened, mapped or looked up.
Turns that are made so as not to sleep (``busy_poll``) are switched off here.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from typing import Any

import torch

import asyncvmm
from asyncvmm._io.link import Link
from tests.process.harness import Peers

ROUNDS = 200
SLOTS = 64

CONSUMER = """
import asyncvmm
from tests.api.test_counts import counted, descriptors, mappings

async def main():
    async with asyncvmm.connect({name!r}, rank=0, device="cpu", wait=True, busy_poll=0) as consumer:
        calls = None
        async for batch in consumer:
            for owner in batch:
                with owner:
                    if owner.metadata == "begin":
                        calls = counted(consumer._link)
                        before = descriptors(), mappings()
                    elif owner.metadata == "end":
                        same = (descriptors(), mappings()) == before
                        tell("counted", **calls, same=same)
                    else:
                        owner["x"]

run(main())
"""


class CountingSocket:
    """Stands before a link's socket."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._sock, name)


def counted(link: Link) -> Counter[str]:
    """Count the calls on a link's socket from now on."""
    counting = CountingSocket(link._sock)
    link._sock = counting  # type: ignore[assignment]  # stands before it
    return counting.calls


def descriptors() -> int:
    """Count this process's descriptors."""
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Count the mappings of pools in this process."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:" in line for line in maps)


async def counts_of(peers: Peers, pipelined: bool) -> tuple[Counter[str], dict[str, int], int]:
    """Return the socket calls of exporter and consumer, and the exporter's turns of the loop."""
    name = f"@counts-{uuid.uuid4().hex}"
    consumer = peers.start(script=CONSUMER.format(name=name))
    source = torch.zeros(4096)
    turns = 0
    loop = asyncio.get_running_loop()
    async with asyncvmm.open_exporter(
        name, device="cpu", pool_bytes="4MiB", slots=SLOTS, busy_poll=0
    ) as e:
        await e.wait_attached(1)
        await (await e.send({"x": source}))
        await (await e.send({"x": source}, metadata="begin"))
        (connection,) = e._connections.open.values()
        calls = counted(connection.link)
        before = descriptors(), mappings()
        selector = getattr(loop, "_selector", None)
        if selector is not None:
            select = selector.select

            def counting(timeout: float | None = None) -> Any:
                nonlocal turns
                turns += 1
                return select(timeout)

            selector.select = counting
        for _ in range(ROUNDS):
            ack = await e.send({"x": source})
            if not pipelined:
                await ack
        await e.drain()
        if selector is not None:
            del selector.select
        seen = Counter(calls)
        assert (descriptors(), mappings()) == before
        await (await e.send({"x": source}, metadata="end"))
    found: dict[str, int] = await consumer.at("counted")
    assert await consumer.ends() == 0
    return seen, found, turns


async def test_a_closed_loop_is_one_send_and_one_receive_on_each_side(peers: Peers) -> None:
    """Kills: a descriptor or a mapping per batch; a packet of its own for anything; a poll more.

    The consumer's counts hold the packets of the "end" owner too.
    """
    exporter, consumer, turns = await counts_of(peers, pipelined=False)
    assert exporter == {"send": ROUNDS, "recv_into": ROUNDS}
    assert consumer.pop("same")
    received = {name: count for name, count in consumer.items() if name.startswith("recv")}
    assert sum(received.values()) <= ROUNDS + 1
    assert consumer["send"] <= ROUNDS + 1
    assert set(consumer) - set(received) == {"send"}
    assert turns <= 3 * ROUNDS


async def test_with_many_in_flight_packets_are_shared(peers: Peers) -> None:
    """Kills: a packet for each owner, or for each release, although many leave in one turn."""
    exporter, consumer, _ = await counts_of(peers, pipelined=True)
    assert exporter["send"] <= ROUNDS / 4
    assert consumer["send"] <= ROUNDS / 2
    assert set(exporter) == {"send", "recv_into"}
