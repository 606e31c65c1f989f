"""Why a producer waits: said by ``explain()``, and once per cause by the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import Explanation, Obstacle, _logs
from asyncvmm._errors import BackendError
from asyncvmm._exporter import explaining
from asyncvmm._exporter.room import Room
from asyncvmm.testing import FakeDevice, FakePort, open_pair
from tests.api.books import until
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers
from tests.process.patterns import features, note

SLOTS = 2


def data(nbytes: int = 256) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(nbytes, dtype=torch.uint8)}


async def fill(exporter: asyncvmm.Exporter) -> None:
    """Send as many owners as there are slots; the keys count from 0."""
    for number in range(exporter.statistics().slots.total):
        await exporter.send(data(), key=f"owner {number}", require="none")


@contextlib.asynccontextmanager
async def waiting(exporter: asyncvmm.Exporter, nbytes: int = 256) -> AsyncIterator[None]:
    """Have a send wait for room for as long as this lasts."""
    task = asyncio.create_task(exporter.send(data(nbytes), require="none"))
    await until(lambda: exporter.statistics().waiting > 0)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def only(exporter: asyncvmm.Exporter) -> Obstacle:
    (obstacle,) = exporter.explain().obstacles
    return obstacle


def ticking(exporter: asyncvmm.Exporter) -> bool:
    return exporter._room._timer is not None


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[Explanation]]:
    """What the log has explained so far."""
    found: list[Explanation] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            explanation: Any = getattr(record, "explanation", None)
            if explanation is not None:
                assert record.levelno == logging.WARNING
                assert record.name == "asyncvmm.exporter"
                assert str(explanation) in record.getMessage()
                found.append(explanation)

    handler = Collect()
    logging.getLogger("asyncvmm").addHandler(handler)
    yield found
    logging.getLogger("asyncvmm").removeHandler(handler)


# -- what is said of each who keeps something ----------------------------------------------------


async def test_an_idle_pool_has_nothing_to_explain() -> None:
    async with open_pair(slots=SLOTS) as pair:
        explanation = pair.exporter.explain()
        assert explanation.obstacles == ()
        assert (explanation.lacks, explanation.waiting, explanation.needed) == ("nothing", 0, 0)
        assert str(explanation).startswith("nobody waits: 2 of 2 slots and ")


async def test_who_holds_owners_is_named_with_their_number_and_age() -> None:
    """Kills: an obstacle that counts owners once and not once per consumer that holds them."""
    async with open_pair(slots=SLOTS, consumers=2) as pair:
        await fill(pair.exporter)
        batches = [await pair.consumers[0].receive() for _ in range(SLOTS)]
        late = [await pair.consumers[1].receive() for _ in range(SLOTS)]
        async with waiting(pair.exporter, 512):
            explanation = pair.exporter.explain()
            assert (explanation.lacks, explanation.needed, explanation.waiting) == ("slot", 512, 1)
            assert explanation.waited > 0
            kept = [(each.kind, each.member, each.owners) for each in explanation.obstacles]
            assert kept == [("held", 0, 2), ("held", 1, 2)]
            batches[0].release()
            batches[1].release()
            await until(lambda: len(pair.exporter.explain().obstacles) == 1)
            obstacle = only(pair.exporter)
            assert (obstacle.member, obstacle.owners, obstacle.nbytes) == (1, 2, 512)
            assert obstacle.oldest == "owner 0"
            assert obstacle.since > 0
            text = str(pair.exporter.explain())
            assert "\n" not in text
            assert "1 call waits for room" in text
            assert "none of 2 slots is free" in text
            assert f"rank 1 (pid {obstacle.pid}) holds 2 owners (512 bytes)" in text
            assert "release" in text
        for batch in late:
            batch.release()


async def test_a_pool_in_pieces_lacks_a_gap() -> None:
    """Kills: an explanation that looks at the free bytes and not at the largest piece."""
    async with open_pair(pool_bytes=4 * 256, slots=8) as pair:
        for number in range(4):
            await pair.exporter.send(data(), key=number)
        batches = [await pair.consumer.receive() for _ in range(4)]
        batches[0].release()
        batches[2].release()
        await until(lambda: pair.exporter.statistics().free_bytes == 512)
        async with waiting(pair.exporter, 512):
            explanation = pair.exporter.explain()
            assert explanation.lacks == "gap"
            assert "512 of 1,024 bytes are free, the largest gap is 256" in str(explanation)
        for batch in batches:
            batch.release()


async def test_a_batch_lacks_the_slots_that_are_free_too_few() -> None:
    """Kills: "nothing" that is lacking for a batch while some slots are free, and a gap where it
    is not bytes that are."""
    async with open_pair(slots=3, pool_bytes=5 * 256) as pair:
        await pair.exporter.send(data())
        task = asyncio.create_task(pair.exporter.send_all([data()] * 3, require="none"))
        await until(lambda: pair.exporter.statistics().waiting > 0)
        explanation = pair.exporter.explain()
        assert (explanation.lacks, explanation.needed, explanation.needed_slots) == ("slot", 768, 3)
        assert "768 bytes in 3 owners: only 2 of 3 slots are free" in str(explanation)
        (await pair.consumer.receive()).release()
        await task
        (await pair.consumer.receive()).release()


async def test_a_view_that_outlives_its_consumer_is_lingering() -> None:
    async with open_pair(slots=SLOTS) as pair:
        await fill(pair.exporter)
        views = [(await pair.consumer.receive())[0]["x"] for _ in range(SLOTS)]
        await pair.consumer.aclose()
        obstacle = only(pair.exporter)
        assert (obstacle.kind, obstacle.member, obstacle.owners) == ("lingering", 0, 2)
        views.clear()


@pytest.mark.filterwarnings("ignore::asyncvmm.OwnersOutstandingWarning")
async def test_ranks_that_never_came_are_unattached() -> None:
    route = asyncvmm.Broadcast(2)
    async with open_pair(slots=SLOTS, route=route, close_timeout=0.0) as pair:
        await fill(pair.exporter)
        for _ in range(SLOTS):
            (await pair.consumer.receive()).release()
        await until(lambda: len(pair.exporter.explain().obstacles) == 1)
        obstacle = only(pair.exporter)
        assert (obstacle.kind, obstacle.member, obstacle.owners) == ("unattached", 1, 2)
        assert obstacle.who == "rank 1"
        assert "connect" in obstacle.remedy


async def test_competitors_are_told_apart_by_what_they_have_taken() -> None:
    async with open_pair(slots=4, route=asyncvmm.Compete(), prefetch=1) as pair:
        await fill(pair.exporter)
        batch = await pair.consumer.receive()
        await until(lambda: len(pair.exporter.explain().obstacles) == 3)
        found = {each.kind: each for each in pair.exporter.explain().obstacles}
        assert {kind: each.owners for kind, each in found.items()} == {
            "held": 1,
            "untaken": 1,
            "unclaimed": 2,
        }
        assert found["unclaimed"].who == "no consumer"
        assert found["held"].who.startswith("'consumer-1' (pid ")
        batch.release()
        for _ in range(3):
            (await pair.consumer.receive()).release()


async def test_tickets_that_nobody_redeems_are_named() -> None:
    """Kills: an exported owner that is said to wait for a rank which is attached."""
    for route, who in ((asyncvmm.Broadcast(1), "rank 0"), (asyncvmm.Compete(), "a consumer")):
        async with open_pair(slots=SLOTS, route=route) as pair:
            exported = await pair.exporter.export(data(), key="k")
            obstacle = only(pair.exporter)
            assert (obstacle.kind, obstacle.oldest) == ("unredeemed", "k")
            assert obstacle.who.startswith(who)
            assert f"{obstacle.who} has yet to redeem the ticket of 1 owner" in str(obstacle)
            assert pair.exporter.cancel(exported["x"])


async def test_a_reservation_that_is_not_published_is_named() -> None:
    """Kills: a loan of this very process that shows in no explanation."""
    spec = {"x": asyncvmm.TensorSpec((5,), "int8")}
    async with open_pair(slots=1) as pair, pair.exporter.reserve(spec):
        obstacle = only(pair.exporter)
        assert (obstacle.kind, obstacle.who) == ("filling", "this process")
        assert obstacle.oldest is None
        assert obstacle.since > 0


async def test_work_of_the_device_is_named_after_whose_it_is() -> None:
    """Kills: a slot that drains under nobody's name, once its consumer has let go."""
    device = FakeDevice(hold_release=True)
    async with open_pair(slots=SLOTS, port=FakePort(device)) as pair:
        await fill(pair.exporter)
        for _ in range(SLOTS):
            with await pair.consumer.receive() as batch:
                batch[0]["x"]
            del batch
        await until(lambda: pair.exporter.statistics().slots.draining == SLOTS)
        obstacle = only(pair.exporter)
        assert (obstacle.kind, obstacle.member, obstacle.owners) == ("draining", 0, SLOTS)
        assert "kernels" in obstacle.remedy
        device.finish()
        await pair.exporter.drain()


