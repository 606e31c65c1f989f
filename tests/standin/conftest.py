"""Fixtures of the cases, which run in a process that has the stand-in for its driver."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from asyncvmm._backends import events
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._backends.driver import load
from tests.standin import Ledger, Standin
from tests.standin.peer import Peer, join_goodbyes, join_unmapping

GRANULE = 2 << 20
SLOTS = 4


def pytest_collection_finish() -> None:
    """Have later collections look at what a test made, and not at all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def driver() -> Iterator[Standin]:
    """The stand-in driver; the test must give everything back to it."""
    load()
    driver = Standin()
    driver.reset()
    assert driver.ledger() == Ledger()
    yield driver
    driver.finish()
    driver.reset()
    gc.collect()
    join_goodbyes()
    join_unmapping()
    assert driver.ledger() == Ledger()
    assert events.budget.live == 0


@pytest.fixture
def exporter(driver: Standin) -> Iterator[CudaExporterRegion]:
    """A region of one granule that may grow to eight."""
    region = CudaExporterRegion.create(0, GRANULE, 8 * GRANULE, SLOTS)
    yield region
    driver.finish()
    region.close()


@pytest.fixture
def consumer(driver: Standin, exporter: CudaExporterRegion) -> Iterator[CudaConsumerRegion]:
    """A consumer's region of it in this process, with the first segment mapped."""
    region = CudaConsumerRegion(exporter.info, 0)
    region.map(exporter.segments()[0], exporter.export(0))
    yield region
    driver.finish()
    region.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    """Start a consumer in another process; keyword arguments are settings of its stand-in."""
    peers: list[Peer] = []

    def start(**settings: str) -> Peer:
        peers.append(Peer(settings))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()
