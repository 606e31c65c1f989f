"""``send_all``: several owners as one batch, all of them or none, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import (
    ArgumentError,
    BackendError,
    Exporter,
    InvalidTensorError,
    OwnerTooLargeError,
    WouldBlock,
)
from asyncvmm._core import wire
from asyncvmm._exporter.several import PIECE
from asyncvmm._tensors.host import OFFLOAD_BYTES, HostPort
from asyncvmm._tensors.plan import Plan
from asyncvmm.testing import Pair, open_pair
from tests.api.books import check_all_back, check_books, check_no_sleeper, passes, until
from tests.api.test_counts import counted

KIB = torch.zeros(1024, dtype=torch.uint8)


def owners(count: int, features: int = 1) -> list[dict[str, torch.Tensor]]:
    return [
        {f"x{at}": torch.full((5,), float(number)) for at in range(features)}
        for number in range(count)
    ]


def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def drain(pair: Pair) -> list[object]:
    """Read and release all that comes until everything is back; return the keys of each batch."""
    keys: list[object] = []
    while True:
        try:
            batch = pair.consumer.receive_nowait()
        except WouldBlock:
            if not pair.exporter._core.records:
                break
            await passes()
        else:
            keys.append([owner.key for owner in batch])
            batch.release()
            del batch
    check_all_back(pair.exporter)
    return keys


# -- what arrives --------------------------------------------------------------------------------


async def test_all_arrive_in_one_batch_and_are_acknowledged_each_for_itself() -> None:
    """Ranks may come from a generator, and one tensor may be in several owners.

    Kills: names or notes that go with another owner, ranks that only the first owner gets, and
    one acknowledgement for all.
    """
    async with open_pair(consumers=2) as pair:
        (same,) = [{"x": torch.arange(4)}]
        acks = await pair.exporter.send_all(
            [same, same, {"x": torch.arange(9), "y": torch.ones(2, 3)}],
            keys=["a", None, 7],
            metadata=[None, {"n": 1}, "note"],
            to=(rank for rank in (1,)),
        )
        assert pair.consumers[0].statistics().unread == 0
        batch = await pair.consumers[1].receive()
        assert [owner.key for owner in batch] == ["a", 0, 7]
        assert [owner.metadata for owner in batch] == [None, {"n": 1}, "note"]
        assert [owner["x"].tolist() for owner in batch] == [
            list(range(count)) for count in (4, 4, 9)
        ]
        assert batch[2]["y"].shape == (2, 3)
        batch[1].release()
        assert (await acks[1]).released == (1,)
        assert not acks[0].done()
        batch.release()
        del batch
        assert [(await ack).released for ack in acks] == [(1,)] * 3
        check_all_back(pair.exporter)


async def test_nothing_to_send_is_no_batch() -> None:
    """Also with a full pool.  Kills: an empty batch, and a call that waits for room for nothing."""
    async with open_pair(slots=1) as pair:
        await pair.exporter.send({"x": KIB})
        assert await pair.exporter.send_all([]) == []
        assert await pair.exporter.send_all_nowait([]) == []
        assert check_books(pair.exporter).published == 1
        await drain(pair)


# -- what is refused -----------------------------------------------------------------------------

NOWHERE = torch.empty(3, device="meta")
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], list[str]]] = {
    "too few keys": (lambda: {"owners": owners(3), "keys": ["a"]}, ArgumentError, ["1 keys", "3"]),
    "keys as text": (lambda: {"owners": owners(3), "keys": "abc"}, ArgumentError, ["'abc'"]),
    "keys as bytes": (lambda: {"owners": owners(3), "keys": b"abc"}, ArgumentError, ["b'abc'"]),
    "keys once": (
        lambda: {"owners": owners(2), "keys": (key for key in "ab")},
        ArgumentError,
        ["keys are a sequence"],
    ),
    "a key": (lambda: {"owners": owners(2), "keys": ["a", 1.5]}, ArgumentError, ["1.5"]),
    "too many notes": (
        lambda: {"owners": owners(1), "metadata": [1, 2]},
        ArgumentError,
        ["2 metadata", "1 owners"],
    ),
    "notes as text": (lambda: {"owners": owners(3), "metadata": "abc"}, ArgumentError, ["'abc'"]),
    "one mapping": (lambda: {"owners": owners(1)[0]}, ArgumentError, ["owners"]),
    "owners once": (lambda: {"owners": iter(owners(2))}, ArgumentError, ["owners are a sequence"]),
    "a rank": (lambda: {"owners": owners(2), "to": [5]}, asyncvmm.AsyncVMMError, ["5"]),
    "a bad tensor in the last": (
        lambda: {"owners": [*owners(2), {"fine": KIB, "bad one": NOWHERE}]},
        InvalidTensorError,
        ["'bad one'"],
    ),
    "too many bytes": (
        lambda: {"owners": [{"x": torch.zeros(65536)}] * 5},
        ArgumentError,
        ["5 owners", "1,310,720", "1,048,576"],
    ),
    "too many owners": (lambda: {"owners": owners(41)}, ArgumentError, ["41 owners", "40 slots"]),
    "one too large": (
        lambda: {"owners": [*owners(1), {"x": torch.zeros(1 << 19)}]},
        OwnerTooLargeError,
        ["2,097,152"],
    ),
    "long names": (
        lambda: {"owners": owners(20), "keys": [f"{at}".rjust(4000) for at in range(20)]},
        ArgumentError,
        ["packet", "fewer owners"],
    ),
    "long notes": (
        lambda: {"owners": owners(3), "metadata": ["x" * 30_000] * 3},
        ArgumentError,
        ["packet", "fewer owners"],
    ),
}


@pytest.mark.parametrize("nowait", [False, True])
@pytest.mark.parametrize("what", REFUSED)
async def test_what_cannot_be_sent_is_refused_at_once_and_loses_nothing(
    what: str, nowait: bool
) -> None:
    """Kills: owners published before the last of them was looked at, and a chunk or a slot that
    an error keeps (inv. 13)."""
    given, error, texts = REFUSED[what]
    async with open_pair(slots=40) as pair:
        exporter = pair.exporter
        send = exporter.send_all_nowait if nowait else exporter.send_all
        with pytest.raises(error) as caught:
            await send(**given())
        for text in texts:
            assert text in str(caught.value), str(caught.value)
        await until(lambda: exporter.statistics().slots.free == 40)
        assert check_all_back(exporter).published == 0
        await exporter.send_all(owners(2), keys=["a", "b"])
        assert await drain(pair) == [["a", "b"]]


class Failing(HostPort):
    """The k-th copy of a chunk fails."""

    def __init__(self, k: int) -> None:
        self.k = k

    def copy_in(self, address: int, plan: Plan, stream: int) -> None:
        self.k -= 1
        if not self.k:
            raise ZeroDivisionError(f"copying {plan.layout.features[0].name!r}")
        super().copy_in(address, plan, stream)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("nbytes", [16, OFFLOAD_BYTES])
async def test_a_copy_that_fails_publishes_none(k: int, nbytes: int) -> None:
    """In the loop, and in a thread.  Kills: those before it published, or their chunks kept."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    async with open_pair(port=Failing(k), pool_bytes=8 * OFFLOAD_BYTES) as pair:
        with pytest.raises(ZeroDivisionError, match=f"'x{k}'"):
            await pair.exporter.send_all([{f"x{at}": tensor} for at in range(1, 5)])
        await until(lambda: pair.exporter.statistics().slots.free == 16)
        assert check_all_back(pair.exporter).published == 0
        await pair.exporter.send_all(owners(3))
        assert await drain(pair) == [[0, 1, 2]]


