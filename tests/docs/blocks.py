"""Reads the code blocks of a Markdown page.

A page's blocks are of three kinds:

- ``python`` with ``title="name.py"`` is a program; a ``console`` block of the page runs it;
- ``python`` without a title is a fragment, run as the body of a coroutine in the *setting* that a
  comment in the line above names: ``<!-- setting: exporter -->`` (see settings.py);
- ``console`` is run by a shell in the page's own folder: lines with ``$`` are commands, the others
  must be among what is printed, with ``...`` for anything.

Other languages are for reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_FENCE = re.compile(
    r"^(?:<!-- setting: (?P<setting>[^\n]*) -->\n)?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    title: str = ""
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return every page that is read by people."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            page=str(path.relative_to(ROOT)),
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            text=found["text"],
            title=found["title"] or "",
            setting=found["setting"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


ALL = [block for path in pages() for block in blocks_of(path)]
