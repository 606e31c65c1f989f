"""Every way out of an owner settles it, whoever fails and however far he got."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm.testing import Counters, FakeDevice, FakePort, ProcessRaisedError, open_pair
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers, turns, until
from tests.process.patterns import features, note, wrong
from tests.process.ports import UncopiablePort
from tests.process.puppet import Me

SLOTS = 4
Step = Callable[[Me, int], Awaitable[None]]


def open_exporter(ranks: int = 1, **options: Any) -> asyncvmm.open_exporter:
    route = asyncvmm.Broadcast(ranks) if ranks else asyncvmm.Compete()
    options = {"pool_bytes": "64KiB", "slots": SLOTS, **options}
    return asyncvmm.open_exporter("pool", device="cpu", route=route, **options)


async def send(
    exporter: asyncvmm.Exporter, owner: int, nbytes: int = 500, **terms: Any
) -> asyncvmm.Acknowledgement:
    terms = {"require": "none", "key": owner, "metadata": note(owner, 0, nbytes), **terms}
    return await exporter.send(features(owner, 0, nbytes), **terms)


# -- a consumer that does not want it ------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        (steps.raise_in_its_block, asyncvmm.Outcome(released=(0,))),
        (steps.raise_without_a_block, asyncvmm.Outcome(refused=((0, "dropped unread"),))),
        (steps.drop, asyncvmm.Outcome(refused=((0, "dropped unread"),))),
        (steps.be_cancelled, asyncvmm.Outcome(refused=((0, "dropped unread"),))),
    ],
)
async def test_whoever_never_looks_gives_back_all_the_same(
    peers: Peers, step: Step, outcome: asyncvmm.Outcome
) -> None:
    """Ten times as many as there are slots, and all are free after each (field report 1).

    Kills: a release that is bound to reading instead of receiving.
    """
    async with open_exporter() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        for _ in range(10):
            letting_go = peer.begin(step, SLOTS)
            acks = [await send(exporter, owner) for owner in range(SLOTS)]
            await letting_go
            async with asyncio.timeout(PROMPTLY):
                assert [await ack for ack in acks] == [outcome] * SLOTS
            assert exporter.statistics().slots.free == SLOTS
        with pytest.raises(asyncvmm.DeliveryError) if outcome.refused else turns_out_well():
            letting_go = peer.begin(step, 1)
            await (await send(exporter, 1, require="all"))
        await letting_go


class turns_out_well:
    """The other side of ``pytest.raises``."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.mark.parametrize("ranks", [1, 0], ids=["broadcast", "compete"])
async def test_whoever_leaves_early_gives_back_what_it_has_not_received(
    peers: Peers, ranks: int
) -> None:
    """Refused by a rank; another competitor's under Compete (field report 1).

    Kills: a goodbye that forgets the inbox.
    """
    async with open_exporter(ranks) as exporter:
        for _ in range(10):
            peer = peers.start()
            await peer.call(steps.connect, "pool", 0 if ranks else None, {"prefetch": SLOTS})
            acks = [await send(exporter, owner) for owner in range(SLOTS)]
            await peer.call(steps.leave_early, SLOTS)
            if not ranks:
                other = peers.start()
                await other.call(steps.connect, "pool", None, {"member": "other"})
                assert await other.call(steps.take, SLOTS) == list(range(SLOTS))
                await other.call(steps.give_back)
                await other.call(steps.leave)
            async with asyncio.timeout(PROMPTLY):
                outcomes = [await ack for ack in acks]
            if ranks:
                assert outcomes == [asyncvmm.Outcome(refused=((0, "dropped unread"),))] * SLOTS
            else:
                assert outcomes == [asyncvmm.Outcome(released=("other",))] * SLOTS
            assert exporter.statistics().slots.free == SLOTS
            assert exporter.statistics().consumers == ()


async def test_both_sides_may_give_up_at_once(peers: Peers) -> None:
    """Cancel whoever waits for it while the consumer drops it (field report 1).

    Kills: a settlement that needs somebody to be told of it.
    """
    async with open_exporter() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        for _ in range(10):
            letting_go = peer.begin(steps.drop, SLOTS)
            acks = [await send(exporter, owner) for owner in range(SLOTS)]
            waiting = [asyncio.ensure_future(ack) for ack in acks]
            await turns(1)
            for task in waiting:
                task.cancel()
            await letting_go
            async with asyncio.timeout(PROMPTLY):
                await exporter.drain()
            assert exporter.statistics().slots.free == SLOTS


# -- one of several that cannot ------------------------------------------------------------------