# -- room ----------------------------------------------------------------------------------------


async def test_nowait_tells_what_is_lacking_and_takes_nothing() -> None:
    """Kills: a chunk taken for the first owners before it is known that the last ones fit, and one
    who does not wait but goes before those who do."""
    async with open_pair(slots=3) as pair:
        exporter = pair.exporter
        await exporter.send(owners(1)[0], key="out")
        before = check_books(exporter)
        with pytest.raises(WouldBlock, match=r"3 owners of [\d,]+ bytes.* 2 slots are free"):
            await exporter.send_all_nowait(owners(3))
        after = check_books(exporter)
        assert (after.slots, after.free_bytes) == (before.slots, before.free_bytes)
        waits = start(exporter.send_all(owners(3)))
        await passes(3)
        with pytest.raises(WouldBlock, match="1 calls wait"):
            await exporter.send_all_nowait(owners(1))
        (await pair.consumer.receive()).release()
        await waits
        await drain(pair)


async def test_a_batch_waits_its_turn_and_is_not_overtaken() -> None:
    """It needs three of three slots; one is out, and small ones come all the time.

    Kills: a batch that starves behind small sends, that takes room while it waits, or that goes
    before one who came first.
    """
    async with open_pair(slots=3, prefetch=9) as pair:
        exporter = pair.exporter
        for key in "abc":
            await exporter.send(owners(1)[0], key=key)
        early = start(exporter.send(owners(1)[0], key="early"))
        await passes(2)
        large = start(exporter.send_all(owners(3), keys=[1, 2, 3]))
        await passes(2)
        late = [start(exporter.send(owners(1)[0], key=f"late {at}")) for at in range(2)]
        await passes(2)
        seen = []
        for _ in range(7):
            with await pair.consumer.receive() as batch:
                seen.append([owner.key for owner in batch])
            del batch
            await passes(10)
            check_books(exporter)
            check_no_sleeper(exporter)
        assert seen == [["a"], ["b"], ["c"], ["early"], [1, 2, 3], ["late 0"], ["late 1"]]
        await asyncio.gather(early, large, *late)
        await exporter.drain()
        check_all_back(exporter)


