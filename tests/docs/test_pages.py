"""The documentation as a whole: generated pages are current, the site builds, links lead on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import asyncvmm.blocking
import asyncvmm.testing
import asyncvmm.tickets
from docs.tools import command_line_page, wire_page
from tests.docs.blocks import ROOT, pages

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_LOADED = re.compile(r'<(?:script|img|iframe|link)[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"')


def test_the_wire_format_is_that_of_the_messages() -> None:
    """Kills the planted bug of a field that was added and is not in the page."""
    assert wire_page.PAGE.read_text(encoding="utf-8") == wire_page.page(), (
        "run `make docs`, which writes docs/wire.md anew"
    )


def test_the_command_line_is_that_of_the_commands() -> None:
    """Kills the planted bug of an option that was added and is not in the page."""
    page = command_line_page.PAGE.read_text(encoding="utf-8")
    assert page == command_line_page.page(), (
        "run `make docs`, which writes docs/reference/command-line.md anew"
    )


def test_every_public_name_is_in_the_reference() -> None:
    """Kills the planted bug of a class that is exported and described nowhere."""
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")
    )
    described = set(re.findall(r"^::: (asyncvmm\.\S+)$", text, re.MULTILINE))
    names = {
        f"{module.__name__}.{name}"
        for module in (asyncvmm, asyncvmm.blocking, asyncvmm.testing, asyncvmm.tickets)
        for name in module.__all__
        if not name.startswith("__")
    }
    # Tickets are in both places, and described in one.
    twice = {f"asyncvmm.tickets.{name}" for name in asyncvmm.__all__}
    assert names - described - twice == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_is_in_a_table(page: Path) -> None:
    """Kills the planted bug of a blank line before a row, which is text then and no row."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert re.match(r".*\n\|[|:\- ]+\n", table), f"no table begins with {table}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """Kills the planted bug of a file that was moved; links must work on the forge's pages, too."""
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_the_layers_are_those_that_are_checked() -> None:
    """Kills the planted bug of a layer that was added and is not in the design."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (checked,) = (
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["name"] == "layers of the package"
    )
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = design.partition("## Layers\n")[2].split("```")[1].strip()
    shown = [line.split("  ")[0] for line in block.splitlines()]
    assert shown == [re.sub(r"[()]", "", layer) for layer in checked]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Kills the planted bugs of a page outside the navigation, and of a font from a far server."""
    pytest.importorskip("mkdocs", reason="building the site needs the extra docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    html = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")]
    assert len(html) > 20
    assert [found for text in html for found in _LOADED.findall(text)] == []