async def test_what_was_given_up_while_the_device_writes_is_ours() -> None:
    device = FakeDevice(hold_ready=True)
    async with open_pair(slots=1, port=FakePort(device)) as pair:
        async with pair.exporter.reserve({"x": asyncvmm.TensorSpec((5,), "int8")}):
            pass
        obstacle = only(pair.exporter)
        assert (obstacle.kind, obstacle.who) == ("copying", "this process")
        device.finish()
        await until(lambda: pair.exporter.statistics().slots.free == 1)


@pytest.mark.filterwarnings("ignore::asyncvmm.OwnersOutstandingWarning")
async def test_a_fence_that_cannot_be_asked_is_named() -> None:
    device = FakeDevice(hold_release=True)
    async with open_pair(slots=1, port=FakePort(device), close_timeout=0.0) as pair:
        await fill(pair.exporter)
        with await pair.consumer.receive() as batch:
            batch[0]["x"]
        del batch
        (fence,) = device.pending("release")
        fence.fail(BackendError("gone"))
        await until(lambda: pair.exporter.statistics().slots.quarantined == 1)
        assert only(pair.exporter).kind == "broken"


# -- the line in the log --------------------------------------------------------------------------


async def test_one_line_for_one_cause_however_long_and_however_often(
    lines: list[Explanation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five looks at one waiter and ten waiters more make one line; another cause makes another.

    Kills: a line per look, a line per waiter, and a second cause that is swallowed with the first.
    """
    async with open_pair(slots=SLOTS, consumers=2, explain_after=0.0) as pair:
        exporter = pair.exporter
        looks: list[None] = []
        tell = exporter._room._late

        def count() -> None:
            looks.append(None)
            tell()

        monkeypatch.setattr(exporter._room, "_late", count)
        await fill(exporter)
        batches = [[await c.receive() for _ in range(SLOTS)] for c in pair.consumers]
        async with waiting(exporter):
            await until(lambda: len(looks) >= 5)
        assert len(lines) == 1
        assert lines[0].obstacles[0].member == 0
        for _ in range(10):
            looks.clear()
            async with waiting(exporter):
                await until(lambda: bool(looks))
        assert len(lines) == 1
        for batch in batches[0]:
            batch.release()
        await until(lambda: len(exporter.explain().obstacles) == 1)
        async with waiting(exporter):
            await until(lambda: len(lines) == 2)
        assert lines[1].obstacles[0].member == 1
        for batch in batches[1]:
            batch.release()


async def test_a_cause_is_told_again_after_it_was_not_seen_for_long(
    lines: list[Explanation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: an exporter that is silent the second night because it spoke the first."""
    now = 1000.0
    monkeypatch.setattr(_logs, "monotonic", lambda: now)
    async with open_pair(slots=1, explain_after=math.inf) as pair:
        telling = explaining.Telling("x", pair.exporter.explain)
        for at in (0, 59, 118, 178, 238.1):
            now = 1000 + at
            telling.tell()
        assert len(lines) == 2


async def test_a_send_that_does_not_wait_makes_no_timer() -> None:
    """Kills: a timer per send, or one that ticks while nobody waits."""
    async with open_pair(slots=SLOTS, explain_after=0.0) as pair:
        await fill(pair.exporter)
        assert not ticking(pair.exporter)
        async with waiting(pair.exporter):
            assert ticking(pair.exporter)
        await until(lambda: not ticking(pair.exporter))
        for _ in range(SLOTS):
            (await pair.consumer.receive()).release()


async def test_waiters_are_explained_by_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a timer for each waiter, and a waiter that came while it ran told too early."""
    late = 0

    def count() -> None:
        nonlocal late
        late += 1

    room = Room(lambda sizes: False, lambda sizes: None, count, 3600.0)
    loop = asyncio.get_running_loop()
    made: list[float] = []
    real = loop.call_later

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        def call_later(self, delay: float, *rest: Any) -> Any:
            made.append(delay)
            return real(delay, *rest)

    monkeypatch.setattr(asyncio, "get_running_loop", lambda: Counting())
    tasks = [loop.create_task(room.turn(1)) for _ in range(5)]
    await asyncio.sleep(0)
    assert made == [3600.0]
    room._look()
    assert late == 0
    assert len(made) == 2
    assert 3500 < made[1] <= 3600
    room.close(asyncvmm.ClosedError("closed"))
    assert all(
        isinstance(e, asyncvmm.ClosedError)
        for e in await asyncio.gather(*tasks, return_exceptions=True)
    )


async def test_bad_patience_is_refused() -> None:
    with pytest.raises(asyncvmm.ArgumentError, match="explain_after"):
        asyncvmm.open_exporter("x", explain_after=-1)


# -- consumers in other processes -----------------------------------------------------------------


@pytest.mark.slow
async def test_a_stopped_consumer_is_named_within_a_second(
    peers: Peers, lines: list[Explanation]
) -> None:
    """By the log line, with the default patience, and by ``explain()``."""
    async with asyncvmm.open_exporter(
        "pool", device="cpu", slots=SLOTS, pool_bytes="64KiB", route=asyncvmm.Broadcast(2)
    ) as exporter:
        stopped, other = peers.start(), peers.start()
        await stopped.call(steps.connect, "pool", 0)
        await other.call(steps.connect, "pool", 1)
        stopped.stop()
        for owner in range(SLOTS):
            await exporter.send(data(), key=owner, require="none")
        await other.call(steps.drop, SLOTS)
        async with waiting(exporter), asyncio.timeout(PROMPTLY):
            await until(lambda: bool(lines))
        for explanation in (lines[0], exporter.explain()):
            (obstacle,) = explanation.obstacles
            assert (obstacle.kind, obstacle.member, obstacle.pid) == ("held", 0, stopped.pid)
            assert f"rank 0 (pid {stopped.pid}) holds 2 owners" in str(explanation)
        await stopped.killed()


@pytest.mark.slow
async def test_a_lost_connection_is_named_as_quarantine(peers: Peers) -> None:
    async with asyncvmm.open_exporter(
        "pool", device="cpu", slots=SLOTS, pool_bytes="64KiB"
    ) as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "pool", 0)
        await exporter.send(features(0, 0, 99), key=0, metadata=note(0, 0, 99), require="none")
        await peer.call(steps.take, 1)
        await peer.call(steps.close_socket)
        await until(lambda: exporter.statistics().slots.quarantined == 1)
        obstacle = only(exporter)
        assert (obstacle.kind, obstacle.member, obstacle.pid) == ("quarantined", 0, peer.pid)
        await peer.killed()
