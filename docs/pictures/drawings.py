"""Draw the pictures of the documentation that are drawings.

    python docs/pictures/drawings.py            # writes the SVG files beside this one

Needs matplotlib (the ``docs`` extra).  The SVG files are committed, so that nobody needs to run
this to read the documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent

INK, QUIET = "#1f2937", "#6b7280"
BLUE, GREEN, AMBER, RED, GREY = "#dbeafe", "#dcfce7", "#fef3c7", "#fee2e2", "#f3f4f6"
EDGE = {BLUE: "#2563eb", GREEN: "#16a34a", AMBER: "#d97706", RED: "#dc2626", GREY: "#9ca3af"}


class Drawing:
    """A sheet whose units are tenths of an inch."""

    def __init__(self, name: str, width: float, height: float) -> None:
        self.name = name
        self.figure = Figure(figsize=(width / 10, height / 10), facecolor="white")
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(0, height)
        self.axes.axis("off")

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", **style: Any
    ) -> None:
        """Draw a box with its lower left corner there, and its text in the middle or on top."""
        colour = style.pop("colour", GREY)
        on_top = style.pop("on_top", False)
        self.axes.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=1.2",
                facecolor=colour,
                edgecolor=EDGE[colour],
                linewidth=1.4,
            )
        )
        at = y + height - 1.2 if on_top else y + height / 2
        self.text(x + width / 2, at, text, va="top" if on_top else "center", **style)

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write text, centred unless asked otherwise."""
        wanted = {"ha": "center", "va": "center", "fontsize": 10, "color": INK, **style}
        self.axes.text(x, y, text, **wanted)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], text: str = "", **style: Any
    ) -> None:
        """Draw an arrow, with its text beside the middle (``off`` says how far)."""
        bend, off = style.pop("bend", 0.0), style.pop("off", (0.0, 1.6))
        colour = style.pop("colour", INK)
        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>",
                mutation_scale=13,
                color=colour,
                linewidth=1.4,
                shrinkA=0,
                shrinkB=0,
                linestyle=style.pop("line", "-"),
            )
        )
        if text:
            middle = ((start[0] + end[0]) / 2 + off[0], (start[1] + end[1]) / 2 + off[1])
            self.text(*middle, text, **{"fontsize": 9, "color": QUIET, **style})

    def save(self) -> None:
        """Write it as SVG, with text as text."""
        self.figure.savefig(HERE / f"{self.name}.svg", metadata={"Date": None})


def overview() -> Drawing:
    """One exporter, one pool, two ranks."""
    d = Drawing("overview", 100, 47)
    d.box(2, 10, 27, 35, "encoder's process", on_top=True, colour=BLUE, weight="bold")
    d.box(71, 28.5, 27, 16.5, "rank 0's process", on_top=True, colour=GREEN, weight="bold")
    d.box(71, 10, 27, 16.5, "rank 1's process", on_top=True, colour=GREEN, weight="bold")
    d.box(5, 29.5, 21, 8, 'await exporter.send(\n{"image_0": features})', fontsize=8.5)
    d.box(5, 13, 21, 8, "await acknowledgement", fontsize=8.5)
    for y in (31, 12.5):
        d.box(74, y, 21, 8, 'owner["image_0"]:\na read-only view', fontsize=8.5)
    d.box(38, 10, 24, 35, "the pool: memory that\nall of them map", on_top=True, colour=AMBER)
    states = ("held", "held", "draining", "free")
    for number, state in enumerate(states):
        colour = AMBER if state == "held" else GREY
        y = 31.5 - number * 6.2
        d.box(41, y, 18, 4.6, f"slot {number}: {state}", fontsize=8.5, colour=colour)
    d.arrow((26, 33.6), (41, 33.9), "one copy,\nor none", off=(0, 3), fontsize=8.5)
    d.arrow((74, 34.8), (59, 34.2), "looks", off=(0, 1.6), fontsize=8.5)
    d.arrow((74, 17), (59, 32.9), "looks", off=(2.6, 1.8), fontsize=8.5)
    d.axes.plot([84.5, 84.5, 15.5], [12.5, 5.5, 5.5], color=QUIET, lw=1.4, ls=(0, (4, 3)))
    d.arrow((15.5, 5.5), (15.5, 13), colour=QUIET)
    d.text(50, 3.4, "both let go, and their reads are over", fontsize=8.5, color=QUIET)
    return d


