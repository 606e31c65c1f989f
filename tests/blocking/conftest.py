"""What the tests of the facade share: each kind of loop, names, and a look at what was left."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator

import pytest
import uvloop

from asyncvmm.blocking import _thread
from tests.blocking.ends import until
from tests.process.conftest import folder as folder
from tests.process.conftest import nursery as nursery
from tests.process.conftest import peers as peers

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

_numbers = itertools.count()


def loop_threads() -> list[str]:
    """Return the names of the threads that the facade has running."""
    return [t.name for t in threading.enumerate() if t.name.startswith("asyncvmm-blocking")]


@pytest.fixture(params=list(LOOPS))
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the facade's thread run this kind of loop."""
    monkeypatch.setattr(_thread, "_loop_factory", lambda: LOOPS[request.param])


@pytest.fixture
def name() -> str:
    """A name for an exporter that nobody else uses."""
    return f"@blocking-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Whatever a test does, its loop's thread ends with the last exporter or consumer."""
    assert loop_threads() == []
    yield
    # One whose start was interrupted is not waited for: it ends as soon as it has begun.
    until(lambda: loop_threads() == [])
    assert _thread._shared.thread is None
