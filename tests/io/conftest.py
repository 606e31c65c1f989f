"""Fixtures for sockets: their addresses have room for 107 bytes only."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncvmm._io.names import Address, resolve


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path that leaves room for a socket, which pytest's own often does not."""
    with tempfile.TemporaryDirectory(prefix="avm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def address(short_folder: Path) -> Address:
    """A free path."""
    return resolve(short_folder / "exporter.sock")


@pytest.fixture(params=["path", "abstract"])
def either(request: pytest.FixtureRequest, short_folder: Path) -> Address:
    """A free name of each kind."""
    path = short_folder / "exporter.sock"
    return resolve(path if request.param == "path" else f"@asyncvmm-test{path}")