async def test_one_of_three_that_cannot_map_is_named_and_the_others_go_on(peers: Peers) -> None:
    """Have the pool grow by a segment that rank 2 cannot map (field report 13).

    Kills: a failed import that ends the consumer, or that nobody hears of, or that costs the
    slot; and a refusal of what lies in the segments that it has.
    """
    options: dict[str, Any] = {"pool_bytes": 8192, "max_pool_bytes": 16384}
    async with open_exporter(3, **options) as exporter:
        ranks = [peers.start() for _ in range(3)]
        for rank, peer in enumerate(ranks):
            await peer.call(steps.connect, "pool", rank, None, None, [1] if rank == 2 else None)
        here = await send(exporter, 0, 6000)
        there = await send(exporter, 1, 6000, require="all")
        some = await send(exporter, 2, 500, require="any")
        assert exporter.statistics().segments == 2
        for peer in ranks[:2]:
            assert await peer.call(steps.take, 3) == [0, 1, 2]
            await peer.call(steps.give_back)
        assert await ranks[2].call(steps.take, 1) == [0]
        await ranks[2].call(steps.give_back)
        async with asyncio.timeout(PROMPTLY):
            assert sorted((await here).released, key=str) == [0, 1, 2]
            with pytest.raises(asyncvmm.DeliveryError) as caught:
                await there
        outcome = caught.value.outcome
        assert isinstance(outcome, asyncvmm.Outcome)
        assert sorted(outcome.released, key=str) == [0, 1]
        assert outcome.refused == ((2, "segment 1 could not be mapped: there is no room for it"),)
        assert "refused: {2: 'segment 1" in str(caught.value)
        lies_there = (await some).refused != ()  # best fit may have put it in either
        if not lies_there:
            assert await ranks[2].call(steps.take, 1) == [2]
            await ranks[2].call(steps.give_back)
        assert exporter.statistics().slots.free == SLOTS
        after = await send(exporter, 3, 6000)
        for peer in ranks:
            assert await peer.call(steps.take, 1) == [3]
            await peer.call(steps.give_back)
        assert (await after).complete
        assert len(ranks[2].printed) == 1


async def test_one_that_cannot_map_at_all_does_not_get_in(peers: Peers) -> None:
    """Its failure costs nobody else anything (field reports 6, 13).

    Kills: a rank that is taken by a consumer which has nothing mapped.
    """
    async with open_exporter(2) as exporter:
        first, second = peers.start(), peers.start()
        await first.call(steps.connect, "pool", 0)
        with pytest.raises(ProcessRaisedError) as caught:
            await second.call(steps.connect, "pool", 1, None, None, [0])
        assert caught.value.kind == "BackendError"
        assert caught.value.facts == {"call": "mmap", "code": "ENOMEM"}
        ack = await send(exporter, 0)
        await second.call(steps.connect, "pool", 1)  # it can now
        for peer in (first, second):
            assert await peer.call(steps.take, 1) == [0]
            await peer.call(steps.give_back)
        assert (await ack).complete


# -- an exporter that cannot ---------------------------------------------------------------------


