"""What payloads hold, and whether they arrived whole.

Every hand-off has a number.  A *checked* one is compared byte for byte where it arrives; timed
ones are handed over by the same code and not looked at.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from benchmarks.setting import Payload

CHECKED = 1 << 40
"""Added to the number of a hand-off whose bytes are to be compared."""

_VARIANTS = 4
_STEP = 256
"""Bytes by which the variants and features are shifted; views stay aligned for any copy."""
_PERIOD = 65_537
"""A prime number of random bytes repeats, so that no two shifts look alike."""


class Contents:
    """The features of each hand-off: slices of one random tensor, chosen by its number.

    Whoever shows a consumer what an earlier hand-off left in the same memory is found out in
    three cases of four.
    """

    def __init__(self, payload: Payload, device: str) -> None:
        self.payload = payload
        block = torch.randint(
            0, 256, (_PERIOD,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)
        )
        nbytes = payload.nbytes + _STEP * _VARIANTS * payload.count
        base = block.repeat(-(-nbytes // _PERIOD))[:nbytes].to(device)
        self._features = [
            [self._slice(base, variant * payload.count + index) for index in range(payload.count)]
            for variant in range(_VARIANTS)
        ]
        names = [f"x{index}" for index in range(payload.count)]
        self.names = names
        self._mappings = [dict(zip(names, features, strict=True)) for features in self._features]

    def _slice(self, base: torch.Tensor, shift: int) -> torch.Tensor:
        return base[shift * _STEP : shift * _STEP + self.payload.nbytes]

    def features(self, number: int) -> list[torch.Tensor]:
        """Return the features of a hand-off."""
        return self._features[variant(number)]

    def mapping(self, number: int) -> dict[str, torch.Tensor]:
        """Return the features of a hand-off by their names."""
        return self._mappings[variant(number)]

    def right(self, number: int, features: Sequence[torch.Tensor]) -> bool:
        """Say whether these are the features of that hand-off, byte for byte.

        They may be on another device: torch.multiprocessing leaves them on the producer's.
        """
        expected = self.features(number)
        return len(expected) == len(features) and all(
            torch.equal(mine, theirs.to(mine.device))
            for mine, theirs in zip(expected, features, strict=True)
        )


_ORDER = random.Random(7).choices(range(_VARIANTS), k=251)
"""Of a prime length, so that no number of slots is in step with it."""


def variant(number: int) -> int:
    """Return which variant a number has: by chance, and always the same."""
    return _ORDER[number % len(_ORDER)]
