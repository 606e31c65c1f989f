"""The plots of a result file, as PNG images: latency, rate over size, fan-out, loop gap."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.report import Result
from benchmarks.rows import Row
from benchmarks.workloads import WORKLOADS

_SIZES = ("16KiB", "64KiB", "2MiB", "36MiB", "20x1MiB")
_COUNTS = (1, 2, 4, 8)


def lane(row: Row) -> str:
    """Name a lane in a legend."""
    return row["transport"] if row["loop"] == "none" else f"{row['transport']} ({row['loop']})"


def _lanes(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows of each lane by workload."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not row.get("failed"):
            found.setdefault(lane(row), {})[row["workload"]] = row
    return found


def _colours(result: Result) -> dict[str, Any]:
    """Give each lane a colour that is its own in every plot."""
    from matplotlib import colormaps

    palette = [colormaps["tab20"](at) for at in (*range(0, 20, 2), *range(1, 20, 2))]
    lanes = _lanes(result["rows"])
    return {name: palette[at % len(palette)] for at, name in enumerate(lanes)}


def latency(axes: Any, result: Result) -> None:
    """Draw the share of closed hand-offs of 16 KiB that are done after a time."""
    colours = _colours(result)
    for name, rows in _lanes(result["rows"]).items():
        points = rows.get("closed_16KiB", {}).get("quantiles_us")
        if points:
            shares = [i / (len(points) - 1) for i in range(len(points))]
            axes.plot(points, shares, label=name, color=colours[name])
    axes.set(title="closed_16KiB: latency", xlabel="us", ylabel="share done", xscale="log")


def rate_over_size(axes: Any, result: Result) -> None:
    """Draw pipelined hand-offs per second over the bytes of each."""
    colours = _colours(result)
    for name, rows in _lanes(result["rows"]).items():
        found = [rows.get(f"pipelined_{size}") for size in _SIZES]
        points = sorted((row["nbytes"], row["per_s"]) for row in found if row and row["per_s"])
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name, color=colours[name])
    axes.set(
        title="pipelined: rate over payload", xlabel="bytes", ylabel="per s",
        xscale="log", yscale="log",
    )  # fmt: skip


def rate_over_consumers(axes: Any, result: Result) -> None:
    """Draw hand-offs per second over the number of consumers, both routes."""
    colours = _colours(result)
    for route, style in (("broadcast", "-"), ("compete", "--")):
        for name, rows in _lanes(result["rows"]).items():
            found = [(count, rows.get(f"fanout_{count}_{route}")) for count in _COUNTS]
            points = [(count, row["per_s"]) for count, row in found if row and row["per_s"]]
            if points:
                label = f"{name}, {route}"
                axes.plot(
                    *zip(*points, strict=True), style, marker="o", label=label, color=colours[name]
                )
    axes.set(title="fan-out: rate over consumers", xlabel="consumers", ylabel="per s", yscale="log")


def gaps(axes: Any, result: Result) -> None:
    """Draw the p99 of the producer's loop gap in every workload."""
    colours = _colours(result)
    measured = {row["workload"] for row in result["rows"] if row["gap_p99_ms"]}
    names = [name for name in WORKLOADS if name in measured]
    for label, rows in _lanes(result["rows"]).items():
        points = [
            (at, rows[name]["gap_p99_ms"])
            for at, name in enumerate(names)
            if name in rows and rows[name]["gap_p99_ms"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", label=label, color=colours[label])
    axes.axhline(2.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=75, fontsize=7)
    axes.set(title="event-loop gap beside it (line: 2 ms)", ylabel="p99 ms", yscale="log")


PLOTS: dict[str, Callable[[Any, Result], None]] = {
    "latency": latency,
    "rate-over-size": rate_over_size,
    "rate-over-consumers": rate_over_consumers,
    "loop-gap": gaps,
}


def draw(result: Result) -> dict[str, bytes]:
    """Return every plot that has something to show.  Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    images = {}
    for name, plot in PLOTS.items():
        figure = Figure(figsize=(10, 5.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        plot(axes, result)
        handles, labels = axes.get_legend_handles_labels()
        if not labels:
            continue
        axes.grid(alpha=0.3)
        figure.legend(handles, labels, loc="outside right upper", fontsize=7)
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=110)
        images[name] = data.getvalue()
    return images
