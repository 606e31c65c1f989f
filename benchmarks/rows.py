"""From what the lanes reported to the rows of a result file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

SCHEMA = 1

REQUIRED = (
    "transport", "workload", "device", "loop", "per_s", "gbytes_per_s", "p50_us", "p99_us",
    "gap_p99_ms", "cpu_us", "fallbacks", "wrong",
)  # fmt: skip
"""What every row has.  A number that makes no sense for a row, or that was not reached, is null."""

SUMMED = ("fallbacks", "wrong", "lost", "waits", "handed_over")
"""Counts of all rounds; everything else is the median of the rounds."""

QUANTILES = 100


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile of sorted values."""
    return values[min(len(values) - 1, int(len(values) * q))]


def row(
    transport: str, workload: str, device: str, loop: str, rounds: list[dict[str, Any]], **more: Any
) -> Row:
    """Join the rounds of one lane: medians, spreads, sums, and the rounds themselves."""
    joined: Row = dict.fromkeys(REQUIRED)
    joined |= {"transport": transport, "workload": workload, "device": device, "loop": loop}
    joined |= {"fallbacks": 0, "wrong": 0}
    spread: dict[str, list[float]] = {}
    for name in dict.fromkeys(name for each in rounds for name in each):
        values = [each[name] for each in rounds if each.get(name) is not None]
        if not values or name == "quantiles_us":
            continue
        if name in SUMMED:
            joined[name] = sum(values)
        else:
            joined[name] = rounded(statistics.median(values))
            spread[name] = [rounded(min(values)), rounded(max(values))]
    curves = [each["quantiles_us"] for each in rounds if each.get("quantiles_us")]
    if curves:
        joined["quantiles_us"] = [
            rounded(statistics.median(points)) for points in zip(*curves, strict=True)
        ]
    kept = [
        {name: rounded(value) for name, value in each.items() if name != "quantiles_us"}
        for each in rounds
    ]
    return joined | {"spread": spread, "rounds": kept} | more


def latency_fields(seconds: Sequence[float]) -> dict[str, Any]:
    """Return p50, p99 and the whole distribution in microseconds."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        "p50_us": quantile(ordered, 0.5) * 1e6,
        "p99_us": quantile(ordered, 0.99) * 1e6,
        "quantiles_us": [quantile(ordered, i / QUANTILES) * 1e6 for i in range(QUANTILES + 1)],
    }


def ratios(ours: Row, base: Row, name: str) -> list[float]:
    """Return ours over theirs for each round that both have."""
    pairs = zip(ours["rounds"], base["rounds"], strict=False)
    return [a[name] / b[name] for a, b in pairs if a.get(name) and b.get(name)]


def rounded(value: Any) -> Any:
    """Keep four significant digits or the whole part of a float."""
    if not isinstance(value, float):
        return value
    return round(value) if abs(value) >= 1e4 else float(f"{value:.4g}")
