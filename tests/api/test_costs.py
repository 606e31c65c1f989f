"""What a hand-off costs the kernel: descriptors, packets, system calls and mappings.

The least that a hand-off from one process to another can do with sockets is one ``send`` and one
``recv`` per direction: a packet that says where the bytes are, and one that says they were read.
Each side also has to learn that a packet is there: one poll that waits.  What asyncio adds are
polls that do not wait, one before each turn of its loop in which something is to be called.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
import torch

import asyncvmm
from asyncvmm._backends.base import ExporterRegion
from asyncvmm._backends.memfd import HostExporterRegion
from asyncvmm._fds import OwnedFd
from asyncvmm._tensors.host import HostPort
from asyncvmm.testing import Counters, FakeDevice, FakePort, Process, open_pair
from tests.api import steps as own_steps
from tests.api.books import check_all_back, until
from tests.api.syscalls import SystemCalls
from tests.process import steps
from tests.process.harness import Peers

ONE = {"x": torch.ones(100)}
MANY = 200


def is_uvloop() -> bool:
    return type(asyncio.get_running_loop()).__module__.startswith("uvloop")


# -- descriptors ---------------------------------------------------------------------------------


class CountingRegion(HostExporterRegion):
    """Host memory that counts how often a segment is exported."""

    exported: list[int]

    def export(self, index: int) -> OwnedFd:
        self.exported.append(index)
        return super().export(index)


class CountingPort(HostPort):
    exported: list[int]

    def create(
        self, pool_bytes: int, max_pool_bytes: int, slots: int, **options: object
    ) -> ExporterRegion:
        region = CountingRegion.create(pool_bytes, max_pool_bytes, slots)
        region.exported = self.exported = []
        return region


@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("segments", [1, 4])
async def test_one_descriptor_per_segment_and_consumer_and_none_per_batch(
    consumers: int, segments: int
) -> None:
    """Counted where they are exported, and in this process, where both ends are (inv. 12).

    Kills: a descriptor per batch or per owner, a segment that is sent again, and descriptors of
    segments that a consumer keeps open after mapping them.
    """
    port = CountingPort()
    async with open_pair(
        port=port,
        consumers=consumers,
        pool_bytes="64KiB",
        max_pool_bytes=segments * 64 * 1024,
        slots=64,
    ) as pair:
        large = {"x": torch.ones(segments * 64 * 1024, dtype=torch.uint8)}
        await pair.exporter.send(large)
        for consumer in pair.consumers:
            (await consumer.receive()).release()
        await pair.exporter.drain()
        stats = pair.exporter.statistics()
        before = Counters.of()
        assert before.descriptors["memfd"] >= stats.segments
        assert sorted(port.exported) == sorted(list(range(stats.segments)) * consumers)
        for number in range(MANY):
            await pair.exporter.send({**ONE, "y": torch.ones(number)})
            for consumer in pair.consumers:
                async with await consumer.receive() as batch:
                    assert batch[0]["y"].numel() == number
        await pair.exporter.drain()
        assert Counters.of().descriptors == before.descriptors
        assert len(port.exported) == stats.segments * consumers


async def test_what_each_side_has_open(peers: Peers) -> None:
    """A consumer: its socket and its exporter's pidfd.  An exporter: the same per consumer, a
    memfd per segment, the socket it listens on, and a spare one for who comes at the limit.

    Kills: whatever else somebody opens per consumer.
    """
    await asyncio.to_thread(int)  # what a loop opens for its first thread is its own
    nothing = Counters.of().descriptors
    kinds = ("socket", "memfd", "pidfd", "eventfd")
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="64KiB", route=asyncvmm.Broadcast(3)
    ) as exporter:
        alone = Counters.of().descriptors - nothing
        assert {kind: alone[kind] for kind in kinds} == {
            "socket": 1, "memfd": 1, "pidfd": 0, "eventfd": 1,
        }  # fmt: skip
        ranks = [peers.start() for _ in range(3)]
        for rank in ranks:
            await rank.call(own_steps.begin)
        began = [rank.counters().descriptors for rank in ranks]
        before = Counters.of().descriptors  # with the harness's own
        for number, rank in enumerate(ranks):
            await rank.call(steps.connect, "pool", number)
        await exporter.wait_attached(3)
        three = Counters.of().descriptors - before
        assert {kind: three[kind] for kind in kinds} == {
            "socket": 3, "memfd": 0, "pidfd": 3, "eventfd": 0,
        }  # fmt: skip
        for rank, without in zip(ranks, began, strict=True):
            extra = rank.counters().descriptors - without
            assert {kind: extra[kind] for kind in kinds} == {
                "socket": 1, "memfd": 0, "pidfd": 1, "eventfd": 0,
            }  # fmt: skip
            assert rank.counters().mappings == 1
        for rank in ranks:
            await rank.call(steps.leave)
        await until(lambda: not exporter.statistics().consumers)
        assert Counters.of().descriptors == before


# -- system calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [1, 20])
async def test_a_closed_loop_costs_one_send_and_one_receive_per_side(
    peers: Peers, features: int
) -> None:
    """One owner at a time, acknowledged before the next is sent, between two processes.

    Per hand-off and side: one ``send``, one ``recv``, and nothing else that is a system call, no
    matter how many features.  asyncio polls at most three times: once waiting for the packet,
    once before the turn in which the task that it wakes runs, and once before a turn in which
    what the task has posted may be joined by more.  It never changes what it polls.  The turns that
    keep it from sleeping are off: test_busy_poll.py counts what they save.

    Kills: a packet per feature, an acknowledgement in a packet of its own, a read that is tried
    again until it would block, a wake-up through a pipe, and a reader that is registered anew for
    each packet.
    """
    owner = {f"{n}": torch.ones(5) for n in range(features)}
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="1MiB", busy_poll=0
    ) as exporter:
        rank = peers.start()
        await rank.call(steps.connect, "pool", 0, {"busy_poll": 0})
        await exporter.wait_attached(1)
        (connection,) = exporter._connections.open.values()
        serving = rank.begin(own_steps.count_system_calls, MANY)
        await rank.at("counting")
        with SystemCalls(connection.link._sock) as ours:
            for _ in range(MANY):
                await (await exporter.send(owner))
        theirs = await serving
        check_all_back(exporter)
    assert ours.sockets == {"send": MANY, "recv_into": MANY}
    assert theirs["sockets"] == {"send": MANY, "recvmsg_into": MANY}
    assert theirs["others"] == {}
    assert ours.others - Counter(recv=1) == {}  # the harness may read an answer
    if not is_uvloop():
        for polls in (ours.polls, theirs["polls"]):
            assert set(polls) == {"poll"}
            assert polls["poll"] <= 3 * MANY + 3


async def test_what_is_sent_or_released_in_one_turn_travels_together() -> None:
    """Eight owners are two packets, and their eight releases one.

    The first owner leaves at once, for nothing else is out and somebody may wait for just that.

    Kills: a packet per owner or per release where the turn has more of them.
    """
    async with open_pair(slots=64) as pair:
        exporter, consumer = pair.exporter, pair.consumer
        (connection,) = exporter._connections.open.values()
        with SystemCalls(connection.link._sock, consumer._link._sock) as calls:
            for _ in range(10):
                for _ in range(8):
                    await exporter.send(ONE)  # room is there, so no turn ends in between
                batches = [await consumer.receive() for _ in range(8)]
                for batch in batches:
                    batch.release()
                del batch, batches
                await exporter.drain()
        assert calls.sockets == {"send": 30, "recv_into": 10, "recvmsg_into": 20}
        assert calls.others == {}
        check_all_back(exporter)


async def test_views_and_statistics_cost_no_system_call() -> None:
    """Kills: a view, a reservation or a look at the numbers that asks the kernel."""
    async with open_pair() as pair:
        await pair.exporter.send(ONE)
        batch = await pair.consumer.receive()
        with SystemCalls() as calls:
            for _ in range(10):
                assert batch[0]["x"].numel() == 100
                batch[0].clone()
                pair.exporter.statistics()
                pair.consumer.statistics()
                async with pair.exporter.reserve({"x": asyncvmm.TensorSpec((9,), "int8")}) as owner:
                    owner["x"].fill_(1)
        assert calls.others == {}
        assert calls.sockets == {}
        batch.release()


@pytest.mark.slow
async def test_waiting_costs_nothing(peers: Peers) -> None:
    """A consumer without work, and an exporter whose owners are held, sleep in one poll each.

    Kills: polling with a timer (field report 61).
    """
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="64KiB", slots=1, explain_after=math.inf
    ) as exporter:
        rank = peers.start()
        await rank.call(steps.connect, "pool", 0)
        ack = await exporter.send(ONE)
        waiter = asyncio.create_task(exporter.send(ONE))
        await exporter.wait_attached(1)
        await rank.call(steps.statistics)
        before = await settled(rank)
        with SystemCalls() as calls:
            await asyncio.sleep(0.3)
        assert switches(rank.pid) == before
        assert calls.others == {}
        assert calls.polls["poll"] <= 3  # into the sleep, and out of it
        assert not ack.done()
        waiter.cancel()
        await rank.killed()
        await asyncio.wait([waiter])


async def test_a_rank_that_left_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It read what another rank keeps, so its events are kept; the others stream on meanwhile.

    Kills: a look at every owner that is out, for every packet that comes.
    """
    port = FakePort(FakeDevice())
    async with open_pair(consumers=2, port=port) as pair:
        exporter, (stays, leaves) = pair.exporter, pair.consumers
        ack = await exporter.send(ONE)
        with await stays.receive() as kept, await leaves.receive() as batch:
            kept[0]["x"], batch[0]["x"]
            batch.release()
            await leaves.aclose()
            await until(lambda: bool(exporter._draining._leaving))
            looks: list[int] = []
            reads_of = exporter._core.reads_of

            def noted(peer: int) -> bool:
                looks.append(peer)
                return reads_of(peer)

            monkeypatch.setattr(exporter._core, "reads_of", noted)
            for _ in range(20):
                other = await exporter.send(ONE, to=0)
                with await stays.receive() as read:
                    read[0]["x"]
                await other
            assert looks == []
        await ack
        assert looks, "and then its events are given back"
        assert not exporter._draining._leaving


