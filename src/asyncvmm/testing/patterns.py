"""Bytes that say whose they are.

Every eight bytes depend on the owner, the generation and their offset, so stale, mixed and shifted
bytes all look different from the right ones.
"""

from __future__ import annotations

import torch

from asyncvmm._errors import ArgumentError

_WORD = 8

_SPREAD = 0x1E3779B97F4A7C15
"""2**64 divided by the golden ratio, less its top bit: multiples of it are spread evenly."""


def pattern(
    owner: int,
    generation: int,
    nbytes: int,
    start: int = 0,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Return ``nbytes`` bytes (uint8) of an owner, from offset ``start``, a multiple of 8.

    Raises :class:`asyncvmm.ArgumentError` for another ``start``.
    """
    first, rest = divmod(start, _WORD)
    if rest:
        raise ArgumentError(
            f"start={start} is no multiple of {_WORD}; the pattern is of such words"
        )
    words = torch.arange(
        first, first + (nbytes + _WORD - 1) // _WORD, dtype=torch.int64, device=device
    )
    whose = hash((owner, generation)) >> 1  # of ints it is the same in every process
    return ((words * _SPREAD + whose) ^ (words << 29)).view(torch.uint8)[:nbytes]


def fill(tensor: torch.Tensor, owner: int, generation: int, start: int = 0) -> torch.Tensor:
    """Fill a contiguous tensor of any dtype with an owner's pattern, and return it.

    On a GPU this is queued on the current stream.  Numbers made of it may be NaN: compare bytes,
    as :func:`mismatch` does.  Raises :class:`asyncvmm.ArgumentError` for a tensor that is not
    contiguous.
    """
    if not tensor.is_contiguous():
        raise ArgumentError(
            "only a contiguous tensor can be filled; fill one and make a view of it"
        )
    found = tensor.reshape(-1).view(torch.uint8)
    found.copy_(pattern(owner, generation, found.numel(), start, tensor.device))
    return tensor


def mismatch(tensor: torch.Tensor, owner: int, generation: int, start: int = 0) -> str:
    """Say where a tensor differs from an owner's pattern; return "" where it does not.

    The elements are taken in order, whatever the strides.  Waits for the current stream.
    """
    found = tensor.contiguous().reshape(-1).view(torch.uint8)
    expected = pattern(owner, generation, found.numel(), start, tensor.device)
    wrong = torch.ne(found, expected).nonzero()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return (
        f"{len(wrong):,} of {found.numel():,} bytes are not those of owner {owner}, generation "
        f"{generation}: the first at offset {start + first:,} is {int(found[first])} and should "
        f"be {int(expected[first])}"
    )
