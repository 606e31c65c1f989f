"""Several result files as one: for a run that was taken in parts."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Result

SAME = ("commit", "cpu", "cores", "kernel", "python", "versions", "gpus")
"""What numbers must have in common to stand beside each other."""


def merge(results: Sequence[Result]) -> Result:
    """Return all rows of some results; of a row that is in several, the last.

    Ratios are only ever taken within one row's workload and rounds, so a part should hold all
    lanes of its workloads.  Raises ValueError if the parts are not of one machine, commit and
    choice of options.
    """
    first, *others = results
    for other in others:
        for name in SAME:
            _same(name, first["machine"].get(name), other["machine"].get(name))
        _same("options", first["options"], other["options"])
    rows = {
        (row["workload"], row["transport"], row["loop"], row["device"]): row
        for result in results
        for row in result["rows"]
    }
    skipped = {
        (skip["transport"], skip["workload"], skip["reason"]): skip
        for result in results
        for skip in result["skipped"]
    }
    return first | {"skipped": list(skipped.values()), "rows": list(rows.values())}


def _same(name: str, one: object, other: object) -> None:
    if one != other:
        raise ValueError(f"the parts differ in {name}, so they are no one run: {one} / {other}")
