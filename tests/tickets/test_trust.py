"""A ticket is data that anybody may have written: at worst it is refused, and nothing else ends."""

from __future__ import annotations

import asyncio
import io
import pickle
from typing import Any

import msgspec
import pytest
import torch

import asyncvmm
from asyncvmm import (
    ArgumentError,
    Broadcast,
    Compete,
    ForeignTicketError,
    OwnerTicket,
    RefusedTicketError,
    StaleTicketError,
    Ticket,
    TicketError,
)
from asyncvmm.testing import open_pair
from tests.api.books import check_all_back, check_books, until

X = torch.arange(100, dtype=torch.float32)


async def made(exporter: asyncvmm.Exporter) -> Ticket:
    """Export two features; return the ticket of the first."""
    return (await exporter.export({"x": X, "y": X}))["x"]


def altered(ticket: Ticket, **changes: Any) -> Ticket:
    """Return a ticket with some fields changed, of itself or of its owner."""
    own = {name: changes.pop(name) for name in list(changes) if name in Ticket.__struct_fields__}
    owner = msgspec.structs.replace(ticket.owner, **changes)
    return msgspec.structs.replace(ticket, owner=owner, **own)


async def test_unpickling_a_ticket_makes_a_plain_object_and_runs_nothing_else() -> None:
    async with open_pair() as pair:
        ticket = await made(pair.exporter)
        found: set[str] = set()

        class Noting(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                found.add(f"{module}.{name}")
                return super().find_class(module, name)

        assert Noting(io.BytesIO(pickle.dumps(ticket))).load() == ticket
        assert found == {"asyncvmm._ticket.Ticket", "asyncvmm._ticket.OwnerTicket"}
        for kind in (Ticket, OwnerTicket):
            for hook in ("__init__", "__new__", "__setstate__", "__post_init__"):
                assert hook not in vars(kind), f"{kind.__name__}.{hook} would run"
        with pytest.raises(AttributeError):
            ticket.index = 3  # type: ignore[misc]  # it is frozen
        assert "p" * 3 not in repr(ticket)
        assert repr(ticket.owner.proof)[2:-1] not in repr(ticket), "the proof is not for logs"
        pair.exporter.cancel(ticket)


FORGED: dict[str, dict[str, Any]] = {
    "slot": {"slot": 3},
    "huge slot": {"slot": 2**62},
    "generation": {"generation": 7},
    "generation 0": {"generation": 0},
    "proof": {"proof": b"x" * 16},
    "no proof": {"proof": b"\0" * 16},
}
MALFORMED: dict[str, dict[str, Any]] = {
    "negative slot": {"slot": -1},
    "slot too huge": {"slot": 2**80},
    "text slot": {"slot": "0"},
    "short proof": {"proof": b"x"},
    "text proof": {"proof": "x" * 16},
    "exporter": {"exporter": 3},
    "members": {"members": None},
    "index": {"index": -1},
    "shape": {"shape": "abc"},
    "nested": {"key": [[[]]]},
    "object": {"key": object()},
}


@pytest.mark.parametrize("what", [*FORGED, *MALFORMED])
async def test_a_forged_ticket_is_refused_and_everything_goes_on(what: str) -> None:
    """Kills: a proof that is not looked at; a link that ends for what a ticket said."""
    async with open_pair() as pair:
        ticket = await made(pair.exporter)
        forged = altered(ticket, **(FORGED.get(what) or MALFORMED[what]))
        reason = "forged" if what in FORGED else "malformed"
        for work in (pair.consumer.reconstruct, pair.consumer.borrow):
            with pytest.raises(RefusedTicketError) as caught:
                await work(forged)
            assert caught.value.reason == reason
        if what in FORGED:
            pair.consumer.acknowledge(forged.owner)
            await until(lambda: pair.exporter.statistics().consumers[0].stale == 1)
            assert not pair.exporter.cancel(forged)
        else:
            with pytest.raises(RefusedTicketError):
                pair.consumer.acknowledge(forged if what in ("index", "shape") else forged.owner)
            if what not in ("index", "shape"):
                with pytest.raises(RefusedTicketError):
                    pair.exporter.cancel(forged)
        assert check_books(pair.exporter).owners[0].waiting_for == (0,)
        assert torch.equal(await pair.consumer.reconstruct(ticket), X)
        await pair.exporter.drain()
        check_all_back(pair.exporter)


async def test_a_guessed_proof_finds_no_copy_that_was_made_for_another_ticket() -> None:
    """Kills: copies that are found by slot and generation, which anybody can count."""
    async with open_pair() as pair:
        ticket = await made(pair.exporter)
        copy = await pair.consumer.reconstruct(ticket)
        guess = altered(ticket, proof=b"x" * 16)
        with pytest.raises(TicketError):
            await pair.consumer.reconstruct(guess)
        await pair.exporter.drain()
        with pytest.raises(TicketError):
            await pair.consumer.reconstruct(guess)
        assert await pair.consumer.reconstruct(ticket) is copy


@pytest.mark.parametrize("first", ["genuine", "forged"])
async def test_a_forged_ticket_shown_meanwhile_changes_nothing_for_the_genuine_one(
    first: str,
) -> None:
    """Kills: one question for both, so that the answer to the one is that to the other."""
    async with open_pair() as pair:
        ticket = await made(pair.exporter)
        guess = altered(ticket, proof=b"x" * 16)
        shown = [ticket, guess] if first == "genuine" else [guess, ticket]
        tasks = [asyncio.ensure_future(pair.consumer.reconstruct(each)) for each in shown * 2]
        await asyncio.wait(tasks)
        good, bad = (tasks[::2], tasks[1::2]) if first == "genuine" else (tasks[1::2], tasks[::2])
        assert good[0].result() is good[1].result()
        assert torch.equal(good[0].result(), X)
        assert all(isinstance(task.exception(), TicketError) for task in bad)
        assert pair.consumer.statistics().state == "open", "both questions had an answer"
        await pair.exporter.drain()
        check_all_back(pair.exporter)


@pytest.mark.parametrize(
    "changes",
    [{"index": 1}, {"index": 2**62}, {"feature": "y"}, {"dtype": "int32"}, {"shape": (50, 4)}],
)
async def test_a_ticket_for_a_feature_that_its_owner_lacks_is_refused(
    changes: dict[str, Any],
) -> None:
    """Kills: an index that reads past the owner; bytes shown as another dtype or shape."""
    async with open_pair() as pair:
        ticket = await made(pair.exporter)
        with pytest.raises(RefusedTicketError, match="does not have") as caught:
            await pair.consumer.reconstruct(altered(ticket, **changes))
        assert caught.value.reason == "forged"
        assert torch.equal(await pair.consumer.reconstruct(ticket), X), "the copy is there"
        await pair.exporter.drain()


@pytest.mark.parametrize("value", [None, 1, "ticket", (), {"x": 1}])
async def test_what_is_no_ticket_is_an_argument_error(value: Any) -> None:
    async with open_pair() as pair:
        for work in (pair.consumer.reconstruct, pair.consumer.borrow):
            with pytest.raises(ArgumentError):
                await work(value)
        for call in (pair.consumer.acknowledge, pair.exporter.cancel):
            with pytest.raises(ArgumentError):
                call(value)


async def test_a_ticket_of_another_pool_is_a_typed_error_on_both_sides() -> None:
    async with open_pair() as pair, open_pair() as other:
        ticket = await made(other.exporter)
        with pytest.raises(ForeignTicketError) as caught:
            await pair.consumer.reconstruct(ticket)
        assert caught.value.made_by == other.exporter.name
        assert caught.value.attached_to == pair.exporter.name
        for call in (pair.consumer.acknowledge, pair.exporter.cancel):
            with pytest.raises(ForeignTicketError):
                call(ticket.owner)
        assert other.exporter.cancel(ticket)


async def test_a_stale_generation_is_a_typed_error() -> None:
    async with open_pair(slots=1) as pair:
        old = await made(pair.exporter)
        pair.exporter.cancel(old)
        new = await made(pair.exporter)
        assert new.owner.slot == old.owner.slot
        with pytest.raises(StaleTicketError) as caught:
            await pair.consumer.reconstruct(old)
        assert (caught.value.slot, caught.value.generation) == (0, 1)
        assert not pair.exporter.cancel(old)
        pair.consumer.acknowledge(old.owner)
        assert torch.equal(await pair.consumer.reconstruct(new), X), "the new one is untouched"
        await pair.exporter.drain()


async def test_every_ticket_error_is_one_and_survives_a_process_pool() -> None:
    errors: list[TicketError] = [
        ForeignTicketError("a", "b"),
        StaleTicketError(1, 2),
        RefusedTicketError("no", reason="forged"),
        asyncvmm.BorrowedTicketError("x"),
        asyncvmm.ReleasedTicketError("x"),
        asyncvmm.LostTicketError("x", peer="exporter"),
        asyncvmm.PackedReleaseError(),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


async def test_a_ticket_for_other_ranks_is_refused() -> None:
    async with open_pair(consumers=2, route=Broadcast(2)) as pair:
        tickets = await pair.exporter.export({"x": X}, to=1)
        with pytest.raises(RefusedTicketError) as caught:
            await pair.consumers[0].reconstruct(tickets["x"])
        assert caught.value.reason == "not_addressed"
        await pair.consumers[1].reconstruct(tickets["x"])
        assert (await tickets.acknowledgement).released == (1,)


async def test_under_compete_the_first_to_redeem_has_it() -> None:
    async with open_pair(consumers=2, route=Compete()) as pair:
        tickets = await pair.exporter.export({"x": X})
        assert torch.equal(await pair.consumers[1].reconstruct(tickets["x"]), X)
        with pytest.raises(TicketError):
            await pair.consumers[0].reconstruct(tickets["x"])
        assert len((await tickets.acknowledgement).released) == 1
        tickets = await pair.exporter.export({"x": X})
        with pytest.raises(ArgumentError, match="competes"):
            pair.consumer.acknowledge(tickets["x"], count=2)
        pair.consumer.acknowledge(tickets["x"])
        await tickets.acknowledgement
        check_all_back(pair.exporter)


async def test_borrowing_gives_an_owner_as_streamed_ones_are() -> None:
    async with open_pair() as pair:
        tickets = await pair.exporter.export({"x": X, "y": X}, key="k", metadata={"n": 1})
        with await pair.consumer.borrow(tickets["y"]) as owner:
            assert (owner.key, owner.metadata, list(owner)) == ("k", {"n": 1}, ["x", "y"])
            view = owner["x"]
            low = pair.consumer._region.address
            assert low <= view.data_ptr() < low + (1 << 20), "no byte was copied"
            with pytest.raises(asyncvmm.BorrowedTicketError):
                await pair.consumer.borrow(tickets["x"])
            with pytest.raises(asyncvmm.BorrowedTicketError):
                await pair.consumer.reconstruct(tickets["x"])
        assert not tickets.acknowledgement.done(), "a view is alive"
        del view
        assert (await tickets.acknowledgement).released == (0,)
        with pytest.raises(TicketError):
            await pair.consumer.borrow(tickets["x"])
