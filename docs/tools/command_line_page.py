"""Write docs/reference/command-line.md from the command's own help.

python docs/tools/command_line_page.py      # writes the page; a test says when it is stale
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from asyncvmm.cli.app import app

PAGE = Path(__file__).parent.parent / "reference" / "command-line.md"

INTRODUCTION = """\
# Command line

<!-- Written by docs/tools/command_line_page.py from the commands themselves; change those. -->

`asyncvmm` is installed with the package; `python -m asyncvmm.cli` is the same command. An error of
this library is one line on standard error. The exit status is 0 if all went well, 1 if it did not,
2 for arguments that can never work, 130 after Ctrl-C and 143 after SIGTERM.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([INTRODUCTION, *_commands("asyncvmm", app)])


def _commands(name: str, of: typer.Typer) -> Iterator[str]:
    for command in of.registered_commands:
        if command.callback is not None:
            yield _command(f"{name} {command.name or command.callback.__name__}", command.callback)
    for group in of.registered_groups:
        inner = group.typer_instance
        if inner is not None:
            yield from _commands(f"{name} {group.name or inner.info.name}", inner)


def _command(name: str, callback: Callable[..., object]) -> str:
    hints = get_type_hints(callback, include_extras=True)
    rows = []
    for parameter in inspect.signature(callback).parameters.values():
        kind, info = get_args(hints[parameter.name])
        rows.append(_row(parameter.name, kind, info, parameter.default))
    table = "| | | default |\n|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return f"## `{name}`\n\n{inspect.cleandoc(callback.__doc__ or '')}\n\n{table}"


def _row(name: str, kind: Any, info: Any, default: object) -> str:
    if isinstance(info, typer.models.ArgumentInfo):
        names = f"`{name.upper()}`"
    else:
        # Inside Annotated[...] typer takes its first name for a default until it is used.
        first = [info.default] if str(info.default).startswith("-") else []
        declared = [*first, *(info.param_decls or [])] or [f"--{name.replace('_', '-')}"]
        names = ", ".join(f"`{each}`" for each in declared)
    text = info.help or ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        text += " One of " + ", ".join(f"`{each.value}`" for each in kind) + "."
    shown = default not in (None, False, "", inspect.Parameter.empty)
    value = default.value if isinstance(default, Enum) else default
    return f"| {names} | {text} | {f'`{value}`' if shown else ''} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
