"""One self-contained HTML page of a result file, with the plots inside."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.report import HEAD, Result, base_of, by_workload, cells
from benchmarks.targets import Verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 2rem; font-size: 13px }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% }
.missed { background: #fdecea } .impossible { background: #fdf6e3 }
.met { background: #eaf7ea }
"""


def page(result: Result, images: Mapping[str, bytes], verdicts: Sequence[Verdict]) -> str:
    """Return the page."""
    machine = result["machine"]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>asyncvmm benchmarks</title>',
        f"<style>{_STYLE}</style><h1>Hand-offs compared</h1>",
        _table(("", ""), [(name, str(value)) for name, value in machine.items()]),
        "<h2>Targets</h2>",
        _table(
            ("target", "needed", "seen", "verdict"),
            [(v.about, v.needed, v.seen, v.word) for v in verdicts],
            [v.word for v in verdicts],
        ),
    ]
    for name, image in images.items():
        data = base64.b64encode(image).decode()
        parts.append(f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">')
    for workload, rows in by_workload(result["rows"]).items():
        base = base_of(rows)
        compared = f", compared with {base['transport']}" if base else ""
        parts.append(f"<h2>{escape(workload)}{escape(compared)}</h2>")
        parts.append(_table(HEAD, [cells(row, base) for row in rows]))
    failed = [(r["transport"], r["workload"], r["failed"]) for r in result["rows"] if "failed" in r]
    skipped = [(s["transport"], s["workload"], s["reason"]) for s in result["skipped"]]
    if failed or skipped:
        parts += ["<h2>Not run</h2>", _table(("transport", "workload", "why"), failed + skipped)]
    return "\n".join([*parts, "</html>"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    lines = ["<table><tr>", *(f"<th>{escape(name)}</th>" for name in head), "</tr>"]
    for at, row in enumerate(rows):
        kind = f' class="{classes[at]}"' if classes else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return "".join([*lines, "</table>"])