async def settled(process: Process) -> int:
    """Wait until a process has nothing left to do; return how often it has gone to sleep."""
    looks, before = 0, 0
    while looks < 50:
        await asyncio.sleep(0.002)
        now = switches(process.pid)
        looks = looks + 1 if now == before and process._state == "S" else 0
        before = now
    return before


def switches(pid: int) -> int:
    """Return how often a process has gone to sleep so far."""
    with open(f"/proc/{pid}/status") as status:
        (line,) = (line for line in status if line.startswith("voluntary_ctxt_switches"))
    return int(line.split()[1])


# -- mappings ------------------------------------------------------------------------------------


async def test_a_segment_is_mapped_once_per_consumer(peers: Peers) -> None:
    """Field report 60: however many batches, and gone when the consumer leaves.

    Kills: a mapping per batch or per view, and one that stays.
    """
    async with asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="64KiB", max_pool_bytes="256KiB"
    ) as exporter:
        ours = Counters.of().mappings
        rank = peers.start()
        await rank.call(steps.connect, "pool", 0)
        assert rank.counters().mappings == 1
        serving = rank.begin(own_steps.count_system_calls, MANY)
        for number in range(MANY):
            await (await exporter.send({"x": torch.ones(number)}))
        await serving
        assert rank.counters().mappings == 1
        assert Counters.of().mappings == ours
        large = {"x": torch.ones(200 * 1024, dtype=torch.uint8)}
        serving = rank.begin(own_steps.count_system_calls, 1)
        await (await exporter.send(large))
        await serving
        assert rank.counters().mappings == exporter.statistics().segments > 1
        await rank.call(steps.leave)
        assert rank.counters().mappings == 0
        assert not rank.dead
