"""How long things take: counted by powers of two, for always and for next to nothing.

One look at the clock and one addition per owner; sums, means and quantiles are worked out when
somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from asyncvmm._core.observation import BUCKETS

BOUNDS: tuple[float, ...] = tuple(1e-6 * (1 << power) for power in range(BUCKETS))
"""Seconds below which bucket 0, 1, 2, ... counts; the last one counts everything above, too.
From a microsecond to eighteen minutes, which a hand-off and a forgotten one lie between."""

_LAST = BUCKETS - 1


class Histogram:
    """Counts that only rise."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = [0] * 64  # more than any time has bits
        self.total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count what took so long, once or several times."""
        self._counts[int(seconds * 1e6).bit_length()] += times
        self.total += seconds * times

    def add_since(self, stamps: Sequence[float], now: float) -> None:
        """Count how long ago each was; those of one batch are equal and come together."""
        if len(stamps) == 1:
            return self.add(now - stamps[0])
        for stamp, same in groupby(stamps):
            self.add(now - stamp, sum(1 for _ in same))

    def latencies(self) -> Latencies:
        """Return what was counted so far."""
        counts = self._counts
        return Latencies((*counts[:_LAST], sum(counts[_LAST:])), self.total)


@dataclass(frozen=True, slots=True)
class Latencies:
    """How long something took so far: how often it fell below each bound, and the sum.

    ``counts[n]`` is how often it took less than 2**n microseconds and not less than half of that;
    the last one counts everything longer as well.
    """

    counts: tuple[int, ...]
    total: float
    """Seconds, all together."""

    @property
    def count(self) -> int:
        """How often it happened."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Seconds on average; 0.0 if it never happened."""
        return self.total / (self.count or 1)

    def quantile(self, share: float) -> float:
        """Return the seconds that a share (0 to 1) of them did not exceed; 0.0 of none.

        Within a bucket all are taken to lie evenly, so the answer is in the right bucket and may
        be off by half of it.
        """
        rank = share * self.count
        for bucket, count in enumerate(self.counts):
            if count and rank <= count:
                lower = BOUNDS[bucket - 1] if bucket else 0.0
                return lower + (BOUNDS[bucket] - lower) * max(0.0, rank) / count
            rank -= count
        return 0.0
