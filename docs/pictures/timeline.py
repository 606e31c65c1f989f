"""Run a small stream with a slow rank, and draw the timeline that it wrote.

    python docs/pictures/timeline.py            # writes timeline.png beside this file

The picture shows what ui.perfetto.dev shows of the same file, in fewer colours.  Needs matplotlib
(the ``docs`` extra).
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Patch

import asyncvmm
from asyncvmm._io import chrome

HERE = Path(__file__).parent
OWNERS, SLOTS = 14, 4
WORK = (0.004, 0.011)
"""Seconds that each rank works on an owner."""

COLOURS = {
    "filling": "#93c5fd",
    "held": "#86efac",
    "draining": "#fcd34d",
    "delivered": "#d1d5db",
    "in hand": "#86efac",
    "viewed": "#c4b5fd",
    "wait": "#fda4af",
}


async def stream(folder: Path) -> None:
    """Send owners to two ranks, of which one is slow."""
    name = f"@timeline-{os.getpid()}"
    arguments = [sys.executable, __file__, name, str(folder)]
    ranks = [await asyncio.create_subprocess_exec(*arguments, str(rank)) for rank in range(2)]
    async with asyncvmm.open_exporter(
        name,
        device="cpu",
        pool_bytes="1MiB",
        slots=SLOTS,
        route=asyncvmm.Broadcast(2),
        trace=folder / "exporter.json",
    ) as exporter:
        await exporter.wait_attached(2)
        for number in range(OWNERS):
            await exporter.send({"x": torch.ones(4096)}, key=f"r{number}")
            await asyncio.sleep(0.002)
    for process in ranks:
        await process.wait()


async def rank_side(name: str, folder: str, rank: int) -> None:
    """Look at each owner for a while."""
    async with asyncvmm.connect(
        name, rank=rank, wait=True, trace=f"{folder}/rank-{rank}.json"
    ) as consumer:
        async for batch in consumer:
            async with batch:
                for owner in batch:
                    with owner:
                        owner["x"].sum()
                        await asyncio.sleep(WORK[rank])


def draw(trace: Path, out: Path) -> None:
    """Draw a joined trace."""
    events: list[dict[str, Any]] = msgspec.json.decode(trace.read_bytes())["traceEvents"]
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    ends = {
        event["pid"]: event["args"]["name"].split(" @")[0].split(",")[0]
        for event in events
        if event["name"] == "process_name"
    }
    tracks = sorted(named, key=lambda track: (track[0], named[track].startswith("slot"), track[1]))
    rows = {track: -number - track[0] * 0.6 for number, track in enumerate(tracks)}
    start = min(event["ts"] for event in events if "ts" in event)
    figure = Figure(figsize=(11.5, 5.6), facecolor="white")
    axes: Axes = figure.add_axes((0.17, 0.12, 0.82, 0.82))
    for event in events:
        if event["ph"] == "X":
            _draw_slice(axes, event, rows[event["pid"], event["tid"]], start)
    _draw_arrows(axes, events, rows, start)
    axes.set_yticks(
        [rows[track] for track in tracks], [f"{ends[t[0]]}  {named[t]}" for t in tracks], fontsize=8
    )
    axes.set_xlabel("milliseconds", loc="right")
    axes.set_title("each owner in its slot, at the exporter and at each rank", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=phase) for phase, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False)
    figure.savefig(out, dpi=100)


def _draw_slice(axes: Axes, event: dict[str, Any], row: float, start: float) -> None:
    began, width = (event["ts"] - start) / 1000, event["dur"] / 1000
    colour = COLOURS.get(event["name"])
    if colour is None:  # the life itself: a frame with its name
        axes.barh(row, width, left=began, height=0.8, fill=False, edgecolor="#374151", lw=0.7)
        axes.text(began + 0.3, row, event["name"], fontsize=7, va="center")
    else:
        axes.barh(row, width, left=began, height=0.8, color=colour)


def _draw_arrows(
    axes: Axes, events: list[dict[str, Any]], rows: dict[tuple[int, int], float], start: float
) -> None:
    leave = {event["id"]: event for event in events if event["ph"] == "s"}
    for event in events:
        if event["ph"] == "f" and (other := leave.get(event["id"])) is not None:
            ends = [
                ((each["ts"] - start) / 1000, rows[each["pid"], each["tid"]])
                for each in (other, event)
            ]
            axes.add_artist(
                ConnectionPatch(ends[0], ends[1], "data", "data", color="#9ca3af", lw=0.4)
            )


def main() -> None:
    """Stream, join what the three processes wrote, and draw it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(stream(folder))
        chrome.join(sorted(folder.glob("*.json")), folder / "all.json")
        draw(folder / "all.json", HERE / "timeline.png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(rank_side(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    else:
        main()
