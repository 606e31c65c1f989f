"""Bad input: refused at once, with what was given, what is allowed and what to do; nothing lost."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import os
import pickle
import re
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import asyncvmm
from asyncvmm import ArgumentError, Broadcast, Group, InvalidTensorError, TensorSpec
from asyncvmm._core import wire
from asyncvmm._tensors.cuda import CudaPort
from asyncvmm.testing import Pair, open_pair
from asyncvmm.tickets import FeatureTransport
from tests.api import steps as own_steps
from tests.api.books import check_all_back, check_books, passes, until
from tests.process import steps
from tests.process.harness import Peers
from tests.process.raw import RawConsumer

ONE = {"x": torch.ones(3)}


@dataclass(frozen=True)
class Keyed:
    """Can be written as the key of a map, and not be read as one."""

    number: int


def words(error: BaseException, *expected: str) -> None:
    """Check that an error's text says all of that."""
    for each in expected:
        assert each in str(error), str(error)


# -- opening and connecting: in the constructor, before anything is touched ----------------------

OPENING: list[tuple[dict[str, Any], list[str]]] = [
    ({"device": "gpu:1"}, ["'gpu:1'", "'cpu'", "'cuda:N'"]),
    ({"device": "cuda:"}, ["'cuda:'", "'auto'"]),
    ({"device": 0}, ["device=0", "'auto'"]),
    ({"pool_bytes": "12QiB"}, ["'12QiB'", "'64MiB'"]),
    ({"pool_bytes": "1 000"}, ["'1 000'", "'64MiB'"]),
    ({"pool_bytes": "MiB"}, ["'MiB'"]),
    ({"pool_bytes": "nan"}, ["'nan'"]),
    ({"pool_bytes": "inf"}, ["'inf'"]),
    ({"pool_bytes": "-1MiB"}, ["at least 1 byte"]),
    ({"pool_bytes": 0}, ["pool_bytes=0", "at least 1 byte"]),
    ({"pool_bytes": -5}, ["pool_bytes=-5", "at least 1 byte"]),
    ({"pool_bytes": 1.5}, ["1.5", "int"]),
    ({"pool_bytes": True}, ["True", "int"]),
    ({"pool_bytes": None}, ["None", "int"]),
    ({"max_pool_bytes": "1KiB"}, ["1,024", "leave it out"]),
    ({"max_pool_bytes": "x"}, ["max_pool_bytes='x'"]),
    ({"slots": 0}, ["slots=0", "1 to 1,024"]),
    ({"slots": 1025}, ["slots=1025", "1 to 1,024", "4,096"]),
    ({"slots": -1}, ["slots=-1"]),
    ({"slots": 8.0}, ["slots=8.0", "int"]),
    ({"slots": True}, ["slots=True", "int"]),
    ({"route": "broadcast"}, ["'broadcast'", "Broadcast(consumer_count)", "Compete()"]),
    ({"route": Broadcast}, ["Broadcast(consumer_count)"]),
    ({"route": None}, ["None", "Compete()"]),
    ({"shrink_after": -1}, ["shrink_after=-1", "0 or more"]),
    ({"shrink_after": math.nan}, ["shrink_after=nan", "0 or more"]),
    ({"shrink_after": "soon"}, ["shrink_after='soon'", "seconds"]),
    ({"close_timeout": None}, ["close_timeout=None", "math.inf"]),
    ({"close_timeout": -0.1}, ["close_timeout=-0.1"]),
    ({"secret": 5}, ["int", "text or bytes"]),
    ({"secret": "x" * 1025}, ["1,025", "1,024"]),
    ({"allow_uids": "root"}, ["'root'", "numbers"]),
    ({"allow_uids": [0, "root"]}, ["'root'", "pwd"]),
    ({"allow_gids": [-1]}, ["allow_gids=[-1]", "numbers"]),
    ({"handle_type": "memfd"}, ["'memfd'", "'fabric'", "'posix'"]),
    ({"secret": "\ud800"}, ["surrogates"]),
    ({"writable": "no"}, ["writable='no'", "True or False"]),
    ({"debug": 1}, ["debug=1", "True or False"]),
    ({"trace": ""}, ["trace=''", "file or folder"]),
    ({"trace": 5}, ["trace=5", "file or folder"]),
    ({"trace": b"x.json"}, ["b'x.json'", "file or folder"]),
    ({"trace": "a\0b"}, ["NUL"]),
]

