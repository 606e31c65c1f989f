"""``asyncvmm doctor``: its options, its table, and its exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from asyncvmm.cli import ends

if TYPE_CHECKING:
    from asyncvmm.cli.doctor.line import Report

_COLOURS = {"ok": "green", "degraded": "yellow", "missing": "red"}


def doctor(
    device: Annotated[
        str, typer.Option(help="The device the exit status is about: auto, cpu or cuda:N.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine can do, what it costs, and what to do about the rest.

    Each line is a trial of the real thing where there is one.  Exit status 1 means that the
    device that exporters take by default cannot work.
    """
    with ends.in_one_line():
        from asyncvmm.cli.doctor.examination import examine

        report = examine(device)
        if as_json:
            import msgspec

            typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
        else:
            _show(report)
        raise typer.Exit(0 if report.works else ends.FAILED)


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="asyncvmm doctor", title_justify="left", show_lines=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("state")
    table.add_column("measured, and what to do")
    for line in report.lines:
        said = Text(line.figure)
        if line.advice:
            said.append(f"\n{line.advice}", style="dim")
        table.add_row(line.name, Text(line.state, style=_COLOURS[line.state]), said)
    console = Console()
    console.print(table)
    works = "works here" if report.works else "cannot work here: see what is missing"
    console.print(Text(f"{report.device} {works}", style="bold"))
