"""Fixtures of the whole stack on the stand-in driver: two processes, or both ends in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

import asyncvmm
from asyncvmm._types import Route
from asyncvmm.testing import ForkServer
from tests.process.conftest import folder, nursery
from tests.process.harness import Peers
from tests.standin import Standin
from tests.standin.port import EXPORTS, READS, StandinPort

__all__ = ["folder", "nursery"]

NAME = "standin"


@pytest.fixture(autouse=True)
def _runtime_folder(folder: Path) -> None:
    """Have every socket in a folder of the test's own."""


@pytest.fixture
async def peers(nursery: ForkServer, folder: Path, driver: Standin) -> AsyncIterator[Peers]:
    """Processes, gone and reaped before the ledger is looked at."""
    async with Peers(nursery) as peers:
        yield peers
        started = [*peers._processes]
    for peer in started:
        peer.status()  # what a zombie holds is not given back


def exporting(
    *, route: Route | None = None, port: StandinPort | None = None, **options: Any
) -> AbstractAsyncContextManager[asyncvmm.Exporter]:
    """Open an exporter on the stand-in's GPU, with 2 MiB and four slots unless told otherwise."""
    settings = {"pool_bytes": "2MiB", "slots": 4, "handle_type": "posix", **options}
    return asyncvmm.open_exporter(
        NAME, route=route or asyncvmm.Broadcast(1), _port=port or StandinPort(EXPORTS), **settings
    )


def connecting(
    rank: int | None = 0, *, port: StandinPort | None = None, **options: Any
) -> AbstractAsyncContextManager[asyncvmm.Consumer]:
    """Connect to it from the same process."""
    return asyncvmm.connect(NAME, rank=rank, _port=port or StandinPort(READS), **options)
