"""How the commands end where their output cannot be written."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import asyncvmm

FULL = Path("/dev/full")
ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, into: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command with its output there, or caught."""
    command = [sys.executable, "-m", "asyncvmm.cli", *arguments]
    if into is None:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    with into.open("w") as output:
        return subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["doctor", "--json"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    """Kills: a traceback."""
    done = run(*arguments, into=FULL)
    assert done.returncode == 1
    assert done.stderr == (
        "asyncvmm: cannot write the result: [Errno 28] No space left on device\n"
    )


def test_there_is_one_version() -> None:
    """Kills: a number in the metadata of the package that is another than the library's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run("--version").stdout == f"{asyncvmm.__version__}\n" == f"{project['version']}\n"