CONNECTING: list[tuple[dict[str, Any], list[str]]] = [
    ({"device": "gpu"}, ["'gpu'", "'cpu'"]),
    ({"rank": -1}, ["rank=-1", "0 or more"]),
    ({"rank": "0"}, ["rank='0'", "int"]),
    ({"rank": True}, ["rank=True", "int"]),
    ({"rank": 2**70}, ["64 bits"]),
    ({"prefetch": 0}, ["prefetch=0", "1 to 65,536"]),
    ({"prefetch": 65537}, ["prefetch=65537", "1 to 65,536"]),
    ({"member": 5}, ["member=5", "1,024"]),
    ({"member": ""}, ["member=''", "1 to"]),
    ({"member": "x" * 1025}, ["1,024"]),
    ({"member": "\ud800"}, ["surrogates"]),
    ({"secret": None}, ["NoneType", "text or bytes"]),
    ({"secret": "\ud800"}, ["surrogates"]),
    ({"trace": 5}, ["trace=5", "file or folder"]),
    ({"writable": "no"}, ["writable='no'", "True or False"]),
    ({"wait": "no"}, ["wait='no'", "True or False"]),
    ({"reconnect": 1}, ["reconnect=1", "True or False"]),
]

NAMES: list[tuple[Any, list[str]]] = [
    ("", ["''", "non-empty"]),
    ("a b", ["'a b'", "A-Z"]),
    ("..", ["'..'", "slash"]),
    ("folder/", ["'folder/'", "file"]),
    ("@", ["'@'", "2 to 107"]),
    ("@" + "x" * 107, ["108", "2 to 107"]),
    ("x" * 201, ["1 to 200"]),
    ("a\0b", ["NUL"]),
    (b"bytes", ["b'bytes'", "str or path"]),
    (None, ["None", "str or path"]),
    (5, ["5", "str or path"]),
]


def by_name(case: object) -> str:
    """Return a name that is the same in every run: without addresses."""
    return re.sub(r" at 0x\w+", "", repr(case))[:40] if not isinstance(case, list) else ""


@pytest.mark.parametrize(("options", "said"), OPENING, ids=by_name)
def test_open_exporter_refuses(options: dict[str, Any], said: list[str]) -> None:
    """Kills: an argument that is looked at only when it is used, or not at all."""
    with pytest.raises(ArgumentError) as caught:
        asyncvmm.open_exporter("@bad", **{"pool_bytes": "1MiB", **options})
    words(caught.value, *said)


@pytest.mark.parametrize(("options", "said"), CONNECTING, ids=by_name)
def test_connect_refuses(options: dict[str, Any], said: list[str]) -> None:
    """Kills: an argument of which the exporter is the first to hear."""
    with pytest.raises(ArgumentError) as caught:
        asyncvmm.connect("@bad", **options)
    words(caught.value, *said)


@pytest.mark.parametrize(("name", "said"), NAMES, ids=by_name)
def test_names_are_refused_on_both_ends(name: Any, said: list[str]) -> None:
    """Kills: a name that one end takes and the other does not."""
    for make in (asyncvmm.open_exporter, asyncvmm.connect):
        with pytest.raises(ArgumentError) as caught:
            make(name)
        words(caught.value, *said)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Broadcast(0), ["0", "at least 1"]),
        (lambda: Broadcast(-3), ["-3", "at least 1"]),
        (lambda: Broadcast("2"), ["'2'", "int"]),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Broadcast(True), ["True", "int"]),
        (lambda: Group(), ["at least one rank"]),
        (lambda: Group(-1), ["-1", "0 or more"]),
        (lambda: Group([0, 1]), ["[0, 1]", "int"]),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: TensorSpec((-1,), "int8"), ["(-1,)", "0 or more"]),
        (lambda: TensorSpec((1.5,), "int8"), ["(1.5,)", "ints"]),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: TensorSpec(5, "int8"), ["5", "tuple of ints"]),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: TensorSpec("12", "int8"), ["'12'", "tuple of ints"]),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_plain_data_refuses(make: Callable[[], object], said: list[str]) -> None:
    """Kills: a route, a group or a shape that fails only where it is used."""
    with pytest.raises(ArgumentError) as caught:
        make()
    words(caught.value, *said)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"device": "cuda:0"}, asyncvmm.BackendError, ["'cuda:0'", "device='cpu'"]),
        ({"handle_type": "posix"}, ArgumentError, ["'posix'", "GPU"]),
        ({"pool_bytes": 2**50}, asyncvmm.PoolMemoryError, [f"{2**50:,}", "make room"]),
        ({"max_pool_bytes": 2**62}, asyncvmm.BackendError, ["mmap", "ENOMEM"]),
    ],
    ids=by_name,
)
async def test_what_this_machine_lacks_is_said_on_entering(
    options: dict[str, Any], kind: type[asyncvmm.AsyncVMMError], said: list[str]
) -> None:
    """And the name is free afterwards.

    Kills: a half-made exporter that keeps something.
    """
    if "device" in options and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(kind) as caught:
        await asyncvmm.open_exporter(
            "@lacks", **{"device": "cpu", "pool_bytes": "1MiB", **options}
        ).__aenter__()
    words(caught.value, *said)
    if isinstance(caught.value, asyncvmm.PoolMemoryError):
        assert caught.value.asked == 2**50
        assert 0 < caught.value.available < 2**50
        assert caught.value.where in str(caught.value)
    async with open_pair(name="@lacks"):
        pass


