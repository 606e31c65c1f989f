"""Every code block of the README and the documentation is run; see blocks.py for how."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs import preloaded
from tests.docs.blocks import ALL, ROOT, Block
from tests.docs.settings import COMMON, SETTINGS
from tests.patience import PROMPTLY

NOT_HERE = {
    r"make .*": "it would make a virtual environment; continuous integration starts with it",
    r"asyncvmm demo .*--trace.*": "tests/cli/test_trace.py runs it",
    r"python -m examples\.multimodal.*": "tests/test_examples.py runs it",
    r"source \.venv/bin/activate": "it would make a virtual environment",
    r"git clone .*": "the test is in the clone",
    r"(python -m )?pip install .*": "it needs a package index",
    r"nvidia-.*|asyncvmm .*--device cuda.*|CUDA_.*": "it needs a GPU",
    r"\.venv/bin/.*": "it needs the virtual environment that make makes",
}
"""Commands that are not run, and why."""

PROGRAMS = [block for block in ALL if block.title]
FRAGMENTS = [block for block in ALL if block.language == "python" and not block.title]
CONSOLES = [block for block in ALL if block.language == "console"]
READ_ONLY = {"text", "yaml", "json", "ini", "promql", ""}


def commands(block: Block) -> list[str]:
    """Return the commands of a console block that are run here."""
    found = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    return [line for line in found if not any(re.fullmatch(skip, line) for skip in NOT_HERE)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the private names, and for what a page writes."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return tmp_path


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the Python that has torch already listens."""
    address = tmp_path_factory.mktemp("python") / "socket"
    command = [sys.executable, preloaded.__file__, str(address)]
    # Two programs that print into one pipe without a buffer mix their lines.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield address
        server.kill()


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    """Kills the planted bug of a block that no test looks at because of its first line."""
    for block in ALL:
        assert block.language in READ_ONLY | {"python", "console"}, block
    for path in {block.page for block in ALL}:
        text = (ROOT / path).read_text(encoding="utf-8")
        fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
        assert fences == 2 * sum(block.page == path for block in ALL), f"a fence of {path} is odd"


def test_every_program_is_run_by_a_console_of_its_page() -> None:
    """Kills the planted bug of a program that is shown and never run."""
    for program in PROGRAMS:
        run = [line for block in CONSOLES if block.page == program.page for line in commands(block)]
        assert any(f"python {program.title}" in line for line in run), program


@pytest.mark.parametrize("block", FRAGMENTS, ids=str)
def test_fragment(block: Block, folder: Path) -> None:
    """Run a fragment in its setting, as the body of a coroutine."""
    assert block.setting in SETTINGS, f"{block} names no setting of {sorted(SETTINGS)}"
    source = "async def fragment():\n" + textwrap.indent(block.text, "    ")
    code = compile(source, str(ROOT / block.page), "exec")

    async def run() -> None:
        async with asyncio.timeout(3 * PROMPTLY), SETTINGS[block.setting]() as names:
            space: dict[str, Any] = {**COMMON, **names}
            names.clear()
            exec(code, space)
            await space["fragment"]()
            space.clear()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in CONSOLES if commands(block)], ids=str)
def test_console(block: Block, folder: Path, interpreter: Path) -> None:
    """Run a console block beside the programs of its page, and look for what it prints."""
    bin = folder / "bin"
    bin.mkdir()
    preloaded.install(bin, interpreter)
    for program in PROGRAMS:
        if program.page == block.page:
            (folder / program.title).write_text(program.text)
    (folder / "examples").symlink_to(ROOT / "examples")
    script = "\n".join(["set -e", *commands(block), "wait"])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    printed = done.stdout.splitlines()
    for line in block.text.splitlines():
        if line and not line.startswith("$ ") and commands(block):
            wanted = ".*".join(re.escape(part) for part in line.split("..."))
            assert any(re.fullmatch(wanted, each) for each in printed), (line, done.stdout)
