"""Where features go inside one chunk."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncvmm._core.layout import (
    DTYPES,
    MAX_DIMENSIONS,
    aligned,
    chunk_bytes,
    feature_bytes,
    offsets,
)
from asyncvmm._errors import InvalidTensorError

MIXED = (
    ("bool", (3,)),
    ("float64", ()),
    ("float8_e4m3fn", (7,)),
    ("int16", (1,)),
    ("float32", (5, 0)),
    ("float32", (65,)),
)


def test_mixed_dtypes_in_every_order_start_on_256_bytes_and_never_overlap() -> None:
    """Kills an offset that is rounded to the element instead of to 256 bytes (field report 51)."""
    for order in permutations(MIXED):
        sizes = [feature_bytes("x", dtype, shape) for dtype, shape in order]
        starts = offsets(sizes)
        end = 0
        for start, size in zip(starts, sizes, strict=True):
            assert start % 256 == 0
            assert start >= end
            end = start + size
        assert end <= chunk_bytes(sizes) == 256 * 6


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5000), max_size=20))
def test_chunk_ends_where_a_next_feature_would_start(sizes: list[int]) -> None:
    """Kills a chunk one alignment too small or too large."""
    after = offsets([*sizes, 1])[-1]
    assert chunk_bytes(sizes) == max(after, 256)
    assert aligned(chunk_bytes(sizes)) == chunk_bytes(sizes)


def test_feature_without_elements_takes_no_bytes_and_a_chunk_is_never_empty() -> None:
    """Kills a chunk of no bytes, which no allocator can tell from its neighbour."""
    assert feature_bytes("x", "float32", (2**62, 0)) == 0
    assert offsets([0, 4, 0, 4]) == [0, 0, 256, 256]
    assert chunk_bytes([]) == chunk_bytes([0, 0]) == 256


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_takes_the_bits_that_its_name_says(dtype: str) -> None:
    """Kills a wrong size in the table, which would cut or mix up features."""
    if dtype == "bool" or dtype.startswith("bits"):
        bits = 8 if "x" in dtype or dtype == "bool" else int(dtype.removeprefix("bits"))
    elif dtype.endswith("_x2"):
        bits = 2 * int(dtype.removeprefix("float")[0])
    else:
        bits = int(re.match(r"[a-z]+(\d+)", dtype)[1])  # type: ignore[index]  # all match
    assert DTYPES[dtype] == max(1, bits // 8)


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)]
)
def test_sizes_are_rounded_up_to_256(nbytes: int, rounded: int) -> None:
    """Kills a rounding that is off by one."""
    assert aligned(nbytes) == rounded


def test_as_many_dimensions_as_torch_has() -> None:
    """Kills a bound that refuses what torch can make."""
    assert feature_bytes("x", "int16", (1,) * MAX_DIMENSIONS) == 2


def test_scalar_takes_one_element() -> None:
    """Kills a 0-d tensor that takes no bytes."""
    assert [feature_bytes("x", dtype, ()) for dtype in DTYPES] == list(DTYPES.values())


@pytest.mark.parametrize(
    ("dtype", "shape", "says"),
    [
        ("qint8", (1,), "qint8"),
        ("", (1,), "cannot be shared"),
        ("float32", (2, -1), r"length in its shape \(2, -1\)"),
        ("float32", (2**40, 2**40, 0), "strides"),
        ("float32", (1,) * (MAX_DIMENSIONS + 1), "65 dimensions"),
    ],
)
def test_what_has_no_size_is_refused_by_name(dtype: str, shape: tuple[int, ...], says: str) -> None:
    """Kills a refusal that does not say which feature it is about."""
    with pytest.raises(InvalidTensorError, match=says) as caught:
        feature_bytes("image", dtype, shape)
    assert caught.value.feature == "image"


def test_too_many_dimensions_are_refused_before_they_are_multiplied() -> None:
    """Kills minutes of arithmetic on a hostile shape (field report 53)."""

    class Counted(tuple[int, ...]):
        def __iter__(self) -> None:  # type: ignore[override]  # to fail if it is looked at
            raise AssertionError("the lengths were looked at")

    with pytest.raises(InvalidTensorError, match="dimensions"):
        feature_bytes("x", "uint8", Counted((2**62,) * 7000))
