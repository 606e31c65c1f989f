"""Whoever waits for more and keeps the last batch in a variable is told, once."""

from __future__ import annotations

import asyncio

import pytest
import torch

import asyncvmm
from asyncvmm._consumer import pinned
from asyncvmm._consumer.leases import Leases
from asyncvmm.testing import open_pair
from tests.api.books import until
from tests.patience import PROMPTLY


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "PATIENCE", 0.01)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the consumer's log said."""
    return [r.getMessage() for r in caplog.records if r.name == "asyncvmm.consumer"]


def looking(looks: pinned.Pinned) -> bool:
    """Say whether another look is planned."""
    return looks._timer is not None


async def take(consumer: asyncvmm.Consumer) -> torch.Tensor:
    """Receive an owner, release it, and keep a view of it."""
    with (await consumer.receive())[0] as owner:
        return owner["x"]


async def test_a_view_in_a_variable_is_named_where_the_variable_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kills the planted bug of two sides that wait for each other, for ever and in silence."""
    async with open_pair() as pair:
        acks = [await pair.exporter.send({"x": torch.ones(8)}, key=f"k{n}") for n in range(2)]
        views = [await take(pair.consumer) for _ in range(2)]
        waiting = asyncio.create_task(pair.consumer.receive())
        await until(lambda: bool(said(caplog)))
        assert "keep 2 owners that were released ('k0', 'k1')" in said(caplog)[0]
        assert not acks[0].done()
        views.clear()
        for ack in acks:
            await ack
        await pair.exporter.send({"x": torch.ones(8)}, key="next")
        (await waiting).release()
    assert len(said(caplog)) == 1


async def test_a_release_in_another_thread_is_seen_too(caplog: pytest.LogCaptureFixture) -> None:
    """Kills the planted bug of a facade without async whose users wait in silence."""
    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": torch.ones(8)}, key="k")
        owner = (await pair.consumer.receive())[0]
        view = owner["x"]
        await asyncio.to_thread(owner.release)
        waiting = asyncio.create_task(pair.consumer.receive())
        await until(lambda: bool(said(caplog)))
        del view
        await ack
        await pair.exporter.send({"x": torch.ones(8)})
        (await waiting).release()


async def test_nothing_is_said_of_a_program_that_is_busy(caplog: pytest.LogCaptureFixture) -> None:
    """Kills the planted bug of a warning to who keeps a view because it still works on it."""
    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": torch.ones(8)})
        view = await take(pair.consumer)
        looks = pair.consumer._leases.pinned
        for _ in range(3):  # looks, and no call of receive() meanwhile
            timer = looks._timer
            await until(lambda timer=timer: looks._timer is not timer)  # type: ignore[misc]  # bound now
        assert said(caplog) == []
        del view
        await ack


async def test_looking_ends_with_the_views_and_with_the_consumer() -> None:
    """Kills the planted bug of a timer that goes on for as long as the loop."""
    async with open_pair() as pair:
        looks = pair.consumer._leases.pinned
        ack = await pair.exporter.send({"x": torch.ones(8)})
        view = await take(pair.consumer)
        assert looking(looks)
        del view
        await ack
        await until(lambda: not looking(looks))
        await pair.exporter.send({"x": torch.ones(8)})
        view = await take(pair.consumer)
        assert looking(looks)
        await pair.consumer.aclose()
        assert not looking(looks)
        del view


async def test_an_owner_whose_last_word_was_cut_short_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by what a signal's handler raises while a view is destroyed, which Python drops.

    Kills the planted bug of an owner that nobody gives back any more.
    """
    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": torch.ones(4)})
        batch = await pair.consumer.receive()
        view = batch[0]["x"]
        batch.release()
        with monkeypatch.context() as patch:
            patch.setattr(Leases, "settle_later", lambda *_: None)
            del view
        assert not ack.done()
        async with asyncio.timeout(PROMPTLY):
            assert (await ack).complete
