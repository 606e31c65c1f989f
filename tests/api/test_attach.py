"""Who comes and goes: ranks, groups, competitors, latecomers, names, and task groups."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import anyio.abc
import pytest
import torch

import asyncvmm
from asyncvmm import (
    BackendError,
    Broadcast,
    Compete,
    Consumer,
    EndOfStream,
    Exporter,
    Group,
    Outcome,
)
from asyncvmm._core import wire
from asyncvmm._exporter.connections import Connections
from asyncvmm.testing import open_pair
from tests.api.books import check_all_back, check_books, passes, until
from tests.patience import PROMPTLY

ONE = {"x": torch.ones(3)}


def open_exporter(name: str, ranks: int = 1, **options: object) -> asyncvmm.open_exporter:
    route = Broadcast(ranks) if ranks else Compete()
    return asyncvmm.open_exporter(name, device="cpu", pool_bytes="64KiB", route=route, **options)  # type: ignore[arg-type]  # options are open


def connect(name: str, rank: int | None = None, **options: Any) -> asyncvmm.connect[Consumer]:
    found: asyncvmm.connect[Consumer] = asyncvmm.connect(name, device="cpu", rank=rank, **options)
    return found


async def keys_of(consumer: Consumer, count: int) -> list[object]:
    """Receive and release so many batches; return their keys."""
    found: list[object] = []
    for _ in range(count):
        async with await consumer.receive() as batch:
            found.append(batch[0].key)
    return found


# -- ranks ---------------------------------------------------------------------------------------


async def test_owners_wait_for_ranks_that_have_not_come() -> None:
    """In order, from before anybody came, and while one of two is away.

    Kills: a batch published to an absent rank that is dropped, doubled, or delivered out of order.
    """
    async with open_exporter("@wait", 2) as exporter:
        acks = [await exporter.send(ONE, key=number) for number in range(3)]
        stats = check_books(exporter)
        assert stats.owners[0].waiting_for == (0, 1)
        async with connect("@wait", 0) as zero:
            assert await keys_of(zero, 3) == [0, 1, 2]
            acks.append(await exporter.send(ONE, key=3))
            assert await keys_of(zero, 1) == [3]
            await until(lambda: exporter.statistics().owners[0].held_by == ())
            assert [owner.waiting_for for owner in exporter.statistics().owners] == [(1,)] * 4
            assert not any(ack.done() for ack in acks)
        async with connect("@wait", 1) as one:
            assert await keys_of(one, 4) == [0, 1, 2, 3]
            acks.append(await exporter.send(ONE, key=4))  # rank 0 has left and is waited for
            assert await keys_of(one, 1) == [4]
            async with connect("@wait", 0) as zero:
                assert await keys_of(zero, 1) == [4]
        for ack in acks:
            assert sorted((await ack).released) == [0, 1]
        check_all_back(exporter)


async def test_a_rank_can_be_had_once_and_again_after_it_was_left() -> None:
    """Kills: a rank that two have at once, and one that stays taken after its consumer left or
    failed to come.
    """
    async with open_exporter("@ranks", 2) as exporter, connect("@ranks", 1) as one:
        for wrong, match in ((1, "taken"), (2, "out of range"), (17, "out of range")):
            with pytest.raises(asyncvmm.RankError, match=match) as caught:
                await connect("@ranks", wrong).__aenter__()
            assert (caught.value.rank, caught.value.consumer_count) == (wrong, 2)
            assert caught.value.reason == "rank"
        with pytest.raises(asyncvmm.RankError, match="ranks 0 to 1") as caught:
            await connect("@ranks").__aenter__()
        assert (caught.value.rank, caught.value.consumer_count) == (None, 2)
        ack = await exporter.send(ONE)
        for _ in range(3):
            async with connect("@ranks", 0) as zero:
                await exporter.wait_attached(2)
                if not ack.done() and not zero.statistics().delivered:
                    await passes(5)
        await keys_of(one, 1)
        await until(ack.done)


DIES_AFTER_HELLO = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(chr(0) + "restarted")
sock.send(bytes.fromhex(sys.argv[1]))
"""