async def test_an_opening_can_be_entered_once() -> None:
    """Kills: two exporters, or two consumers, out of one."""
    opening = asyncvmm.open_exporter("@once", device="cpu", pool_bytes="64KiB")
    async with opening:
        connecting = asyncvmm.connect("@once", device="cpu", rank=0)
        async with connecting:
            for each in (opening, connecting):
                with pytest.raises(asyncvmm.LocalProtocolError, match="once"):
                    await each.__aenter__()


# -- sending and reserving -----------------------------------------------------------------------


class Refuses(torch.Tensor):
    """A tensor whose copy raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.copy_, torch.Tensor.detach):
            raise ZeroDivisionError("the copy went wrong")
        return super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]  # torch's


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def without_storage(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


TENSORS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "meta": (lambda: torch.empty(3, device="meta"), ["meta device", "materialise"]),
    "fake": (fake, ["no memory", "materialise"]),
    "without storage": (lambda: without_storage(torch.ones(9)), ["no memory", "resized to 0"]),
    "without storage, strided": (lambda: without_storage(torch.ones(3, 4).t()), ["no memory"]),
    "without storage, large": (lambda: without_storage(torch.ones(500_000)), ["no memory"]),
    "list": (lambda: [1.0, 2.0], ["list", "torch.as_tensor"]),
    "numpy": (lambda: torch.ones(3).numpy(), ["ndarray", "torch.as_tensor"]),
    "number": (lambda: 5, ["int", "torch.as_tensor"]),
    "None": (lambda: None, ["NoneType"]),
    "a spec": (lambda: TensorSpec((3,), torch.float32), ["TensorSpec", "torch.Tensor"]),
    "sparse": (lambda: torch.eye(3).to_sparse(), ["sparse_coo", "to_dense"]),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), ["sparse_csr", "to_dense"]),
    "quantised": (quantised, ["qint8", "parts"]),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ["nested"]),
    "too long": (lambda: torch.empty(0, 2**62 + 1), ["strides"]),
    "refuses": (lambda: torch.ones(4, 5).t().as_subclass(Refuses), ["the copy went wrong"]),
}


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let torch warn of its prototypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


async def do(attempt: Callable[[], Any]) -> None:
    """Do something that may have to be awaited."""
    result = attempt()
    if asyncio.iscoroutine(result):
        await result


async def unchanged(pair: Pair, attempt: Callable[[], Any], kind: type[BaseException]) -> Any:
    """Check that an attempt raises that and changes nothing; return the error."""
    before = check_books(pair.exporter)
    with pytest.raises(kind) as caught:
        await do(attempt)
    after = check_books(pair.exporter)
    assert after.slots == before.slots
    assert (after.published, after.copies, after.gaps) == (
        before.published, before.copies, before.gaps,
    )  # fmt: skip
    assert after.used_bytes == before.used_bytes
    return caught.value


async def still_serves(pair: Pair) -> None:
    """Show that what was refused did no harm, and that nobody saw any of it."""
    await pair.exporter.send(ONE, key="after")
    async with await pair.consumer.receive() as batch:
        assert batch[0].key == "after"
        assert torch.equal(batch[0]["x"], ONE["x"])
    await pair.exporter.drain()
    check_all_back(pair.exporter)


@pytest.mark.parametrize("what", TENSORS)
@pytest.mark.usefixtures("quiet")
async def test_a_tensor_that_cannot_be_shared_is_refused_by_name(what: str) -> None:
    """As the fourth of five: all or nothing (inv. 13, field report 9).

    Kills: a refusal that does not say which tensor, one after the first three were copied that
    keeps the chunk, and a tensor without memory that ends the process.
    """
    make, said = TENSORS[what]
    features: Any = {f"good {n}": torch.ones(10) for n in range(3)}
    features |= {"the bad one": make(), "last": torch.ones(1)}
    async with open_pair(pool_bytes="8MiB") as pair:
        for send in (pair.exporter.send, pair.exporter.send_nowait):
            for _ in range(2):  # also when a layout of that shape is remembered
                error = await unchanged(pair, partial(send, features), InvalidTensorError)
                assert error.feature == "the bad one"
                words(error, "'the bad one'", *said)
            with_shape = {"x": torch.ones(3)}
            await send(with_shape)
            (await pair.consumer.receive()).release()
            await pair.exporter.drain()
        await still_serves(pair)


async def test_a_tensor_that_changes_while_its_send_waits_is_refused() -> None:
    """Kills: a copy of as many bytes as there were when the send began."""
    async with open_pair(slots=1) as pair:
        await pair.exporter.send(ONE)
        for small in (torch.ones(1000), torch.ones(100, 10).t()):
            waiting = asyncio.create_task(pair.exporter.send({"x": small}))
            await passes(2)
            small.set_(torch.ones(2))  # type: ignore[call-overload]  # as torch's stubs have it
            (await pair.consumer.receive()).release()
            with pytest.raises(InvalidTensorError, match="leave a tensor alone"):
                await waiting
            await pair.exporter.drain()
            check_all_back(pair.exporter)
            await pair.exporter.send(ONE)
        (await pair.consumer.receive()).release()


FEATURES: list[tuple[Any, list[str]]] = [
    ({}, ["at least one feature"]),
    ([torch.ones(1)], ["list", "mapping"]),
    (torch.ones(1), ["Tensor", "{'name': tensor}"]),
    ({1: torch.ones(1)}, ["name", "got 1"]),
    ({"": torch.ones(1)}, ["1 to 1,024"]),
    ({"x" * 1025: torch.ones(1)}, ["1 to 1,024"]),
    ({"\ud800": torch.ones(1)}, ["surrogates"]),
    ({str(n): torch.empty(0) for n in range(1025)}, ["1,025", "1024"]),
    ({"x" * 900 + str(n): torch.empty(0) for n in range(100)}, ["fewer features"]),
]


@pytest.mark.parametrize(("features", "said"), FEATURES, ids=by_name)
async def test_features_are_refused(features: Any, said: list[str]) -> None:
    """Kills: features of which the consumer is the first to hear."""
    async with open_pair() as pair:
        error = await unchanged(pair, lambda: pair.exporter.send(features), ArgumentError)
        assert any(each in str(error) for each in said), str(error)
        await still_serves(pair)


SPECS: list[tuple[Any, list[str]]] = [
    ({"x": torch.ones(1)}, ["'x'", "TensorSpec(shape, dtype)"]),
    ({"x": (3,)}, ["'x'", "tuple"]),
    ({"x": TensorSpec((1,), "float33")}, ["'x'", "float33", "float32"]),
    ({"x": TensorSpec((1,), torch.qint8)}, ["'x'", "qint8"]),
    ({"x": TensorSpec((1,) * 65, "int8")}, ["65", "64"]),
    ({"x": TensorSpec((0, 2**62 + 1), "int8")}, ["strides"]),
    ({}, ["at least one feature"]),
]


@pytest.mark.parametrize(("specs", "said"), SPECS, ids=by_name)
async def test_specs_are_refused_before_the_reservation_is_entered(
    specs: Any, said: list[str]
) -> None:
    """Kills: a reservation that fails only on entering, or that takes a slot and fails."""
    async with open_pair() as pair:
        for reserve in (pair.exporter.reserve, pair.exporter.reserve_nowait):
            error = await unchanged(pair, partial(reserve, specs), ArgumentError)
            words(error, *said)
        await still_serves(pair)


TERMS: list[tuple[dict[str, Any], type[asyncvmm.AsyncVMMError], list[str]]] = [
    ({"key": 1.5}, ArgumentError, ["1.5", "str or an int"]),
    ({"key": b"k"}, ArgumentError, ["b'k'", "str or an int"]),
    ({"key": True}, ArgumentError, ["True", "str or an int"]),
    ({"key": "k" * 4097}, ArgumentError, ["4,097", "4,096", "use an id"]),
    ({"key": "\ud800"}, ArgumentError, ["surrogates"]),
    ({"key": 2**64}, ArgumentError, ["64 bits"]),
    ({"key": -(2**63) - 1}, ArgumentError, ["64 bits"]),
    ({"metadata": torch.ones(1)}, ArgumentError, ["Tensor", "plain data"]),
    ({"metadata": object()}, ArgumentError, ["plain data"]),
    ({"metadata": 2**64}, ArgumentError, ["plain data"]),
    ({"metadata": [{Keyed(1): 2}]}, ArgumentError, ["read back", "keys"]),
    ({"metadata": msgspec.Raw(b"\xc1")}, ArgumentError, ["read back"]),
    ({"metadata": "x" * 40_000}, ArgumentError, ["40,003", "32,736", "features"]),
    ({"to": 1}, asyncvmm.RankError, ["rank 1", "0 to 0"]),
    ({"to": -1}, ArgumentError, ["-1", "0 or more"]),
    ({"to": []}, ArgumentError, ["at least one rank"]),
    ({"to": [0, 5]}, asyncvmm.RankError, ["rank 5", "consumer_count=1"]),
    ({"to": Group(7)}, asyncvmm.RankError, ["rank 7"]),
    ({"to": "0"}, ArgumentError, ["'0'", "int"]),
    ({"to": 0.5}, ArgumentError, ["0.5", "Group"]),
    ({"to": object()}, ArgumentError, ["Group"]),
    ({"require": "most"}, ArgumentError, ["'most'", "'all', 'any' or 'none'"]),
    ({"require": None}, ArgumentError, ["None", "'any'"]),
]


@pytest.mark.parametrize(("terms", "kind", "said"), TERMS, ids=by_name)
async def test_terms_are_refused(
    terms: dict[str, Any], kind: type[asyncvmm.AsyncVMMError], said: list[str]
) -> None:
    """Kills: a key, a note or a rank that is refused only after a slot was taken, and kept."""
    spec = {"x": TensorSpec((1,), "int8")}
    async with open_pair() as pair:
        error = await unchanged(pair, lambda: pair.exporter.send(ONE, **terms), kind)
        words(error, *said)
        if isinstance(error, asyncvmm.RankError):
            assert error.consumer_count == 1
        error = await unchanged(pair, lambda: pair.exporter.reserve(spec, **terms), kind)
        words(error, *said)
        await still_serves(pair)


LONG: dict[str, tuple[int, dict[str, Any]]] = {
    "features": (70, {}),
    "features and metadata": (40, {"metadata": "x" * 30_000}),
    "features and a key": (60, {"key": "\u20ac" * 4096}),
}
"""How many features with names of 1,000 characters, and what else is said of their owner."""

CALLS: dict[str, Callable[[asyncvmm.Exporter, dict[str, Any], dict[str, Any]], Any]] = {
    "send": lambda exporter, features, terms: exporter.send(features, **terms),
    "send_nowait": lambda exporter, features, terms: exporter.send_nowait(features, **terms),
    "export": lambda exporter, features, terms: exporter.export(features, **terms),
    "export_nowait": lambda exporter, features, terms: exporter.export_nowait(features, **terms),
    "export_all": lambda exporter, features, terms: exporter.export_all(
        [ONE, features], keys=[None, terms.get("key")]
    ),
    "send_all": lambda exporter, features, terms: exporter.send_all(
        [ONE, features],
        keys=[None, terms.get("key")],
        metadata=[None, terms.get("metadata")],
    ),
    "reserve": lambda exporter, features, terms: exporter.reserve(
        {name: TensorSpec((0,), "int8") for name in features}, **terms
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", LONG)
async def test_what_no_message_can_describe_waits_for_nobody(what: str, call: str) -> None:
    """There is no room, and others wait for it.

    Kills: a description that is looked at only once there is room, when its copy is queued.
    """
    count, terms = LONG[what]
    if call == "export_all" and "metadata" in terms:
        return  # it takes none
    features = {f"{number}".rjust(1000): torch.empty(0) for number in range(count)}
    async with open_pair(slots=2) as pair:
        for _ in range(2):
            await pair.exporter.send(ONE, require="none")
        before = check_books(pair.exporter)
        attempt = asyncio.create_task(do(lambda: CALLS[call](pair.exporter, features, terms)))
        await passes(3)
        waits = not attempt.done()
        attempt.cancel()
        assert not waits
        words(attempt.exception() or Exception(), "65,472 fit a packet", "fewer features")
        after = check_books(pair.exporter)
        assert (after.slots, after.copies, after.waits) == (before.slots, before.copies, 0)
        for _ in range(2):
            (await pair.consumer.receive()).release()
        await pair.exporter.drain()
        await still_serves(pair)


async def test_a_note_that_no_message_can_carry_leaves_the_loan_as_it_was() -> None:
    """Kills: a note that was refused at publication, and is published with the next try."""
    specs = {f"{number}".rjust(1000): TensorSpec((0,), "int8") for number in range(40)}
    async with open_pair() as pair:
        async with pair.exporter.reserve(specs, metadata="first") as owner:
            with pytest.raises(ArgumentError, match="fit a packet"):
                owner.publish(metadata="x" * 30_000)
            assert check_books(pair.exporter).slots.filling == 1
            owner.publish()
        async with await pair.consumer.receive() as batch:
            assert batch.metadata == "first"


async def test_bad_metadata_at_publication_leaves_the_loan_as_it_was() -> None:
    """Kills: a loan that is over although publishing it raised."""
    async with open_pair() as pair:
        async with pair.exporter.reserve({"x": TensorSpec((3,), torch.float32)}) as owner:
            with pytest.raises(ArgumentError, match="plain data"):
                owner.publish(metadata=object())
            owner["x"].copy_(torch.arange(3.0))
            assert check_books(pair.exporter).slots.filling == 1
            owner.publish(metadata="good")
        async with await pair.consumer.receive() as batch:
            assert batch.metadata == "good"
            assert torch.equal(batch[0]["x"], torch.arange(3.0))


async def test_a_reservation_whose_view_cannot_be_made_gives_back_its_loan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: a slot kept by an entering that failed after it was taken."""
    async with open_pair() as pair:

        def fail(*_: object) -> object:
            raise ZeroDivisionError

        monkeypatch.setattr(pair.exporter, "_writable", fail)
        reservation = pair.exporter.reserve({"x": TensorSpec((3,), "int8")})
        with pytest.raises(ZeroDivisionError):
            await reservation.__aenter__()
        check_all_back(pair.exporter)


