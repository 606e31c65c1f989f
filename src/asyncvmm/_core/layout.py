"""Where features go inside one chunk.

Both sides call these functions, so an offset never travels: a consumer computes the layout from
the shapes it was told and refuses the owner if the sum is not the chunk's size.

Rules: each feature starts on a multiple of 256 bytes, in the order given; a feature without
elements takes no bytes; a chunk is a multiple of 256 bytes and never empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from asyncvmm._errors import InvalidTensorError
from asyncvmm._types import ALIGNMENT

MAX_DIMENSIONS = 64
"""torch itself refuses tensors of more dimensions."""

MAX_LENGTH = 2**62
"""What the wire carries of one length, and well inside what a stride may be."""

DTYPES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}
"""Bytes of one element, by the name torch gives the dtype.

Quantised dtypes are absent on purpose: their scales are not in the bytes."""


def aligned(nbytes: int) -> int:
    """Round up to the alignment of chunks and features."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def feature_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the size of one feature; refuse what has no size."""
    size = DTYPES.get(dtype)
    if size is None:
        raise InvalidTensorError(
            f"feature {name!r} has dtype {dtype}, which cannot be shared; "
            f"allowed are {', '.join(DTYPES)}",
            feature=name,
        )
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidTensorError(
            f"feature {name!r} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are allowed",
            feature=name,
        )
    for length in shape:
        if length < 0:
            raise InvalidTensorError(
                f"feature {name!r} has a negative length in its shape {tuple(shape)}",
                feature=name,
            )
        size *= length
    if not size and math.prod(length or 1 for length in shape) > MAX_LENGTH:
        raise InvalidTensorError(
            f"feature {name!r} has no elements, but the strides of its shape {tuple(shape)} do "
            f"not fit 64 bits",
            feature=name,
        )
    return size


def chunk_bytes(sizes: Iterable[int]) -> int:
    """Return the size of the chunk that holds features of these sizes."""
    total = 0
    for size in sizes:
        total += (size + ALIGNMENT - 1) & -ALIGNMENT
    return total or ALIGNMENT


def offsets(sizes: Iterable[int]) -> list[int]:
    """Return where each feature starts, in bytes from the start of the chunk."""
    found = []
    at = 0
    for size in sizes:
        found.append(at)
        at += (size + ALIGNMENT - 1) & -ALIGNMENT
    return found
