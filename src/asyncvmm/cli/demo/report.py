"""What the demo says at the end: one JSON object, or a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from asyncvmm.cli.demo.exporter_side import Streamed
from asyncvmm.cli.demo.plan import Plan
from asyncvmm.cli.demo.reference import Verdict


class Slots(msgspec.Struct, frozen=True):
    """The control table after the last acknowledgement."""

    total: int
    free: int


class HandoffUs(msgspec.Struct, frozen=True):
    """From ``send`` to acknowledgement, microseconds; the ranks' own work is in it."""

    p50: float
    p99: float


class LoopGapMs(msgspec.Struct, frozen=True):
    """How late the exporter's loop came back to a waiting task, milliseconds."""

    p99: float
    max: float


class Report(msgspec.Struct, frozen=True):
    """The object that ``--json`` prints."""

    device: str
    route: str
    ranks: int
    batches: int
    bytes: int
    verified: bool
    mismatches: int
    lost: int
    slots: Slots
    waits: int
    handoff_us: HandoffUs
    batches_per_s: float
    gbytes_per_s: float
    loop_gap_ms: LoopGapMs
    copies_per_batch: float
    """How often a payload was copied on its way to all ranks, as the library counted."""

    @property
    def passed(self) -> bool:
        """True if every result was right and every slot came back."""
        return self.verified and self.slots.free == self.slots.total


def summarize(plan: Plan, streamed: Streamed, verdict: Verdict) -> Report:
    """Join what was measured with what was compared."""
    statistics = streamed.statistics
    wall = streamed.wall or math.inf
    return Report(
        device=plan.device,
        route=plan.route,
        ranks=plan.ranks,
        batches=plan.batches,
        bytes=streamed.payload_bytes,
        verified=verdict.mismatches == 0 and verdict.lost == 0,
        mismatches=verdict.mismatches,
        lost=verdict.lost,
        slots=Slots(
            total=statistics.slots.total if statistics else 0,
            free=statistics.slots.free if statistics else 0,
        ),
        waits=statistics.waits if statistics else 0,
        handoff_us=HandoffUs(
            p50=round(percentile(streamed.handoffs, 50) * 1e6, 1),
            p99=round(percentile(streamed.handoffs, 99) * 1e6, 1),
        ),
        batches_per_s=round(plan.batches / wall, 2),
        gbytes_per_s=round(streamed.payload_bytes / wall / 1e9, 6),
        loop_gap_ms=LoopGapMs(
            p99=round(percentile(streamed.loop_gaps, 99) * 1e3, 3),
            max=round(max(streamed.loop_gaps, default=0.0) * 1e3, 3),
        ),
        copies_per_batch=(statistics.copies if statistics else 0) / plan.batches,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile, 0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def tell(report: Report, *, as_json: bool) -> None:
    """Print the report on standard output: one line of JSON, or a table."""
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        _show(report)


def _show(report: Report) -> None:
    table = Table(title="asyncvmm demo", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    verdict = (
        "[green]every result, bit by bit[/]"
        if report.verified
        else f"[red]no: {report.mismatches} results differ, {report.lost} are lost[/]"
    )
    rows = {
        "device": report.device,
        "route": f"{report.route}, {report.ranks} rank{'s' * (report.ranks > 1)}",
        "batches": f"{report.batches:,}",
        "payload": f"{report.bytes:,} bytes",
        "verified": verdict,
        "slots free": f"{report.slots.free} of {report.slots.total}",
        "sends that waited": f"{report.waits:,}",
        "send to acknowledgement": (
            f"p50 {report.handoff_us.p50:,.0f} us, p99 {report.handoff_us.p99:,.0f} us"
        ),
        "throughput": f"{report.batches_per_s:,.1f} batches/s, {report.gbytes_per_s:.3f} GB/s",
        "loop gap": f"p99 {report.loop_gap_ms.p99:.2f} ms, max {report.loop_gap_ms.max:.2f} ms",
        "copies per batch": f"{report.copies_per_batch:g}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
