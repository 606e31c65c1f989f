"""The consumers in other processes that tests on a GPU use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.standin.peer import Peer

_kept: dict[int, Peer] = {}


def _start() -> Peer:
    return Peer({}, module="tests.gpu.peer")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start one peer per GPU before any test, since importing torch takes them seconds.

    Not in a fixture: what the first test leaves open would be laid at its door.
    """
    users = [each for each in session.items if each.path.parent == Path(__file__).parent]
    users = [each for each in users if each.path.name in {"test_cuda_region.py", "test_reports.py"}]
    if not users or session.config.option.collectonly:
        return
    import torch

    for device in range(min(2, torch.cuda.device_count())):
        _kept[device] = _start()


def pytest_sessionfinish() -> None:
    """End them."""
    while _kept:
        _kept.popitem()[1].end()


@pytest.fixture
def peer_on() -> Iterator[Callable[[int], Peer]]:
    """Give the peer that uses this GPU and no other; what it maps is let go afterwards."""
    used: list[Peer] = []

    def get(device: int) -> Peer:
        used.append(_kept[device])
        return _kept[device]

    yield get
    for peer in used:
        peer.tell("close")
        peer.tell("join_unmapping")


@pytest.fixture
def start_peer() -> Iterator[Callable[[], Peer]]:
    """Start one that may come to harm."""
    started: list[Peer] = []

    def start() -> Peer:
        started.append(_start())
        return started[-1]

    yield start
    for peer in started:
        peer.end()
