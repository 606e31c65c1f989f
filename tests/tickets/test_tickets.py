"""Tickets between two ends in one loop; other processes are in the other files here."""

from __future__ import annotations

import asyncio
import os
import pickle
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import torch

import asyncvmm
from asyncvmm.testing import open_pair
from asyncvmm.tickets import FeatureItem, FeatureRequest, FeatureTransport, restore_features
from tests.api.books import until

A = torch.arange(10, dtype=torch.float32)
B = torch.arange(12, dtype=torch.int64).view(3, 4)


async def test_one_copy_serves_all_features_of_an_owner() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export({"a": A, "b": B}, key="r")
        assert pair.exporter.statistics().owners[0].waiting_for == (0,)
        a = await pair.consumer.reconstruct(tickets["a"])
        assert torch.equal(a, A)
        outcome = await tickets.acknowledgement
        assert outcome.released == (0,)
        b = await pair.consumer.reconstruct(tickets["b"])
        assert torch.equal(b, B)
        assert b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        assert await pair.consumer.reconstruct(tickets["a"]) is a
        assert pair.exporter.statistics().slots.free == 16


class Text(str):
    """Text that msgspec does not write, as numpy's is."""


class Number(int):
    """A number that msgspec does not write."""


@pytest.mark.parametrize("key", [Text("r-1"), Number(7)])
async def test_names_of_a_subclass_of_text_travel_as_text(key: str | int) -> None:
    """Kills: a request id out of a numpy array is refused as "a str_ message", or by the rank."""
    name = Text("named by no other test")
    async with open_pair() as pair:
        acks = await pair.exporter.send_all([{name: A}], keys=[key])
        async with await pair.consumer.receive() as batch:
            (owner,) = batch
            assert (type(owner.key), owner.key) == (type(key).__base__, key)
            assert list(owner) == [name]
        assert (await acks[0]).released == (0,)
        tickets = await pair.exporter.export({name: A}, key=key)
        assert torch.equal(await pair.consumer.reconstruct(tickets[name]), A)
        assert type(pickle.loads(pickle.dumps(tickets))[name].owner.key) is type(key).__base__


async def test_a_seat_may_be_of_a_subclass_too() -> None:
    """Kills: "a Hello message cannot be written" for a name that came out of a numpy array."""
    asyncvmm.connect("nobody-here", member=Text("worker"))
    asyncvmm.connect("nobody-here", rank=Number(0))


@pytest.mark.parametrize("way", ["pickle", "msgpack"])
async def test_tickets_are_plain_data(way: str) -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export({"a": A, "b": B})
        if way == "pickle":
            found = pickle.loads(pickle.dumps(tickets))
            assert type(found) is dict
        else:
            data = msgspec.msgpack.encode(dict(tickets))
            found = msgspec.msgpack.decode(data, type=dict[str, asyncvmm.Ticket])
        assert found == dict(tickets)
        assert torch.equal(await pair.consumer.reconstruct(found["b"]), B)
        await tickets.acknowledgement


async def test_the_timeline_of_a_consumer_shows_what_it_redeemed(tmp_path: Path) -> None:
    """Kills: an owner that is redeemed and not begun in the trace, or put back and not ended."""
    path = tmp_path / "trace.json"
    name = f"@asyncvmm-traced-{os.getpid()}"
    async with (
        asyncvmm.open_exporter(name, device="cpu", pool_bytes="1MiB") as exporter,
        asyncvmm.connect(name, device="cpu", rank=0, trace=path) as consumer,
    ):
        tickets = await exporter.export({"a": A}, key="borrowed and put back")
        task = asyncio.get_running_loop().create_task(consumer.borrow(tickets["a"]))
        await until(lambda: bool(consumer._core.asked))
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not consumer._core.asked)
        await consumer.reconstruct(tickets["a"])
        await tickets.acknowledgement
    data = await asyncio.to_thread(path.read_bytes)
    assert b"put back" in data
    assert b'"released"' in data


async def test_tickets_go_through_a_consumer_that_reconnects() -> None:
    name = f"@asyncvmm-again-{os.getpid()}"
    void: list[asyncvmm.Ticket] = []
    async with AsyncExitStack() as stack:
        for number in range(2):
            async with asyncvmm.open_exporter(name, device="cpu", pool_bytes="1MiB") as exporter:
                if not number:
                    consumer = await stack.enter_async_context(
                        asyncvmm.connect(name, device="cpu", rank=0, reconnect=True)
                    )
                for ticket in void:
                    with pytest.raises(asyncvmm.LostTicketError):
                        await consumer.reconstruct(ticket)
                await exporter.send({"a": A}, key=number)
                with await consumer.receive() as batch:
                    assert batch[0].key == number
                for ticket in void:
                    with pytest.raises(asyncvmm.ForeignTicketError):
                        await consumer.reconstruct(ticket)
                tickets = await exporter.export({"a": A, "b": B})
                owner = await consumer.borrow(tickets.owner)
                assert torch.equal(owner["b"], B)
                owner.release()
                other = await exporter.export({"a": A})
                consumer.acknowledge(other["a"])
                requests = [FeatureRequest([FeatureItem("image", A), FeatureItem("image", B)])]
                async with FeatureTransport(exporter) as transport:
                    await transport.prepare_for_dispatch(requests)
                await restore_features(consumer, requests)
                assert torch.equal(requests[0].items[1].feature, B)
                await exporter.drain()
                void = [tickets["a"]]


async def test_a_consumer_whose_link_broke_gives_back_and_redeems_no_more() -> None:
    """Kills: a ticket that is shown on a link that is only there to give back."""
    async with open_pair(consumers=2) as pair:
        lost, other = pair.consumers
        held, unread = [await pair.exporter.export({"a": A}, require="any") for _ in range(2)]
        owner = await lost.borrow(held["a"])
        view = owner["a"]
        lost._link.abort()
        lost._on_end(None)
        for _ in range(2):
            with pytest.raises(asyncvmm.LostTicketError):
                await lost.reconstruct(unread["a"])
            await until(lambda: not lost._core.resumable)
        for tickets in (held, unread):
            await other.reconstruct(tickets["a"])
        assert torch.equal(view, A)
        del view
        owner.release()
        assert sorted((await held.acknowledgement).released) == [0, 1]
        outcome = await unread.acknowledgement
        assert (outcome.released, [member for member, _ in outcome.refused]) == ((1,), [0])
