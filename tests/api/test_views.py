"""What arrives: every dtype and shape bit-exact, aligned, without a copy; and the ways to copy."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import asyncvmm
from asyncvmm import TensorSpec
from asyncvmm._core.layout import DTYPES
from asyncvmm._tensors import host
from asyncvmm._tensors.plan import TORCH_DTYPES
from asyncvmm._types import ALIGNMENT
from asyncvmm.testing import Pair, open_pair
from tests.api.books import check_all_back

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

COUNT = 24  # elements that every shape below is made of
MIB = 1 << 20


def base(name: str) -> tuple[torch.Tensor, Any]:
    """Return ``COUNT`` elements of random bits, and the same as an array of bytes per element."""
    size = DTYPES[name]
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (COUNT * size,), dtype=torch.uint8, generator=generator)
    if name == "bool":
        data &= 1
    return data.view(TORCH_DTYPES[name]), data.numpy().reshape(COUNT, size)


# How a tensor is derived from ``base``, and the same in numpy on elements of bytes: what is
# expected does not depend on any copy kernel of torch's.
SHAPES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any], Any]]] = {
    "0-d": (lambda t: t[3], lambda a: a[3]),
    "empty": (lambda t: t[:0].view(0, 3), lambda a: a[:0]),
    "plain": (lambda t: t.view(2, 3, 4), lambda a: a),
    "transposed": (lambda t: t.view(4, 6).t(), lambda a: a.reshape(4, 6, -1).transpose(1, 0, 2)),
    "permuted": (
        lambda t: t.view(2, 3, 4).permute(2, 0, 1),
        lambda a: a.reshape(2, 3, 4, -1).transpose(2, 0, 1, 3),
    ),
    "expanded": (
        lambda t: t[:4].view(4, 1).expand(4, 5),
        lambda a: np.repeat(a[:4].reshape(4, 1, -1), 5, axis=1),
    ),
    "offset slice": (lambda t: t[5:17], lambda a: a[5:17]),
    "every third": (lambda t: t[1::3], lambda a: a[1::3]),
}


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor, whatever its dtype."""
    assert tensor.is_contiguous()
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size) if size else b""