def slot_life() -> Drawing:
    """The states of a slot, and what moves it on."""
    d = Drawing("slot-life", 104, 48)
    d.box(3, 27, 15, 8, "free", weight="bold")
    d.box(31, 27, 15, 8, "filling", colour=BLUE, weight="bold")
    d.box(59, 27, 15, 8, "held", colour=GREEN, weight="bold")
    d.box(87, 27, 15, 8, "draining", colour=AMBER, weight="bold")
    d.box(59, 3, 15, 8, "quarantined", colour=RED, weight="bold")
    d.arrow((18, 31), (31, 31), "taken by a send\nor a reservation", off=(0, -3.2))
    d.arrow((46, 31), (59, 31), "published", off=(0, 1.7))
    d.arrow((74, 31), (87, 31), "the last\nlets go", off=(0, 3.2))
    d.arrow((94.5, 35), (10.5, 35), bend=0.17)
    d.text(52, 44.2, "the device is done with its bytes", fontsize=9, color=QUIET)
    d.arrow((38.5, 27), (90, 27), bend=0.2)
    d.text(38, 20.2, "given up unpublished", fontsize=9, color=QUIET)
    d.arrow((63, 27), (63, 11))
    d.text(
        60,
        15.4,
        "all who hold it lost their\nlink, and are alive",
        ha="right",
        fontsize=9,
        color=QUIET,
    )
    d.arrow((70, 11), (70, 27), "one is\nback", off=(3.8, -4))
    d.arrow((74, 7), (97, 27), bend=0.25)
    d.text(93, 10, "a late release, or\nits process ended", fontsize=9, color=QUIET)
    return d


def hand_off() -> Drawing:
    """What travels between two processes for one owner, and what does not."""
    d = Drawing("hand-off", 104, 66)
    left, right = 22, 82
    d.box(left - 15, 58, 30, 6, "exporter", colour=BLUE, weight="bold")
    d.box(right - 15, 58, 30, 6, "consumer", colour=GREEN, weight="bold")
    d.axes.plot([left, left], [6, 58], color="#d1d5db", linewidth=1.4, zorder=0)
    d.axes.plot([right, right], [16, 58], color="#d1d5db", linewidth=1.4, zorder=0)

    def step(x: float, y: float, text: str, colour: str) -> None:
        d.box(x - 19, y, 38, 5.6, text, colour=colour, fontsize=9)

    step(left, 50, "send: take a slot and a chunk, or wait", GREY)
    step(left, 42.4, "queue the copies, record the ready event", BLUE)
    d.arrow((left + 19, 45), (right - 19, 35), colour=EDGE[BLUE])
    d.text(52, 45.4, "packet: slot, generation,\nnames, dtypes, shapes", fontsize=9, color=QUIET)
    step(right, 32.2, "its stream waits for the ready event", GREEN)
    step(right, 24.6, 'owner["x"]: views of the same bytes', GREEN)
    step(right, 17, "release: record its event behind the reads", GREEN)
    d.arrow((right - 19, 19.6), (left + 19, 11.6), colour=EDGE[GREEN])
    d.text(52, 19.8, "packet: slot,\ngeneration", fontsize=9, color=QUIET)
    step(left, 8.6, "draining until that event is done", AMBER)
    d.text(left, 4.2, "then free, and the acknowledgement is done", fontsize=9)
    d.text(
        right,
        8,
        "no payload byte, no descriptor and no new\nevent crosses the socket, and"
        "\nnobody waits for the GPU on the host",
        fontsize=9,
        color=QUIET,
        style="italic",
    )
    return d


def waiting() -> Drawing:
    """Who waits for what."""
    d = Drawing("waiting", 96, 40)
    rows = [
        ("await exporter.send(...)", "a slot and a gap of bytes", "a release, a refusal, a death"),
        ("await acknowledgement", "everybody who was to see it", "their last release or death"),
        ("await exporter.drain()", "every owner that is out", "the same"),
        ("async for batch in consumer", "the next batch", "a publication, the end, a loss"),
        ("the consumer's stream", "the ready event", "the exporter's copies on the device"),
        ("a draining slot", "the consumer's event", "its reads on the device"),
    ]
    d.text(16, 37, "who waits", weight="bold")
    d.text(48, 37, "for what", weight="bold")
    d.text(80, 37, "what ends it", weight="bold")
    for number, (who, what, end) in enumerate(rows):
        y = 30 - number * 5.6
        colour = BLUE if number < 3 else GREEN if number == 3 else AMBER
        d.box(2, y, 28, 4.6, who, colour=colour, fontsize=9)
        d.box(35, y, 26, 4.6, what, fontsize=9)
        d.box(66, y, 28, 4.6, end, fontsize=9)
        d.arrow((30, y + 2.3), (35, y + 2.3))
        d.arrow((66, y + 2.3), (61, y + 2.3))
    return d


def main() -> None:
    """Draw them all."""
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "asyncvmm"
    mpl.rcParams["font.family"] = "sans-serif"
    for draw in (overview, slot_life, hand_off, waiting):
        draw().save()


if __name__ == "__main__":
    main()
