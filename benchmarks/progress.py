"""What a run says while it goes on: a bar on a terminal, otherwise only what went wrong."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self


class Progress(Protocol):
    """Where a run has got to."""

    def step(self, text: str) -> None:
        """A lane has had its turn."""

    def done(self) -> None:
        """A workload is over."""

    def note(self, text: str) -> None:
        """Something was skipped or failed."""


class Quiet:
    """Says nothing but notes, on standard error."""

    def step(self, text: str) -> None:
        """Say nothing."""

    def done(self) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Write a line."""
        sys.stderr.write(text + "\n")


class Bar:
    """A bar of workloads on a terminal.

    It is drawn between turns and by no thread of its own, so it takes no time from what is
    measured.
    """

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns: tuple[Any, ...] = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        console = Console(stderr=True)
        self._bar = RichProgress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, text: str) -> None:
        """Show which lane it is."""
        self._bar.update(self._task, description=text, refresh=True)

    def done(self) -> None:
        """Move the bar."""
        self._bar.advance(self._task)
        self._bar.refresh()

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)