@pytest.mark.parametrize("nbytes", [1000, 40 << 10])
async def test_an_elastic_pool_grows_for_a_batch_and_not_for_want_of_slots(nbytes: int) -> None:
    """Three of five slots are out, three are waited for, of little and of as much as is out.

    Kills: growth for the largest owner only, and memory mapped because slots are out: with them
    their bytes come back.
    """
    kib = torch.zeros(40 << 10, dtype=torch.uint8)
    options: dict[str, Any] = {"pool_bytes": "64KiB", "max_pool_bytes": "512KiB", "slots": 5}
    async with open_pair(shrink_after=60.0, **options) as pair:
        exporter = pair.exporter
        await exporter.send_all([{"x": kib}] * 3)
        grown = check_books(exporter).grown
        assert grown > 0
        waits = start(exporter.send_all([{"x": kib[:nbytes]}] * 3))
        await passes(20)
        stats = check_books(exporter)
        assert (stats.waiting, stats.grown) == (1, grown)
        assert exporter._elastic._busy is None, "nothing is being mapped for it"
        (await pair.consumer.receive()).release()
        await waits
        assert check_books(exporter).grown == grown
        await drain(pair)


async def test_a_batch_that_fits_in_pieces_waits_where_the_pool_cannot_grow() -> None:
    """The piece between two that are mapped was given back, and cannot be had again.

    Kills: a batch that is refused because no one piece can ever hold all of it.
    """
    piece = {"x": torch.zeros(64 << 10, dtype=torch.uint8)}
    options: dict[str, Any] = {"pool_bytes": "64KiB", "max_pool_bytes": "192KiB", "prefetch": 3}
    async with open_pair(shrink_after=0.01, **options) as pair:
        exporter = pair.exporter
        for _ in range(3):
            await exporter.send(piece)
        batches = [await pair.consumer.receive() for _ in range(3)]
        batches.pop(1).release()
        await until(lambda: exporter.statistics().shrunk == 1)

        def refuse(nbytes: int) -> Any:
            raise BackendError("there is no more", call="memfd_create", code="ENOMEM")

        exporter._region.grow = refuse  # type: ignore[method-assign]  # as a full machine would
        fits = start(exporter.send_all([piece] * 2))
        await until(lambda: exporter._elastic._failed)
        await passes(5)
        never = start(exporter.send_all([piece] * 3))
        while batches:
            batches.pop().release()
        assert len(await fits) == 2
        with pytest.raises(BackendError, match="no more"):
            await never
        await drain(pair)


@pytest.mark.filterwarnings("ignore::asyncvmm.OwnersOutstandingWarning")
async def test_the_exporter_closes_while_a_batch_waits() -> None:
    """Kills: a batch that waits on for the room of a pool that is closed."""
    options: dict[str, Any] = {"device": "cpu", "slots": 2, "pool_bytes": "64KiB"}
    async with asyncvmm.open_exporter("@full", close_timeout=0.01, **options) as exporter:
        await exporter.send(owners(1)[0])  # for a rank that never comes
        waits = start(exporter.send_all(owners(2)))
        await passes(3)
    with pytest.raises(asyncvmm.ClosedError):
        await waits
    with pytest.raises(asyncvmm.ClosedError):
        await exporter.send_all(owners(2))


# -- turns of the loop ---------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "features", "turns"), [(4, PIECE // 4, 0), (3, PIECE, 2)])
async def test_the_loop_turns_between_pieces(count: int, features: int, turns: int) -> None:
    """Kills: a loop that is kept for as long as a batch has features."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with open_pair() as pair:
        ticker = start(tick())
        await passes(2)
        before = ticks
        await pair.exporter.send_all(owners(count, features))
        assert ticks - before == turns
        ticker.cancel()
        await drain(pair)


# -- cancellation --------------------------------------------------------------------------------


class Gated(HostPort):
    """Copies only while the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)

    def copy_all(self, plans: Sequence[tuple[int, Plan]], stream: int) -> None:
        self.begun.release()
        assert self.gate.wait(30)
        super().copy_all(plans, stream)