async def test_a_reservation_can_be_entered_once() -> None:
    """Kills: a second loan under one reservation."""
    async with open_pair() as pair:
        reservation = pair.exporter.reserve({"x": TensorSpec((3,), "int8")})
        async with reservation:
            with pytest.raises(asyncvmm.LocalProtocolError, match="once"):
                await reservation.__aenter__()
        check_all_back(pair.exporter)


# -- closed, forked ------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
async def test_a_closed_exporter_refuses_everything(debug: bool) -> None:
    """Kills: a closed exporter that takes a slot, and a loan from before that breaks its owner."""
    spec = {"x": TensorSpec((3,), "int8")}
    async with open_pair(debug=debug) as pair:
        exporter, consumer = pair.exporter, pair.consumer
        before = exporter.reserve(spec)
        loan = exporter.reserve(spec)
        owner = await loan.__aenter__()
    attempts: list[Callable[[], Any]] = [
        lambda: exporter.send(ONE),
        lambda: exporter.send_nowait(ONE),
        lambda: exporter.reserve(spec),
        lambda: exporter.reserve_nowait(spec),
        before.__aenter__,
        exporter.drain,
        lambda: exporter.wait_attached(1),
        owner.publish,
        consumer.receive,
        consumer.receive_nowait,
    ]
    for attempt in attempts:
        with pytest.raises(asyncvmm.ClosedError, match="closed"):
            await do(attempt)
    owner["x"].fill_(1)  # the memory stays while somebody holds it
    await loan.__aexit__(None, None, None)
    assert exporter.statistics().physical_bytes == 0
    assert consumer.statistics().state == "closed"


