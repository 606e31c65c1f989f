"""The same computation once more, in one process and without the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncvmm.cli.demo import images, model
from asyncvmm.cli.demo.exporter_side import encode
from asyncvmm.cli.demo.plan import Plan


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the ranks' results compare with the reference."""

    mismatches: int
    """Results that differ from the reference, or that came more often than they should."""
    lost: int
    """Results that should have come and did not."""


def digests(
    plan: Plan, source: images.Images, encoder: model.Encoder, progress: Callable[[], None]
) -> list[Counter[tuple[str, str]]]:
    """Compute what each rank should have told; under Compete, what all together should have."""
    shards = range(plan.ranks if plan.route == "broadcast" else 1)
    ranks = [model.build_rank(plan.device, shard) for shard in shards]
    expected = [Counter[tuple[str, str]]() for _ in shards]
    for index in range(plan.batches):
        features = encode(encoder, images.request(source, index))
        local = {name: feature.to(plan.device) for name, feature in features.items()}
        with torch.inference_mode():
            grid = local.pop("grid")
            for rank, seen in zip(ranks, expected, strict=True):
                seen[f"request-{index}", model.digest(rank(list(local.values()), grid))] += 1
        progress()
    return expected


def compare(expected: list[Counter[tuple[str, str]]], told: list[list[tuple[str, str]]]) -> Verdict:
    """Compare each rank's results, or the sum over all ranks if they competed.

    A result with the right key and the wrong bytes is a mismatch, and not lost as well.
    """
    if len(expected) == 1:
        told = [[result for results in told for result in results]]
    mismatches = lost = 0
    for wanted, results in zip(expected, told, strict=True):
        wrong = Counter(results) - wanted
        missing = Counter(key for key, _ in (wanted - Counter(results)).elements())
        mismatches += wrong.total()
        lost += (missing - Counter(key for key, _ in wrong.elements())).total()
    return Verdict(mismatches, lost)
