"""Field reports whose trial needs a GPU and has no other test."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import asyncvmm
from asyncvmm._backends import events
from asyncvmm._backends.cuda import CudaExporterRegion
from tests.gpu import ends
from tests.standin.peer import Peer

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]

MIB = 1 << 20
ROUNDS = 500


def a_name() -> str:
    return f"gpu-{uuid.uuid4().hex}"


async def test_a_steady_hand_off_makes_no_event_and_maps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Field reports 7 and 60: one slot, three consumers, hundreds of batches.

    Planted bugs: an event per read that nobody reaps, and a pool that is imported per batch.
    """
    calls = ends.count_calls(monkeypatch.setattr)
    name = a_name()
    processes = [ends.start("counter", name, "cuda:0", rank) for rank in range(3)]
    route = asyncvmm.Broadcast(3)
    before = events.budget.live
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes=MIB, slots=1, route=route, close_timeout=60
    ) as exporter:
        source = torch.ones(1000, device="cuda:0")
        await exporter.wait_attached(3)
        for _ in range(10):
            await (await exporter.send({"x": source}))
        live, made = events.budget.live, Counter(calls)
        assert live - before == 1 + 3  # ready, and a release of each
        for _ in range(ROUNDS):
            await (await exporter.send({"x": source}))
        assert events.budget.live == live
        assert calls == made
    found = [ends.result(process) for process in processes]
    assert found == [{"rounds": 10 + ROUNDS, "calls": 0, "events": 0}] * 3
    assert events.budget.live == before


def test_addresses_are_given_back(peer_on: Callable[[int], Peer]) -> None:
    """Field report 38: attach and close until more was reserved than there are addresses.

    Planted bug: a consumer's reservation that stays when its mapping goes.
    """
    exporter = CudaExporterRegion.create(0, 2 * MIB, 1 << 38, 4)
    peer = peer_on(0)
    for _ in range(600):  # of 256 GiB each, where a process has 128 TiB
        peer.tell("attach", exporter.info, 0)
        for segment in exporter.segments():
            peer.map(segment, exporter.export(segment.index))
        peer.tell("close")
        peer.tell("join_unmapping")
    exporter.close()


ON_THE_HOST = """
import asyncio, json, torch
from asyncvmm._backends import driver
from asyncvmm.testing import open_pair
async def main():
    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": torch.ones(9)})
        with await pair.consumer.receive() as batch:
            batch[0]["x"].sum()
        del batch
        await ack
asyncio.run(main())
state = driver.load().cuDevicePrimaryCtxGetState
active = [n for n in range(driver.device_count()) if state(driver.device_get(n))[2]]
print(json.dumps({"contexts": len(active)}))
"""


def test_pools_in_host_memory_open_no_context() -> None:
    """Field report 39: neither the package nor the host's backend touches a GPU."""
    assert ends.result(ends.run_code(ON_THE_HOST)) == {"contexts": 0}


async def test_devices_may_be_numbered_in_another_order() -> None:
    """Field report 40: what is cuda:0 here is cuda:1 there.  Planted bug: numbers on the wire."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and torch sees one")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    name = a_name()
    process = ends.start(
        "prompt_reader", name, "cuda:1", 0, CUDA_VISIBLE_DEVICES=",".join(reversed(visible))
    )
    async with asyncvmm.open_exporter(name, device="cuda:0", pool_bytes=MIB, slots=4) as exporter:
        for turn in range(20):
            source = torch.full((1000,), turn, dtype=torch.uint8, device="cuda:0")
            await (await exporter.send({"x": source}, key=turn))
    assert ends.result(process) == {"rounds": 20, "wrong": 0}


def keep_asking(stop: threading.Event) -> None:
    """Call the driver without letting go of the interpreter's lock."""
    stream = torch.cuda.Stream("cuda:0")
    x = torch.ones(1 << 12, device="cuda:0")
    query = ctypes.PyDLL("libcuda.so.1").cuStreamQuery
    while not stop.is_set():
        with torch.cuda.stream(stream):
            x.mul_(1.0)
        query(ctypes.c_void_p(stream.cuda_stream))


async def test_calls_that_keep_the_interpreters_lock_stop_nothing() -> None:
    """Field report 46: eight threads in the driver with the lock, a thousand acknowledgements.

    Planted bug: Python in a driver callback, which waits for the lock with the driver's own held.
    """
    stop, name = threading.Event(), a_name()
    process = ends.start("prompt_reader", name, "cuda:0", 0)
    threads = [threading.Thread(target=keep_asking, args=[stop]) for _ in range(8)]
    try:
        async with (
            asyncio.timeout(120),
            asyncvmm.open_exporter(
                name, device="cuda:0", pool_bytes=MIB, slots=16, close_timeout=60
            ) as exporter,
        ):
            await exporter.wait_attached(1)
            for thread in threads:
                thread.start()
            source = torch.full((1000,), 3, dtype=torch.uint8, device="cuda:0")
            for _ in range(1000):
                await exporter.send({"x": source}, key=3)
            await exporter.drain()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert ends.result(process) == {"rounds": 1000, "wrong": 0}


async def test_a_long_wait_costs_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report 61: one acknowledgement pending for a second.

    Planted bug: asking again without a pause, or after a fixed short one.
    """
    looks, done, name = 0, events.Event.done, a_name()

    def counted(event: events.Event) -> bool:
        nonlocal looks
        looks += 1
        return done(event)

    process = ends.start("holder", name, "cuda:0", 0)
    async with asyncvmm.open_exporter(
        name, device="cuda:0", pool_bytes=MIB, slots=1, close_timeout=60
    ) as exporter:
        source = torch.ones(64, device="cuda:0")
        await (await exporter.send({"x": source}))  # the holder's kernels come after it
        ack = await exporter.send({"x": source})
        async with asyncio.timeout(30):
            while not exporter.statistics().slots.draining:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        monkeypatch.setattr(events.Event, "done", counted)
        await asyncio.sleep(1)
        assert not ack.done()
        assert 1 <= looks <= 1000
    assert ends.result(process) == {"done": 1}