async def test_a_batch_cancelled_in_its_copy_gives_its_chunks_back_after_it() -> None:
    """Kills: a chunk of the batch that is free while the thread still copies into another."""
    port = Gated()
    large = [{"x": torch.zeros(OFFLOAD_BYTES, dtype=torch.uint8)}] * 3
    async with open_pair(port=port, pool_bytes=3 * OFFLOAD_BYTES, slots=4) as pair:
        exporter = pair.exporter
        task = start(exporter.send_all(large))
        await asyncio.to_thread(port.begun.acquire)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        slots = check_books(exporter).slots
        assert (slots.draining, slots.free) == (3, 1)
        port.gate.set()
        await until(lambda: exporter.statistics().slots.free == 4)
        assert check_all_back(exporter).published == 0
        assert not exporter._draining.copying


def in_pieces(exporter: Exporter) -> Coroutine[Any, Any, Any]:
    return exporter.send_all(owners(6, PIECE // 2 + 1))


def in_a_thread(exporter: Exporter) -> Coroutine[Any, Any, Any]:
    return exporter.send_all([{"x": torch.zeros(OFFLOAD_BYTES, dtype=torch.uint8)}] * 2)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("work", [in_pieces, in_a_thread])
async def test_a_batch_cancelled_after_any_number_of_passes(
    work: Callable[[Exporter], Coroutine[Any, Any, Any]], full: bool
) -> None:
    """Waiting for room, between pieces, or with a thread at work: all of it comes, or nothing.

    Kills: some owners of a cancelled batch published, a chunk that it keeps, and a waiter behind
    it that is not woken.
    """
    published = cancelled = 0
    async with open_pair(pool_bytes=4 * OFFLOAD_BYTES, slots=6, prefetch=9) as pair:
        exporter = pair.exporter
        for count in range(14):
            held = [await exporter.send(owners(1)[0]) for _ in range(6 if full else 0)]
            before = check_books(exporter).published
            task = start(work(exporter))
            await passes(2)
            behind = start(exporter.send(owners(1)[0], key="behind"))
            for _ in held:
                (await pair.consumer.receive()).release()
            await passes(count)
            cancelled += task.cancel()
            await asyncio.wait([task])
            check_books(exporter)
            check_no_sleeper(exporter)
            async with asyncio.timeout(5):
                keys = []
                while "behind" not in keys:
                    with await pair.consumer.receive() as batch:
                        keys += [owner.key for owner in batch]
                    del batch
                await behind
            rest = await drain(pair)
            number = len(keys) - 1 + sum(len(each) for each in rest)  # type: ignore[arg-type, misc]  # lists
            assert number == (0 if task.cancelled() else len(task.result()))
            assert check_books(exporter).published == before + 1 + number
            published += not task.cancelled()
    assert cancelled > 2


# -- what it costs -------------------------------------------------------------------------------


async def test_a_batch_is_one_packet_there_and_one_back() -> None:
    """Kills: a packet, or a wake-up of the other side, for each owner or each of its releases."""
    async with open_pair(slots=16) as pair:
        for _ in range(2):
            await pair.exporter.send_all(owners(16))
            await drain(pair)
        (connection,) = pair.exporter._connections.open.values()
        ours, theirs = counted(connection.link), counted(pair.consumer._link)
        for _ in range(10):
            acks = await pair.exporter.send_all(owners(16))
            with await pair.consumer.receive() as batch:
                assert len(batch) == 16
                for owner in batch:
                    owner["x0"]
            del batch, owner
            for ack in acks:
                await ack
        assert ours["send"] == theirs["send"] == 10
        for calls in (ours, theirs):
            assert set(calls) <= {"send", "recv", "recv_into", "recvmsg", "recvmsg_into"}, calls
            assert sum(calls.values()) <= 30  # one that finds nothing more, at most
        check_all_back(pair.exporter)


@pytest.mark.parametrize("leave", ["with", "async with", "an error", "release"])
async def test_leaving_a_batch_is_one_message(leave: str) -> None:
    """However it is left, and whatever was let go of before.

    Kills: a block that releases its owners one by one, each in a message of its own.
    """
    async with open_pair(slots=16) as pair:
        core = pair.exporter._core
        said: list[wire.Release] = []
        receive = core.receive

        def heard(peer_id: int, messages: Sequence[wire.FromConsumer]) -> None:
            said.extend(m for m in messages if isinstance(m, wire.Release))
            receive(peer_id, messages)

        core.receive = heard  # type: ignore[method-assign]  # counts
        acks = await pair.exporter.send_all(owners(16))
        batch = await pair.consumer.receive()
        batch[3].release()
        if leave == "with":
            with batch:
                pass
        elif leave == "async with":
            async with batch:
                pass
        elif leave == "an error":
            with pytest.raises(KeyError), batch:
                batch[0]["there is none"]
        else:
            batch.release()
        del batch
        for ack in acks:
            await ack
        assert [len(release.others) for release in said] == [0, 14]
        check_all_back(pair.exporter)
