"""Owners whose bytes say whose they are (``asyncvmm.testing.pattern``), and a look at them."""

from __future__ import annotations

from typing import Any

import torch

import asyncvmm
from asyncvmm.testing import pattern


def features(owner: int, generation: int, nbytes: int) -> dict[str, torch.Tensor]:
    """Return an owner's features: its bytes in three pieces of three dtypes."""
    data = pattern(owner, generation, (nbytes + 23) & -16)
    third = len(data) // 48 * 16
    return {
        "bytes": data[:third],
        "words": data[third : 2 * third].view(torch.int32),
        "grid": data[2 * third :].view(torch.int64).view(-1, 2),
    }


def note(owner: int, generation: int, nbytes: int) -> dict[str, int]:
    """Return the metadata by which a consumer knows what to expect."""
    return {"owner": owner, "generation": generation, "nbytes": nbytes}


def wrong(owner: asyncvmm.Owner) -> str:
    """Say what is wrong with an owner that came with a note; empty if nothing is."""
    metadata: Any = owner.metadata
    expected = features(metadata["owner"], metadata["generation"], metadata["nbytes"])
    if owner.keys() != list(expected):
        return f"{owner!r} has features {owner.keys()}"
    for name, tensor in expected.items():
        found = owner[name]
        if found.dtype != tensor.dtype or not torch.equal(found, tensor):
            return f"{owner!r} {metadata}: {name} differs"
    return ""
