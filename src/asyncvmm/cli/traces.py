"""``asyncvmm trace``: putting together what the processes of one run wrote."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from asyncvmm._errors import ArgumentError
from asyncvmm._io import chrome
from asyncvmm.cli import ends

traces = typer.Typer(name="trace", help="Work with timelines (trace=...).", no_args_is_help=True)


@traces.callback()
def about() -> None:
    """Work with the timelines that ``trace=...`` has an exporter and its consumers write."""


@traces.command()
def join(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    parts: Annotated[list[Path], typer.Argument(help="What exporters and consumers wrote.")],
) -> None:
    """Join the parts that the processes of one host wrote into one trace, for ui.perfetto.dev."""
    with ends.in_one_line():
        empty = [part for part in parts if part.is_file() and not part.stat().st_size]
        parts = [part for part in parts if part not in empty]
        typer.echo(f"{out}: {chrome.join(parts, out):,} events of {len(parts)} parts")
        if empty:  # an open end has them, or one that was killed
            typer.echo(f"nothing is in {', '.join(map(str, empty))}")


@contextlib.contextmanager
def joined(out: Path | None) -> Iterator[Path | None]:
    """Yield where an exporter is to write; what lies in that folder at the end goes to ``out``."""
    if out is None:
        yield None
        return
    if not out.parent.is_dir():
        raise ArgumentError(f"--trace {out}: there is no folder {out.parent}; make it first")
    try:
        beside = tempfile.TemporaryDirectory(prefix=".asyncvmm-trace-", dir=out.parent)
    except OSError as error:
        raise ArgumentError(
            f"--trace {out}: nothing can be written in {out.parent}: {error.strerror}"
        ) from None
    with beside as folder:
        try:
            yield Path(folder) / "exporter.json"
        finally:
            # Also after a failure: then a timeline is wanted most.  An empty part is of a process
            # that did not come to its end.
            parts = sorted(path for path in Path(folder).iterdir() if path.stat().st_size)
            if parts:
                chrome.join(parts, out)