async def test_a_forked_child_can_use_nothing_and_harms_nobody(peers: Peers) -> None:
    """In a process of its own, which forks while it has both ends open.

    Kills: a child that takes slots of its parent's pool, speaks on its sockets, keeps them open,
    or removes its name.
    """
    parent = peers.start()
    assert await parent.call(own_steps.use_both_ends_in_a_fork) == {
        "send": "ForkError",
        "send_nowait": "ForkError",
        "reserve": "ForkError",
        "enter": "ForkError",
        "publish": "ForkError",
        "drain": "ForkError",
        "wait_attached": "ForkError",
        "receive": "ForkError",
        "receive_nowait": "ForkError",
        "said": True,
        "status": 0,
    }
    assert await parent.ends() == 0
    assert parent.printed == []


# -- strangers -----------------------------------------------------------------------------------


async def test_another_version_is_told_apart_on_both_sides(peers: Peers) -> None:
    """A greeting written by hand, by an older and by a newer release.

    Kills: another version taken for rubbish, or for ours.
    """
    async with asyncvmm.open_exporter("@version", device="cpu", pool_bytes="64KiB") as exporter:
        for theirs in (0, wire.VERSION + 1, 65535):
            with RawConsumer.to("\0version") as raw:
                hello = wire.Hello(0, None, "host")
                await raw.send(wire.encode_greeting(hello, version=theirs))
                answer = wire.decode_greeting(await raw.packet() or b"")
                assert isinstance(answer, wire.Rejected)
                assert (answer.reason, answer.numbers) == ("version", [wire.VERSION])
                assert str(theirs) in answer.text
        async with asyncvmm.connect("@version", device="cpu", rank=0):
            await exporter.wait_attached(1)


