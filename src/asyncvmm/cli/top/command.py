"""``asyncvmm top``: its options, and how it goes on looking."""

from __future__ import annotations

import signal
import time
from contextlib import closing, suppress
from types import FrameType
from typing import Annotated

import msgspec
import typer

from asyncvmm.cli import ends
from asyncvmm.cli.observing import Watch

ANSWER_SECONDS = 0.5
"""How long one look waits for answers: an exporter answers within one turn of its loop."""


def top(
    name: Annotated[
        str | None, typer.Argument(help="An exporter's name; all of this user's without it.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per look, a list of exporters.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    secret: Annotated[
        str, typer.Option(envvar="ASYNCVMM_SECRET", help="The exporter's secret, if it has one.")
    ] = "",
) -> None:
    """Show what running exporters hold, for whom, since when, and who is late.

    It asks each exporter over its own socket and can do nothing but look.  Exit status 1 if the
    exporter that was named is not there or ends.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    names = [] if name is None else [name]
    # Ctrl-C is how one leaves it.
    with (
        ends.in_one_line(),
        suppress(KeyboardInterrupt),
        closing(Watch(names, secret.encode())) as watch,
    ):
        if as_json:
            _print(watch, interval, once=once)
        else:
            _draw(watch, interval, once=once)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _print(watch: Watch, interval: float, *, once: bool) -> None:
    from asyncvmm.cli.top.view import view

    while True:
        typer.echo(
            msgspec.json.encode([view(each) for each in watch.look(ANSWER_SECONDS)]).decode()
        )
        if once:
            return
        time.sleep(interval)


def _draw(watch: Watch, interval: float, *, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from asyncvmm.cli.top.screen import screen

    console = Console()
    if once or not console.is_terminal:
        while True:
            console.print(screen(watch.look(ANSWER_SECONDS)))
            console.file.flush()
            if once:
                return
            time.sleep(interval)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(screen(watch.look(ANSWER_SECONDS)), refresh=True)
            time.sleep(interval)