async def arrived(pair: Pair, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Send one tensor; return its view and its clone."""
    await pair.exporter.send({"x": tensor})
    with await pair.consumer.receive() as batch:
        return [batch[0]["x"], batch[0].clone()["x"]]


# -- every dtype, every shape --------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCH_DTYPES)
async def test_every_dtype_and_shape_arrives_bit_exact(name: str) -> None:
    """As a view and as a clone.

    Kills: an element size that is wrong, a source copied in the order of its memory instead of
    its indices, a 0-d or empty tensor that changes its shape, and a dtype that lacks a kernel.
    """
    tensor, elements = base(name)
    async with open_pair() as pair:
        for what, (derive, expect) in SHAPES.items():
            source = derive(tensor)
            for found in await arrived(pair, source):
                assert found.shape == source.shape, what
                assert found.dtype is source.dtype, what
                assert bits(found) == expect(elements).tobytes(), what
            del found
        await pair.exporter.drain()
        check_all_back(pair.exporter)


def test_no_dtype_of_this_torch_is_forgotten() -> None:
    """Kills: a dtype that torch has gained and that nobody noticed.

    Quantised dtypes are refused on purpose: their scales are not in their bytes.
    """
    known = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    quantised = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    assert known - quantised == set(TORCH_DTYPES.values())


@pytest.mark.parametrize("name", [name for name in TORCH_DTYPES if name.startswith("complex")])
async def test_lazy_conjugates_arrive_as_their_values(name: str) -> None:
    """Kills: copying the bytes of a tensor whose conjugation or negation is only a flag."""
    tensor, elements = base(name)
    half = DTYPES[name] // 2
    # No NaNs: arithmetic may turn one kind of them into another.
    elements[:, half - 1 :: half] &= 0xBF
    conjugate = elements.copy()
    conjugate[:, -1] ^= 0x80  # the sign of the imaginary part, little-endian
    async with open_pair() as pair:
        for found in await arrived(pair, tensor.conj()):
            assert not found.is_conj()
            assert bits(found) == conjugate.tobytes()
        # The imaginary part of a conjugate is a strided view with the negative bit.
        imaginary = tensor.conj().imag
        assert imaginary.is_neg()
        for found in await arrived(pair, imaginary):
            assert not found.is_neg()
            assert bits(found) == conjugate[:, half:].tobytes()
        negative = torch._neg_view(tensor)
        assert negative.is_contiguous()
        conjugate[:, half - 1] ^= 0x80
        for found in await arrived(pair, negative):
            assert not found.is_neg()
            assert bits(found) == conjugate.tobytes()


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(MIB + 3, dtype=torch.int32),
        torch.arange(2 * MIB, dtype=torch.int16).view(1024, 2048).t(),
        torch.nn.Parameter(torch.arange(9.0)),
        torch.arange(9.0, requires_grad=True) * 2,
        torch.arange(120.0).view(1, 2, 3, 20).to(memory_format=torch.channels_last),
        torch.from_numpy(np.arange(7)),
    ],
    ids=["large", "large transposed", "parameter", "with graph", "channels last", "numpy"],
)
async def test_other_sources(source: torch.Tensor) -> None:
    """Kills: a copy in a worker thread that differs from the one on the loop, and a graph that
    is kept or written to by a copy.
    """
    async with open_pair(pool_bytes="8MiB") as pair:
        for found in await arrived(pair, source):
            assert found.shape == source.shape
            assert not found.requires_grad
            assert torch.equal(found, source.detach())


async def test_features_keep_their_names_order_and_neighbours() -> None:
    """Sixty features of sizes around the alignment, every one on 256 bytes, none over another.

    Kills: an offset of one side that differs from the other's, and features that overlap.
    """
    sizes = [0, 1, 255, 256, 257, 3, 0, 511, 512, 513] * 6
    sources = {
        f"{at:02}-{size}": torch.full((size,), at, dtype=torch.uint8)
        for at, size in enumerate(sizes)
    }
    async with open_pair() as pair:
        await pair.exporter.send(sources, key=("k" * 100))
        with await pair.consumer.receive() as batch:
            (owner,) = batch
            assert owner.key == "k" * 100
            assert list(owner) == owner.keys() == list(sources)
            assert len(owner) == 60
            assert "00-0" in owner
            assert "nothing" not in owner
            start = owner["01-1"].data_ptr()
            for name, view in owner.items():
                assert torch.equal(view, sources[name])
                assert view.numel() == 0 or view.data_ptr() % ALIGNMENT == start % ALIGNMENT == 0
            with pytest.raises(KeyError, match="nothing"):
                owner["nothing"]
            del view


async def test_metadata_is_plain_data() -> None:
    """Kills: metadata that comes back as another type, and None taken for empty."""
    async with open_pair() as pair:
        for metadata in (None, 0, False, "", b"\0", [1, [2.5, None]], {"a": {"b": [True]}}):
            await pair.exporter.send({"x": torch.ones(1)}, metadata=metadata)
            with await pair.consumer.receive() as batch:
                assert batch.metadata == batch[0].metadata == metadata
                assert type(batch.metadata) is type(metadata)


async def test_a_reservation_is_written_in_place_and_read_as_it_was_written() -> None:
    """Kills: a reservation whose tensors are elsewhere than its consumer's views."""
    specs = {
        "a": TensorSpec((3, 5), torch.bfloat16),
        "scalar": TensorSpec((), "int64"),
        "none": TensorSpec((0, 7), torch.float32),
        "b": TensorSpec((300,), torch.uint8),
    }
    async with open_pair() as pair:
        async with pair.exporter.reserve(specs, key="r", metadata=[1]) as owner:
            assert list(owner) == list(specs)
            assert len(owner) == 4
            assert owner.nbytes == 4 * ALIGNMENT
            torch.nn.init.uniform_(owner["a"].float()).to(torch.bfloat16)
            owner["a"].copy_(torch.arange(15).view(3, 5))
            owner["scalar"].fill_(-5)
            owner["b"].copy_(torch.arange(300))
            ack = owner.publish(metadata=[2])
            with pytest.raises(asyncvmm.ReleasedError):
                owner["a"]
            with pytest.raises(asyncvmm.ReleasedError):
                owner.publish()
        with await pair.consumer.receive() as batch:
            assert (batch[0].key, batch[0].metadata) == ("r", [2])
            assert torch.equal(batch[0]["a"], torch.arange(15).view(3, 5).to(torch.bfloat16))
            assert batch[0]["scalar"].item() == -5
            assert batch[0]["none"].shape == (0, 7)
            assert torch.equal(batch[0]["b"], torch.arange(300).to(torch.uint8))
        await ack
        check_all_back(pair.exporter)


# -- other libraries, and copies -----------------------------------------------------------------


async def test_dlpack_and_numpy_take_the_same_memory() -> None:
    """Kills: an import that copies, or that sees another address."""
    async with open_pair() as pair:
        await pair.exporter.send({"x": torch.arange(12.0).view(3, 4)})
        with await pair.consumer.receive() as batch:
            view = batch[0]["x"]
            imported = torch.utils.dlpack.from_dlpack(view)
            array = np.from_dlpack(view)
            shared = view.numpy()
            assert imported.data_ptr() == view.data_ptr()
            assert array.ctypes.data == shared.ctypes.data == view.data_ptr()
            assert array.shape == (3, 4)
            assert array[2, 3] == shared[2, 3] == imported[2, 3] == 11
            del view, imported, array, shared


async def test_a_clone_is_independent_and_writable() -> None:
    """Kills: a clone that shares memory with the pool, and one that keeps the owner."""
    sources = {"a": torch.arange(10), "b": torch.tensor(2.5), "c": torch.empty(0, 3)}
    async with open_pair() as pair:
        ack = await pair.exporter.send(sources)
        with await pair.consumer.receive() as batch:
            mine = batch[0].clone()
        await ack  # nothing holds it: a clone is no view
        for name, source in sources.items():
            assert torch.equal(mine[name], source)
            mine[name].add_(1)
            assert torch.equal(mine[name], source + 1)
        check_all_back(pair.exporter)
        with pytest.raises(asyncvmm.ReleasedError):
            batch[0].clone()


# -- no copies -----------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Counts the torch operations that may move payload: everything that makes no view.

    Giving a tensor another shape of as many elements moves nothing either.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        reshapes = func is torch.ops.aten.resize_.default and args[0].numel() == math.prod(args[1])
        if not func.is_view and not reshapes:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count torch's operations and every ``memmove``, by how many bytes it moved."""
    memmove = ctypes.memmove

    def counted(target: Any, source: Any, count: int) -> Any:
        copies.counts["memmove"] += 1
        copies.counts["bytes"] += count
        return memmove(target, source, count)

    with monkeypatch.context() as patch, Copies() as copies:
        patch.setattr(f"{host.__name__}.ctypes.memmove", counted)
        yield copies.counts


async def test_reservations_and_views_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation between the producer's write and the consumer's read makes a view.

    Kills: a staging tensor on either side, a view that is made by a copy, and an empty one made
    with memory.
    """
    spec = {name: TensorSpec((64, 64), torch.float32) for name in "abc"}
    async with open_pair() as pair:
        with counted_copies(monkeypatch) as counts:
            for _ in range(10):
                async with pair.exporter.reserve(spec) as owner:
                    written = [owner[name].data_ptr() for name in owner]
                    owner.publish()
                with await pair.consumer.receive() as batch:
                    read = [view.data_ptr() for _, view in batch[0].items()]
                    gaps = [after - before for before, after in pairwise(read)]
                assert gaps == [written[1] - written[0]] * 2
                await pair.exporter.drain()
        assert counts == {}
        stats = check_all_back(pair.exporter)
        assert (stats.copies, stats.copied_bytes) == (0, 0)


async def test_send_copies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ``memmove`` or one ``copy_`` per feature, and nothing on the consumer's side.

    Kills: a contiguous() before the copy, and a second copy on the way.
    """
    strided = torch.arange(4096.0).view(64, 64).t()
    sources = {"a": torch.ones(1000), "b": torch.zeros(77), "strided": strided}
    async with open_pair() as pair:
        with counted_copies(monkeypatch) as counts:
            for _ in range(10):
                await pair.exporter.send(sources)
                with await pair.consumer.receive() as batch:
                    for name in batch[0]:
                        assert batch[0][name].data_ptr()
                await pair.exporter.drain()
        assert counts == {"memmove": 20, "bytes": 10 * 4 * 1077, "copy_": 10}
        stats = check_all_back(pair.exporter)
        assert stats.copies == 10


async def test_a_clone_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a clone that copies feature by feature."""
    sources = {f"{n}": torch.full((100,), n) for n in range(20)}
    async with open_pair() as pair:
        await pair.exporter.send(sources)
        with await pair.consumer.receive() as batch, counted_copies(monkeypatch) as counts:
            mine = batch[0].clone()
        assert counts == {"clone": 1}
        assert all(torch.equal(mine[name], sources[name]) for name in sources)
