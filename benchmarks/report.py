"""A result file as tables: ``python -m benchmarks report OUT``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.rows import SCHEMA, Row, ratios
from benchmarks.table import show

Result = dict[str, Any]

BASES = ("floor_loop", "floor", "torch_mp")
"""What rates are compared with: the first of these that ran the workload."""

HEAD = (
    "transport", "loop", "per s", "(least-most)", "GB/s", "p50 us", "p99 us", "gap p99 ms",
    "CPU us", "wrong", "fallbacks", "of base",
)  # fmt: skip


def read(path: Path) -> Result:
    """Return a result file; end the program with a line if it is none, or of another schema."""
    try:
        result: Result = json.loads(path.read_text())
        schema = result.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"{path} is no result file: {error}") from None
    if schema != SCHEMA:
        raise SystemExit(
            f"{path} has schema {schema!r}, this report reads {SCHEMA}; run the benchmarks again"
        )
    return result


def by_workload(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of each workload, in the order they were run."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    return found


def tables(result: Result) -> None:
    """Write every table to standard output."""
    machine = result["machine"]
    where = ", ".join(str(machine[name]) for name in ("date", "cpu", "cores", "kernel", "python"))
    commit = machine["commit"][:12]
    show("machine", ("what", "value"), [("cpu", where), ("commit", commit), *_gpus(machine)], 2)
    for workload, rows in by_workload(result["rows"]).items():
        base = base_of(rows)
        name = f"{workload} (base: {base['transport']})" if base else workload
        show(name, HEAD, [cells(row, base) for row in rows], 2)
    skipped = {
        (skip["transport"], skip["workload"] or "everything", skip["reason"])
        for skip in result["skipped"]
    }
    failed = {
        (row["transport"], row["workload"], row["failed"])
        for row in result["rows"]
        if row.get("failed")
    }
    if skipped or failed:
        show("not run", ("transport", "workload", "why"), sorted(skipped | failed), 3)


def _gpus(machine: dict[str, Any]) -> list[tuple[str, str]]:
    return [("gpu", gpu) for gpu in machine["gpus"]]


def base_of(rows: list[Row], bases: tuple[str, ...] = BASES) -> Row | None:
    """Return the row that the others of a workload are compared with."""
    for name in bases:
        for row in rows:
            if row["transport"] == name and not row.get("failed"):
                return row
    return None


def cells(row: Row, base: Row | None) -> tuple[str, ...]:
    """Return one row of a table."""
    if row.get("failed"):
        return (row["transport"], row["loop"], "failed", *[""] * (len(HEAD) - 3))
    least, most = row["spread"].get("per_s", (None, None))
    compared = ratios(row, base, "per_s") if base and base is not row else []
    return (
        row["transport"],
        row["loop"],
        number(row["per_s"]),
        f"{number(least)}-{number(most)}",
        number(row["gbytes_per_s"]),
        number(row["p50_us"]),
        number(row["p99_us"]),
        number(row["gap_p99_ms"]),
        number(row["cpu_us"]),
        str(row["wrong"]),
        str(row["fallbacks"]),
        f"{statistics.median(compared):.2f}" if compared else "",
    )


def number(value: float | None) -> str:
    """Write a number with about three digits; nothing for none."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
