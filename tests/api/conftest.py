"""What the tests of the public face share: other processes, as in the tests of processes."""

from __future__ import annotations

import pytest

from asyncvmm._consumer import consumer
from asyncvmm._exporter import lending
from tests.process.conftest import folder as folder
from tests.process.conftest import nursery as nursery
from tests.process.conftest import peers as peers


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock by which both ends let the loop turn: only features count then."""
    for module in (lending, consumer):
        monkeypatch.setattr(module, "monotonic", lambda: 0.0)