def bad_tensors() -> dict[str, torch.Tensor]:
    return {
        "on the meta device": torch.zeros(4, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
    }


@pytest.mark.parametrize("kind", bad_tensors())
async def test_one_bad_feature_of_five_leaves_no_trace(peers: Peers, kind: str) -> None:
    """Kills: a loan taken before all features were looked at (field report 9, inv. 13)."""
    async with open_exporter() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        packed = {f"feature {i}": torch.zeros(10) for i in range(5)}
        packed["feature 3"] = bad_tensors()[kind]
        for _ in range(3 * SLOTS):
            with pytest.raises(asyncvmm.InvalidTensorError) as caught:
                await exporter.send(packed)
            assert caught.value.feature == "feature 3"
        assert exporter.statistics().slots.free == SLOTS
        assert exporter.statistics().published == 0
        await send(exporter, 0)
        assert await peer.call(steps.take, 1) == [0]
        await peer.call(steps.give_back)


@pytest.mark.parametrize("slowly", [False, True], ids=["on the loop", "in a thread"])
async def test_a_copy_that_fails_half_way_gives_the_chunk_back(slowly: bool) -> None:
    """The bytes before the bad feature were written, and nobody sees them (field report 9).

    Kills: a chunk that is lost with an exception out of the copy, or published in spite of it.
    """
    port = UncopiablePort(slowly=slowly)
    async with (
        open_exporter(_port=port) as exporter,
        asyncvmm.connect("pool", device="cpu", rank=0) as consumer,
    ):
        packed = {f"feature {i}": torch.zeros(10) for i in range(4)} | {"bad": torch.ones(9)}
        for _ in range(3 * SLOTS):
            with pytest.raises(asyncvmm.BackendError, match="half-way"):
                await exporter.send(packed)
        await until(lambda: exporter.statistics().slots.free == SLOTS)
        statistics = exporter.statistics()
        assert statistics.published == 0
        assert statistics.free_bytes == statistics.largest_gap == statistics.pool_bytes
        assert consumer.statistics().unread == 0


async def test_an_owner_may_be_abandoned_twice_and_not_be_written_after(peers: Peers) -> None:
    """Kills: a second abandonment that frees the next user's chunk (field report 9)."""
    async with open_exporter() as exporter:
        loan = exporter.reserve({"x": asyncvmm.TensorSpec((9,), torch.uint8)})
        owner = await loan.__aenter__()
        await loan.__aexit__(None, None, None)
        await loan.__aexit__(None, None, None)
        with pytest.raises(asyncvmm.ReleasedError):
            owner["x"]
        with pytest.raises(asyncvmm.ReleasedError):
            owner.publish()
        assert exporter.statistics().slots.free == SLOTS


async def test_nothing_that_is_not_ready_can_be_read() -> None:
    """Announce an owner and never make it ready, on a device driven by hand (field report 25).

    Every view is behind a wait on its stream; once the exporter is gone nobody can tell whether
    the bytes were ever written, so an owner that was not looked at before raises.  Kills: a view
    that is had without the wait, and one that is had of an owner which was never completed.
    """
    device = FakeDevice(hold_ready=True)
    async with open_pair(port=FakePort(device), close_timeout=0) as pair:
        await pair.exporter.send({"x": torch.ones(8)}, require="none")
        await pair.exporter.send({"x": torch.ones(8)}, require="none")
        seen, unseen = [(await pair.consumer.receive())[0] for _ in range(2)]
        assert device.waits == []
        view = seen["x"]
        assert device.waits == [(seen.slot, device.stream)]
        seen.release()
        del view
        pair.exporter._connections.abort()
        with pytest.raises(asyncvmm.PeerLostError):
            await pair.consumer.receive()
        with pytest.raises(asyncvmm.PeerLostError, match="completely written"):
            unseen["x"]
        with pytest.raises(asyncvmm.PeerLostError, match="completely written"):
            unseen.clone()
        unseen.release()
        device.finish()
        pair.exporter._core.died(0)  # it will not: it is this process
        pair.exporter._pump()


# -- closing at any moment -----------------------------------------------------------------------

CLOSERS = ["exporter", "exporter, hard", "consumer", "both", "cancel all"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::asyncvmm.OwnersOutstandingWarning")  # a view is kept
async def test_closing_at_any_moment_ends_everything_and_unmaps_nothing_in_use(
    peers: Peers,
) -> None:
    """Close either end at 500 random points of a transfer, half of them on each loop (report 16).

    Whatever waits ends, by itself or with a typed error; a view that is alive shows the same
    bytes before and after; a second close is a no-op; nothing is left open or mapped.  Kills: a
    wait that a close does not end, and a close that unmaps under a view.
    """
    chance = random.Random(16)
    await one_transfer("exporter", 0)
    before = Counters.of()
    for _ in range(250):
        await one_transfer(chance.choice(CLOSERS), chance.randrange(60))
    await turns()  # the step that was woken with the last errors keeps them, and views with them
    gc.collect()  # the last one's errors hold their frames, and those a view
    after = Counters.of()
    assert after.mappings == 0
    assert after.descriptors == before.descriptors


async def one_transfer(closer: str, point: int) -> None:
    """Send and receive, and close something after so many passes of the loop."""
    exporting = open_exporter(close_timeout=0.02, slots=2)
    exporter = await exporting.__aenter__()
    consumer = await asyncvmm.connect("pool", device="cpu", rank=0).__aenter__()
    kept: list[tuple[torch.Tensor, list[int]]] = []
    tasks = [
        asyncio.ensure_future(work)
        for work in (produce(exporter), reserve(exporter), consume(consumer, kept), drain(exporter))
    ]
    await turns(point)
    if closer == "cancel all":
        for task in tasks:
            task.cancel()
    async with asyncio.timeout(PROMPTLY):
        if closer in {"consumer", "both", "cancel all"}:
            await consumer.aclose()
        hard = None if closer == "exporter" else ValueError("a hard close")
        await exporting.__aexit__(type(hard), hard, None)
        await consumer.aclose()
        await exporting.__aexit__(None, None, None)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    typed = (asyncvmm.AsyncVMMError, asyncio.CancelledError, type(None))
    assert [each for each in results if not isinstance(each, typed)] == []
    for view, expected in kept:
        assert view.tolist() == expected


async def produce(exporter: asyncvmm.Exporter) -> None:
    for owner in range(10):
        await (await send(exporter, owner))


async def reserve(exporter: asyncvmm.Exporter) -> None:
    for _ in range(10):
        async with exporter.reserve({"bytes": asyncvmm.TensorSpec((300,), torch.uint8)}) as owner:
            owner["bytes"].fill_(7)
            await asyncio.sleep(0)
            owner.publish()


async def consume(consumer: asyncvmm.Consumer, kept: list[tuple[torch.Tensor, list[int]]]) -> None:
    async for batch in consumer:
        async with batch:
            for owner in batch:
                view = owner["bytes"]
                if owner.metadata is None:
                    assert view.tolist() == [7] * 300
                else:
                    assert wrong(owner) == ""
                kept[:] = [(view, view.tolist())]
                await asyncio.sleep(0)


async def drain(exporter: asyncvmm.Exporter) -> None:
    while True:
        await exporter.drain()
        await asyncio.sleep(0)
