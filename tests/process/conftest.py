"""What the process tests share: a nursery, a folder of their own, and who looks what was left."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from asyncvmm.testing import ForkServer
from tests.process.harness import Peers, shared_fork_server


@pytest.fixture(scope="session")
def nursery() -> Iterator[ForkServer]:
    """The process that all others are forked from."""
    with shared_fork_server as server:
        yield server


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets and output; no name may be left in it, or in shared memory."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="avmm-") as name:
        folder = Path(name)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield folder
        sockets = folder / "asyncvmm"
        assert not sockets.exists() or os.listdir(sockets) == []
        left = set(os.listdir("/dev/shm")) - before
        assert not [name for name in left if "asyncvmm" in name]


@pytest.fixture
async def peers(nursery: ForkServer, folder: Path) -> AsyncIterator[Peers]:
    """Processes, all of which are gone when the test is over."""
    async with Peers(nursery) as peers:
        yield peers
