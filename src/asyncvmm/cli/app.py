"""The commands and their options.  What they do is imported when they run."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from asyncvmm import __version__
from asyncvmm.cli.demo.command import demo
from asyncvmm.cli.doctor.command import doctor
from asyncvmm.cli.top.command import top
from asyncvmm.cli.traces import traces

app = typer.Typer(
    name="asyncvmm",
    help="Move tensors between processes without moving the bytes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.add_typer(traces)
app.command()(top)
app.command()(doctor)


def show_version(wanted: bool) -> None:
    """Print the version and leave, if that was asked for."""
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the library's log on standard error.")
    ] = False,
) -> None:
    """Move tensors between processes without moving the bytes."""
    # Without --verbose a command says itself, once, what went wrong.
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("asyncvmm").setLevel(logging.INFO if verbose else logging.ERROR)