async def test_a_rank_that_died_in_the_backlog_has_no_seat() -> None:
    """It was killed and begun again while the exporter stood still.

    Kills: a seat for a process that has ended, which its successor is then refused.
    """
    hello = wire.encode_greeting(wire.Hello(rank=0, name=None, kind="any"))
    command = [sys.executable, "-S", "-c", DIES_AFTER_HELLO, hello.hex()]
    async with open_exporter("@restarted", 1):
        for _ in range(3):
            subprocess.run(command, check=True)  # noqa: ASYNC221 - so this loop stands still
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as successor:
            successor.setblocking(False)
            successor.connect("\0restarted")
            successor.send(hello)
            answer = await asyncio.get_running_loop().sock_recv(successor, wire.PACKET_LIMIT)
        assert isinstance(wire.decode_greeting(answer), wire.Welcome)


async def test_a_refused_connection_may_not_try_again_by_itself() -> None:
    """A consumer that is refused sends nothing more that counts.

    Kills: a seat given to the next hello on a connection that was refused before, which then
    nobody sits in and nobody can have.
    """
    async with open_exporter("@refused", 1) as exporter:
        allowed, exporter._connections.handshake._access.uids = (
            exporter._connections.handshake._access.uids,
            frozenset({12345}),
        )
        with pytest.raises(asyncvmm.AccessDeniedError, match="allow_uids"):
            await connect("@refused", 0).__aenter__()
        exporter._connections.handshake._access.uids = allowed
        async with connect("@refused", 0) as consumer:
            await exporter.send(ONE)
            await keys_of(consumer, 1)


async def test_to_narrows_a_batch_to_some_ranks() -> None:
    """As a rank, as ranks, as a group; the others neither see it nor are waited for.

    Kills: a batch delivered to a rank it was not for, and an acknowledgement that waits for one.
    """
    async with open_pair(consumers=4) as pair:
        sends: list[tuple[object, list[int]]] = [
            (None, [0, 1, 2, 3]),
            (2, [2]),
            ([0, 3], [0, 3]),
            ({1, 2}, [1, 2]),
            (Group(0, 1), [0, 1]),
            (Group(3, 3, 2), [2, 3]),
            (range(1, 3), [1, 2]),
        ]
        acks = [
            await pair.exporter.send(ONE, key=number, to=to)  # type: ignore[arg-type]  # any form
            for number, (to, _) in enumerate(sends)
        ]
        async with pair.exporter.reserve(
            {"x": asyncvmm.TensorSpec((1,), "int8")}, key=7, to=1
        ) as o:
            acks.append(o.publish())
        sends.append((1, [1]))
        for rank, consumer in enumerate(pair.consumers):
            mine = [number for number, (_, ranks) in enumerate(sends) if rank in ranks]
            assert await keys_of(consumer, len(mine)) == mine
            assert consumer.statistics().unread == 0
        for ack, (_, ranks) in zip(acks, sends, strict=True):
            assert sorted((await ack).released) == ranks
        check_all_back(pair.exporter)


@pytest.mark.parametrize("count", [1, 8])
async def test_wait_attached_means_at_once(count: int) -> None:
    """Kills: counting those that came, instead of those that are here."""
    async with open_exporter("@attached", 8) as exporter, AsyncExitStack() as stack:
        waiting = asyncio.create_task(exporter.wait_attached(count))
        for rank in range(count):
            async with connect("@attached", rank):
                await passes(3)
        if count > 1:
            assert not waiting.done()
        for rank in range(count):
            await stack.enter_async_context(connect("@attached", rank))
        await waiting