@pytest.mark.parametrize("by", ["header", "refusal"])
async def test_an_exporter_of_another_version_is_reported_with_both(by: str) -> None:
    """Kills: versions in the wrong order, and waiting for an answer that cannot be read."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0other-version")
    listener.listen()
    connecting = asyncio.create_task(
        asyncvmm.connect("@other-version", device="cpu", rank=0).__aenter__()
    )
    sock, _ = await asyncio.to_thread(listener.accept)
    rejected = wire.Rejected("version", "no", [7])
    sock.send(wire.encode_greeting(rejected, version=7 if by == "header" else wire.VERSION))
    with pytest.raises(asyncvmm.VersionMismatchError, match="same asyncvmm release") as caught:
        await connecting
    assert (caught.value.ours, caught.value.theirs) == (wire.VERSION, 7)
    sock.close()
    listener.close()


async def test_a_secret_must_be_the_same_on_both_ends() -> None:
    """As text or as bytes.

    Kills: an exporter with a secret that takes anybody of the same user.
    """
    async with asyncvmm.open_exporter(
        "@secret", device="cpu", pool_bytes="64KiB", secret="grün"
    ) as exporter:
        for wrong in ("", b"gr", "gruen"):
            with pytest.raises(asyncvmm.AccessDeniedError, match="secret"):
                await asyncvmm.connect("@secret", device="cpu", rank=0, secret=wrong).__aenter__()
        for right in ("grün", "grün".encode()):
            async with asyncvmm.connect("@secret", device="cpu", rank=0, secret=right):
                await exporter.wait_attached(1)
            await until(lambda: not exporter.statistics().consumers)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_what_gives_something_back_is_neither_copied_nor_pickled(
    way: Callable[[object], object],
) -> None:
    """Kills: half a copy of a consumer, or of an exporter, whose end unmaps the pool and closes
    descriptors; a second owner that gives back what the first still has."""

    def held() -> tuple[int, int]:
        mapped = Path("/proc/self/maps").read_text().count("asyncvmm-pool")
        return mapped, len(os.listdir("/proc/self/fd"))

    async with open_pair() as pair:
        ack = await pair.exporter.send(ONE)
        batch = await pair.consumer.receive()
        (owner,) = batch
        view = owner["x"]
        before = held()
        for thing in (owner, [batch, owner], pair.consumer, pair.exporter, {"one": pair}):
            if way is copy.copy and isinstance(thing, list | dict):
                continue
            with pytest.raises(asyncvmm.CopyError) as caught:
                way(thing)
            if isinstance(thing, list):
                assert "clone()" in str(caught.value)
        gc.collect()
        assert held() == before
        assert not owner.released
        assert torch.equal(view, ONE["x"])
        del view
        owner.release()
        await ack


async def test_another_user_is_refused_by_the_kernels_word(peers: Peers) -> None:
    """Kills: an exporter that believes what a consumer says of itself."""
    if os.getuid():
        pytest.skip("only root can become another user")
    async with asyncvmm.open_exporter("@users", device="cpu", pool_bytes="64KiB") as exporter:
        stranger = peers.start()
        await stranger.call(steps.become, 12345, 54321)
        for _ in range(2):
            error = await stranger.call(own_steps.why_not_connected, "@users", 0)
            assert error[0] == "AccessDeniedError"
            assert "12345" in error[1]
            assert "allow_uids" in error[1]
        async with asyncvmm.connect("@users", device="cpu", rank=0) as consumer:
            await exporter.send(ONE)
            (await consumer.receive()).release()
    async with asyncvmm.open_exporter(
        "@users", device="cpu", pool_bytes="64KiB", allow_gids=[54321]
    ) as exporter:
        await stranger.call(steps.connect, "@users", 0)
        await stranger.call(steps.leave)


# -- what was said of whom, and waits for what can never come -------------------------------------


async def test_a_wait_for_more_ranks_than_there_are_is_refused() -> None:
    """Kills: a wait for ever, for consumers of whom there can be no more."""
    async with open_pair() as pair:
        for count, said in (
            (2, "consumer_count=1"),
            (-1, "0 or more"),
            ("2", "int"),
            (None, "int"),
        ):
            with pytest.raises(ArgumentError) as caught, anyio.fail_after(5):
                await pair.exporter.wait_attached(count)  # type: ignore[arg-type]  # on purpose
            words(caught.value, said)
        await pair.exporter.wait_attached(1)


async def test_a_name_is_refused_where_consumers_have_ranks() -> None:
    """Kills: a ``member`` that an exporter of ranks takes no notice of."""
    async with asyncvmm.open_exporter("@ranks", device="cpu", pool_bytes="4KiB") as exporter:
        with pytest.raises(asyncvmm.RankError) as caught:
            async with asyncvmm.connect("@ranks", rank=0, member="ada"):
                pass
        words(caught.value, "without member='ada'")
        async with asyncvmm.connect("@ranks", rank=0):
            await exporter.wait_attached(1)


@pytest.mark.parametrize("owners", [None, 5, {"x": torch.ones(3)}, iter([ONE])], ids=by_name)
async def test_what_is_no_sequence_of_owners_is_not_exported(owners: Any) -> None:
    """Kills: a look at the owners before what they are is known."""
    async with open_pair() as pair:
        error = await unchanged(pair, lambda: pair.exporter.export_all(owners), ArgumentError)
        words(error, "owners are a sequence")


async def test_what_is_no_group_and_no_exporter_is_refused() -> None:
    """Kills: an AttributeError from deep inside, for an argument of the wrong kind."""
    async with open_pair() as pair:
        tickets = await pair.exporter.export(ONE)
        for group in (5, (0, 1), Group(0)):
            with pytest.raises(ArgumentError, match="AttentionGroup"):
                await pair.consumer.reconstruct(tickets["x"], group=group)  # type: ignore[arg-type]  # on purpose
            with pytest.raises(ArgumentError, match="AttentionGroup"):
                pair.consumer.acknowledge(tickets["x"], group=group)  # type: ignore[arg-type]  # on purpose
        pair.consumer.acknowledge(tickets["x"])
        await tickets.acknowledgement
        with pytest.raises(ArgumentError, match=r"open_exporter\(\) gives, got a .*Consumer"):
            FeatureTransport(pair.consumer)  # type: ignore[arg-type]  # on purpose


async def test_too_many_features_are_counted_before_any_is_looked_at() -> None:
    """Kills: minutes of the event loop for an owner that is refused by its size anyway."""
    features: Any = {str(n): None for n in range(2000)}
    async with open_pair() as pair:
        with pytest.raises(ArgumentError, match="at most 1024 features, got 2000"):
            await pair.exporter.send(features)
        with pytest.raises(ArgumentError, match="at most 1024 features, got 2000"):
            pair.exporter.reserve(features)


def test_the_stream_that_is_another_in_each_thread_is_refused() -> None:
    """Given by number, as a stream, and as the current one; on a GPU tests/gpu sends with it.

    Kills: a copy, or a release, whose event another thread records behind its own work.
    """
    port = object.__new__(CudaPort)  # a whole one needs a GPU
    port._index, port._raw_stream = 0, lambda device: 2
    asks: list[Callable[[], object]] = [
        port.current_stream,
        lambda: port.stream_of(None),
        lambda: port.stream_of(2),
        lambda: port.stream_of(SimpleNamespace(cuda_stream=2)),
    ]
    for ask in asks:
        with pytest.raises(ArgumentError, match="another stream in each thread"):
            ask()
    assert [port.stream_of(number) for number in (0, 1, 3)] == [0, 1, 3]
