"""Tables on a terminal: rich's where it is installed, plain columns where it is not."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Write a table to standard output; the first ``left`` columns are text."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        sys.stdout.write(plain(title, head, rows, left))
        return
    table = Table(title=escape(title), title_justify="left")
    for at, name in enumerate(head):
        table.add_column(name, justify="left" if at < left else "right", no_wrap=not at)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def plain(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table of plain text."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [title]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n\n"