async def test_those_who_wait_for_an_exporter_are_told_when_it_closes() -> None:
    """Kills: ``wait_attached`` and ``drain`` that hang when their exporter closes."""
    waiting: list[asyncio.Task[None]] = []

    async def fail_inside() -> None:
        async with open_exporter("@closing", 2) as exporter:
            await exporter.send(ONE)
            waiting.append(asyncio.create_task(exporter.wait_attached(2)))
            waiting.append(asyncio.create_task(exporter.drain()))
            await passes(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    for task in waiting:
        with pytest.raises(asyncvmm.ClosedError):
            async with asyncio.timeout(PROMPTLY):
                await task


async def test_a_handshake_may_end_before_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter hangs up in the turn in which a hello came.

    Kills: a coroutine that nobody ever awaits, of which Python warns.
    """
    spawn = Connections._spawn

    def spawn_and_hang_up(connections: Connections, *work: Any) -> None:
        spawn(connections, *work)
        connections.abort()

    monkeypatch.setattr(Connections, "_spawn", spawn_and_hang_up)
    async with open_exporter("@early") as exporter:
        with pytest.raises(asyncvmm.PeerLostError):
            await connect("@early", 0).__aenter__()
        await passes(3)
        gc.collect()
        assert exporter.statistics().slots.free


# -- segments that cannot be shared ----------------------------------------------------------------

REFUSED: list[tuple[BackendError, type[asyncvmm.HandshakeError], str, str]] = [
    (
        BackendError("no POSIX handle for it", call="cuMemExportToShareableHandle", code="801"),
        asyncvmm.HandshakeError,
        "share",
        "could not share its pool: no POSIX handle for it",
    ),
    (
        BackendError("dup answered EMFILE", call="dup", code="EMFILE"),
        asyncvmm.ExporterLimitError,
        "descriptor_limit",
        "open files of its process are in use",
    ),
]


class Sharing:
    """An exporter whose later segments cannot be shared for a while; each export is counted."""

    def __init__(self, exporter: Exporter, error: BackendError) -> None:
        region: Any = exporter._region
        self._export = region.export
        region.export = self
        self.exporter = exporter
        self.error: BackendError | None = error
        self.asked = 0

    def __call__(self, index: int) -> object:
        if index and self.error is not None:
            self.asked += 1
            raise self.error
        return self._export(index)

    def grow(self) -> None:
        """Have one segment more, as if somebody had waited for it."""
        self.exporter._elastic._add(self.exporter._region.grow(4096))


@pytest.mark.parametrize("number", [0, 1])
async def test_who_comes_is_told_why_a_grown_segment_cannot_be_shared(number: int) -> None:
    """Kills: the reason told for the first segment only, and an end without one for the others."""
    error, kind, reason, text = REFUSED[number]
    async with open_exporter("@grown", max_pool_bytes="1MiB") as exporter:
        sharing = Sharing(exporter, error)
        sharing.grow()
        for _ in range(2):
            with pytest.raises(asyncvmm.HandshakeError, match=text) as caught:
                await connect("@grown", 0).__aenter__()
            assert (type(caught.value), caught.value.reason) == (kind, reason)
        assert sharing.asked == 2
        sharing.error = None
        async with connect("@grown", 0) as consumer:  # the seat is free
            await exporter.send(ONE)
            (await consumer.receive()).release()
            await exporter.drain()
            check_all_back(exporter)


@pytest.mark.parametrize("reconnect", [False, True])
async def test_who_has_just_come_is_told_why_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch, reconnect: bool
) -> None:
    """The pool grows when the consumer has what it was promised, and has said so.

    Kills: a loss without a reason, another link that is looked for although nothing is held, and
    one who may reconnect that does not come in again.
    """
    error, _, reason, text = REFUSED[0]
    async with open_exporter("@grown", max_pool_bytes="1MiB") as exporter:
        sharing = Sharing(exporter, error)
        handshake = exporter._connections.handshake
        attach = handshake.attach

        def grow_and_attach(*given: Any) -> None:
            if not sharing.asked:
                sharing.grow()
            attach(*given)

        monkeypatch.setattr(handshake, "attach", grow_and_attach)
        connecting: Any = connect("@grown", 0, reconnect=reconnect)
        async with connecting as consumer:
            if reconnect:
                with pytest.raises(asyncvmm.PeerLostError, match=text) as lost:
                    await consumer.receive()
                assert isinstance(lost.value.__cause__, asyncvmm.HandshakeError)
                sharing.error = None
                await exporter.send(ONE)
                (await consumer.receive()).release()
                await exporter.drain()
            else:
                for _ in range(2):
                    with pytest.raises(asyncvmm.HandshakeError, match=text) as caught:
                        await consumer.receive()
                    assert caught.value.reason == reason
                assert consumer._resuming._task is None
                await until(lambda: not exporter.statistics().consumers)
        assert sharing.asked == 1
        check_all_back(exporter)


# -- latecomers ----------------------------------------------------------------------------------


async def test_a_rank_that_comes_after_the_goodbye_gets_its_backlog_and_then_the_end() -> None:
    """Kills: a listener that is closed while owners wait for a rank, and an end that overtakes."""
    closed = asyncio.Event()

    async def export() -> None:
        async with open_exporter("@late", 2) as exporter:
            for number in range(3):
                await exporter.send(ONE, key=number)
            closed.set()
        # The block ends once both have come and read everything.

    exporting = asyncio.create_task(export())
    await closed.wait()
    await passes(3)
    for rank in (1, 0):
        async with connect("@late", rank) as consumer:
            assert await keys_of(consumer, 3) == [0, 1, 2]
            with pytest.raises(EndOfStream):
                await consumer.receive()
            with pytest.raises(EndOfStream):
                consumer.receive_nowait()
            assert [batch async for batch in consumer] == []
    await exporting


async def test_who_attaches_while_the_exporter_leaves_is_told_of_the_end() -> None:
    """Kills the planted bug of a goodbye to those only who had come in when it was said.

    The exporter begins to leave at each pass of the loop during an attachment, and at last when
    it has given the seat, which on a busy machine may be later than all of these.
    """
    seen = Counter[str]()
    for count in (*range(0, 60, 2), None):
        opening = open_exporter("leaving", 0)
        exporter = await opening.__aenter__()

        async def attach() -> str:
            try:
                attaching = connect("leaving")
                consumer = await attaching.__aenter__()
            except (asyncvmm.ExporterNotFoundError, asyncvmm.PeerLostError):
                return "not attached"
            with pytest.raises(EndOfStream):
                await consumer.receive()
            await attaching.__aexit__()
            return "told"

        task = asyncio.create_task(attach())
        if count is None:
            await until(partial(bool, exporter._connections.open))
        else:
            await passes(count)
        await opening.__aexit__(None, None, None)
        seen[await task] += 1
    assert seen["told"] > 0


async def test_a_consumer_reads_what_is_there_before_it_hears_of_the_end() -> None:
    """Kills: an end that drops what was delivered and not yet received."""
    async with AsyncExitStack() as stack:
        exporter = await stack.enter_async_context(open_exporter("@end", 1))
        async with connect("@end", 0) as consumer:
            for number in range(3):
                await exporter.send(ONE, key=number)
            closing = asyncio.create_task(stack.aclose())
            await passes(10)
            found = []
            async for batch in consumer:
                found.append(batch[0].key)
                batch.release()
            assert found == [0, 1, 2]
        await closing


async def test_leaving_refuses_what_is_unread_and_releases_what_was_received() -> None:
    """Kills: an owner that a leaving consumer keeps, and one it refuses although it read it."""
    async with open_exporter("@leave", 1) as exporter:
        acks = [await exporter.send(ONE, key=n, require="none") for n in range(3)]
        async with connect("@leave", 0) as consumer:
            read, unopened = await consumer.receive(), await consumer.receive()
            assert read[0]["x"][0] == 1
        outcomes = [await ack for ack in acks]
        assert outcomes[0] == Outcome(released=(0,))
        assert outcomes[1].refused[0][0] == outcomes[2].refused[0][0] == 0
        assert "without reading" in outcomes[1].refused[0][1]
        assert "unread" in outcomes[2].refused[0][1]
        with pytest.raises(asyncvmm.ReleasedError):
            unopened[0]["x"]
        with pytest.raises(asyncvmm.ClosedError):
            await consumer.receive()
        with pytest.raises(asyncvmm.ClosedError):
            consumer.receive_nowait()
        await consumer.aclose()  # again is a no-op
        check_all_back(exporter)


# -- competitors ---------------------------------------------------------------------------------


async def serve(consumer: Consumer, got: list[object], slow: int) -> None:
    async for batch in consumer:
        async with batch:
            got.append(batch[0].key)
            await passes(slow)


async def test_competitors_get_each_batch_exactly_once() -> None:
    """Three of different speeds; the slow one does not hold up the others.

    Kills: a batch that two get or nobody gets, and a share that is dealt out regardless of speed.
    """
    got: list[list[object]] = [[], [], []]
    async with open_exporter("@compete", 0, slots=16) as exporter, AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(connect("@compete")) for _ in got]
        serving = [
            asyncio.create_task(serve(consumer, mine, slow))
            for consumer, mine, slow in zip(consumers, got, (0, 5, 300), strict=True)
        ]
        for number in range(300):
            await exporter.send(ONE, key=number)
        await exporter.drain()
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)
    counted = Counter(key for mine in got for key in mine)
    assert counted == Counter(range(300))
    assert all(mine == sorted(mine, key=int) for mine in got)  # type: ignore[arg-type]  # ints
    assert len(got[2]) < len(got[1]) < len(got[0])
    assert got[2]


def has(exporter: Exporter, taken: int, untaken: int) -> bool:
    (numbers,) = exporter.statistics().consumers
    return (numbers.holding, numbers.untaken) == (taken + untaken, untaken)


@pytest.mark.parametrize("prefetch", [1, 3])
async def test_credit_bounds_what_a_competitor_has_not_taken(prefetch: int) -> None:
    """Credit means taken: what was received no longer counts (lesson of the facts).

    Kills: credit that comes back with the release, and a busy consumer that is given more.
    """
    async with open_exporter("@credit", 0, slots=16) as exporter:
        async with connect("@credit", prefetch=prefetch, member="only") as consumer:
            for number in range(8):
                await exporter.send(ONE, key=number)
            await until(partial(has, exporter, 0, prefetch))
            await until(lambda: consumer.statistics().unread == prefetch)
            held = []
            for number in range(8):
                check_books(exporter)
                waiting = [owner.waiting_for for owner in exporter.statistics().owners]
                assert waiting.count(("*",)) == max(0, 8 - number - prefetch)
                held.append(await consumer.receive())
                assert held[-1][0].key == number
                await until(partial(has, exporter, number + 1, min(prefetch, 7 - number)))
            for batch in held:
                batch.release()
        await exporter.drain()


async def test_what_a_leaving_competitor_has_not_taken_goes_to_another() -> None:
    """The oldest first, also before what nobody had yet; what it has taken is its own.

    Kills: a batch lost with the competitor it was prefetched to, done twice, or put back behind
    later ones.
    """
    async with open_exporter("@hand", 0) as exporter:
        acks = [await exporter.send(ONE, key=number) for number in range(6)]
        async with connect("@hand", prefetch=3) as first:
            taken = await first.receive()
            await until(lambda: first.statistics().unread == 3)
        with pytest.raises(asyncvmm.ReleasedError):
            taken[0]["x"]
        async with connect("@hand", prefetch=8) as second:
            assert await keys_of(second, 5) == [1, 2, 3, 4, 5]
            for ack in acks[1:]:
                assert (await ack).released == ("consumer-2",)
            assert acks[0].outcome is not None
            assert acks[0].outcome.refused[0][0] == "consumer-1"
        check_all_back(exporter)


async def test_competitors_have_names() -> None:
    """Kills: a name two have at once, a rank taken for a name, and a made-up name that is taken."""
    async with open_exporter("@names", 0) as exporter:
        async with connect("@names", member="consumer-1"), connect("@names"):
            members = {each.member for each in exporter.statistics().consumers}
            assert len(members) == 2
            for taken in ("consumer-1", "*"):
                with pytest.raises(asyncvmm.RankError, match="free name"):
                    await connect("@names", member=taken).__aenter__()
            with pytest.raises(asyncvmm.RankError, match="without rank=0"):
                await connect("@names", 0).__aenter__()
        with pytest.raises(asyncvmm.ArgumentError, match="Broadcast to address ranks"):
            await exporter.send(ONE, to=0)


async def test_competitors_hear_of_the_end_when_nothing_is_left_for_them() -> None:
    """Kills: an end told to all when the exporter closes, with batches still to be handed out."""
    got: list[list[object]] = [[], []]
    async with (
        AsyncExitStack() as consumers,
        asyncio.TaskGroup() as group,
        open_exporter("@finish", 0, slots=32) as exporter,
    ):
        for number in range(20):
            await exporter.send(ONE, key=number)
        for mine in got:
            consumer = await consumers.enter_async_context(connect("@finish", prefetch=1))
            group.create_task(serve(consumer, mine, 3))
    assert sorted([*got[0], *got[1]], key=int) == list(range(20))  # type: ignore[arg-type]  # ints


# -- names and restarts --------------------------------------------------------------------------


async def test_a_second_exporter_on_a_live_name_is_refused_and_the_first_unharmed() -> None:
    """For a bare name, a path and an abstract name.

    Kills: a name that is taken over from a live exporter.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("api-live", f"{folder}/live", "@api-live"):
            async with open_exporter(name) as exporter, connect(name, 0) as consumer:
                assert exporter.name == name
                with pytest.raises(asyncvmm.NameInUseError, match="alive") as caught:
                    await open_exporter(name).__aenter__()
                assert caught.value.name == name
                await exporter.send(ONE)
                await keys_of(consumer, 1)
            # Closed, the name is free at once.
            async with open_exporter(name), connect(name, 0):
                pass


async def test_wait_waits_for_an_exporter_that_is_not_there_yet() -> None:
    """Kills: a consumer that gives up although it was told to wait, or waits when it was not."""
    with pytest.raises(asyncvmm.ExporterNotFoundError, match="start it first") as caught:
        await connect("@nobody-yet", 0).__aenter__()
    assert caught.value.name == "@nobody-yet"
    coming = connect("@nobody-yet", 0, wait=True)
    entering = asyncio.create_task(coming.__aenter__())
    await passes(20)
    assert not entering.done()
    async with open_exporter("@nobody-yet") as exporter:
        consumer = await entering
        await exporter.send(ONE)
        await keys_of(consumer, 1)
        await consumer.aclose()


async def test_a_restarted_exporter_is_another_one() -> None:
    """A consumer reads the end of the first and connects again to the second.

    Kills: an owner of the first life that shows up in the second.
    """
    for life in range(3):
        async with open_exporter("@restart") as exporter, connect("@restart", 0) as consumer:
            await exporter.send(ONE, key=life)
            assert await keys_of(consumer, 1) == [life]
            assert exporter.statistics().published == 1
            assert consumer.statistics().delivered == 1


# -- structured concurrency ----------------------------------------------------------------------


async def test_a_consumer_is_an_anyio_stream() -> None:
    """Kills: an end or a close that code written against anyio does not recognise."""
    async with open_pair() as pair:
        stream: anyio.abc.ObjectReceiveStream[asyncvmm.Batch] = pair.consumer
        assert isinstance(stream, anyio.abc.ObjectReceiveStream)
        await pair.exporter.send(ONE, key="a")
        async for batch in stream:
            batch.release()
            break
        with anyio.move_on_after(0.01) as scope:
            await stream.receive()
        assert scope.cancelled_caught
        await stream.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await stream.receive()


async def numbered(exporter: Exporter, count: int) -> None:
    for number in range(count):
        await exporter.send(ONE, key=number)


async def collect(consumer: Consumer, count: int, into: list[Sequence[object]]) -> None:
    into.append(await keys_of(consumer, count))


@pytest.mark.parametrize("groups", ["asyncio", "anyio"])
async def test_task_groups_of_both_kinds(groups: str) -> None:
    """One task fails while others send, reserve, receive and wait; the group ends, nothing hangs.

    Kills: an awaitable that swallows the cancellation of a task group.
    """
    got: list[Sequence[object]] = []
    async with open_exporter("@lonely", 2) as lonely, open_pair(consumers=2, slots=4) as pair:
        if groups == "asyncio":
            async with asyncio.TaskGroup() as group:
                group.create_task(numbered(pair.exporter, 50))
                for consumer in pair.consumers:
                    group.create_task(collect(consumer, 50, got))
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(numbered, pair.exporter, 50)
                for consumer in pair.consumers:
                    tasks.start_soon(collect, consumer, 50, got)
        assert got == [list(range(50))] * 2

        async def fail() -> None:
            await until(lambda: pair.exporter.statistics().waiting > 0)
            raise ZeroDivisionError

        with pytest.raises(ExceptionGroup) as caught:
            await in_group(
                groups == "anyio",
                fail(),
                numbered(pair.exporter, 50),
                collect(pair.consumers[0], 3, got),
                lonely.wait_attached(2),
                pair.exporter.drain(),
            )
        assert caught.group_contains(ZeroDivisionError)
        stats = check_books(pair.exporter)
        assert stats.waiting == 0
        for consumer in pair.consumers:
            assert consumer.statistics().waiting == 0
            while consumer.statistics().unread:
                consumer.receive_nowait().release()
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def in_group(with_anyio: bool, *work: object) -> None:
    async def run(each: object) -> None:
        await each  # type: ignore[misc]  # it is awaitable

    if with_anyio:
        async with anyio.create_task_group() as tasks:
            for each in work:
                tasks.start_soon(run, each)
    else:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(run(each))


async def test_an_anyio_cancel_scope_around_everything() -> None:
    """Level cancellation: every further await inside the scope is cancelled too, also while
    leaving the blocks.

    Kills: an exit that needs an await to give something back.
    """
    for passes_before in range(0, 40, 3):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def use() -> None:
                    async with open_pair(name="@scope", slots=2) as pair:
                        await numbered(pair.exporter, 2)
                        async with await pair.consumer.receive() as batch:
                            assert batch[0]["x"][0] == 1
                            await passes(5)
                            await pair.exporter.drain()

                tasks.start_soon(use)
                await passes(passes_before)
                scope.cancel()
    async with open_pair(name="@scope") as pair:
        await pair.exporter.send(ONE)
        await keys_of(pair.consumer, 1)
