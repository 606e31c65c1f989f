"""Steps of other processes that only the tests of the public face need."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import torch

import asyncvmm
from tests.process.counters import Counters
from tests.process.puppet import Me

LARGEST = 32 * 1024
"""Bytes of the largest owner of a soak; torch copies more than that in several threads."""

_bits = torch.randint(
    0, 256, (LARGEST + 65_521,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)


def expected(owner: int, generation: int, nbytes: int) -> torch.Tensor:
    """Return what an owner holds: no two owners or generations agree, nor any two offsets."""
    start = (owner * 7919 + generation * 104_729) % 65_521
    return _bits[start : start + nbytes]


_chance = random.Random(1)
_sizes = [
    int(_chance.choice((0, 1, 255, 257, 3000, 3001, 20_000, LARGEST)) * _chance.random())
    for _ in range(4099)
]


def size_of(owner: int) -> int:
    """Return the bytes of an owner: mostly small, a few large, sometimes none."""
    return _sizes[owner % 4099]


async def write_into_a_view(me: Me) -> None:
    """Write into a view of the oldest batch that was kept, as a careless program might."""
    owner = me.batches[0][0]
    owner["words"].add_(1)


async def soak(me: Me, first: int, count: int) -> dict[str, Any]:
    """Receive ``count`` owners from number ``first`` on, check every byte; return counters.

    Some are held for a while.  Raises AssertionError if one is lost, doubled, out of order or
    wrong.
    """
    held: deque[asyncvmm.Batch] = deque()
    chance = random.Random(first)
    for number in range(first, first + count):
        batch = await me.consumer.receive()
        (owner,) = batch
        # What came by ``send`` was filled before anybody knew its generation.
        generation = owner.generation if owner.metadata else 0
        if owner.key != number:
            raise AssertionError(f"{owner!r} came as number {number}")
        if not torch.equal(owner["x"], expected(number, generation, size_of(number))):
            raise AssertionError(f"{owner!r} of {size_of(number)} bytes is wrong")
        held.append(batch)
        while len(held) > 8 or (held and chance.random() < 0.5):
            held.popleft().release()
    for batch in held:
        batch.release()
    return vars(Counters.of())
