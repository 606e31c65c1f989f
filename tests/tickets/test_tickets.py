"""Tickets between two ends in one loop; other processes are in the other files here."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch

import asyncvmm
from asyncvmm.testing import open_pair

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
