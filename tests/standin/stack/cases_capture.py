"""Graphs captured in another thread while acknowledgements are pending."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import asyncvmm
from asyncvmm._backends import driver as calls
from tests.process import steps as common
from tests.process.harness import Peers, until
from tests.standin import Standin
from tests.standin.stack import steps
from tests.standin.stack.conftest import NAME, exporting


@contextmanager
def _not_relaxed() -> Iterator[None]:
    yield


@pytest.mark.parametrize("relaxed", [True, False])
async def test_the_watcher_breaks_no_capture(
    driver: Standin, peers: Peers, relaxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 100 acknowledgements pending; the control asks without relaxed mode and breaks it."""
    if not relaxed:
        monkeypatch.setattr(calls, "relaxed_capture", _not_relaxed)
    broken = driver.broken_captures()
    with warnings.catch_warnings():
        if not relaxed:  # what cannot be asked any more is quarantined, and the exit says so
            warnings.simplefilter("ignore", asyncvmm.OwnersOutstandingWarning)
        async with exporting(slots=100, close_timeout=5.0 if relaxed else 0.0) as exporter:
            peer = peers.start()
            await peer.call(steps.connect, NAME)
            await peer.call(steps.control, "hold")
            for _ in range(100):
                await exporter.send({"x": torch.ones(4)})
            await peer.call(steps.read, 100)
            await until(lambda: exporter.statistics().slots.draining == 100)
            driver.capture(True)
            asked = driver.calls("cuEventQuery")
            await until(lambda: driver.calls("cuEventQuery") >= asked + 20)
            await peer.call(steps.control, "finish")
            if relaxed:
                await exporter.drain()
            driver.capture(False)
            await peer.call(common.leave)
    assert (driver.broken_captures() == broken) is relaxed
