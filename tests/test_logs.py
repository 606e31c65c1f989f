"""The log: one logger per part, nothing unless asked for, and one warning per cause."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncvmm import _logs
from asyncvmm._backends.base import Fence
from asyncvmm._errors import BackendError
from asyncvmm._logs import Once, kind_of
from asyncvmm.testing import FakeDevice, FakePort, open_pair

SOURCE = Path(__file__).parent.parent / "src" / "asyncvmm"
PARTS = {"exporter", "consumer", "backends", "io", "timeline", "tickets", "blocking"}

WARNS = """
import logging, asyncvmm
logging.getLogger("asyncvmm.exporter").warning("nobody asked")
"""


def test_there_is_one_logger_per_part_and_the_page_names_it() -> None:
    """Kills: a logger named after a private module, which nobody can configure for long."""
    named = set()
    for path in SOURCE.rglob("*.py"):
        if "cli" in path.relative_to(SOURCE).parts or path.name == "_logs.py":
            continue
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"getLogger\(([^)]*)\)", text)
        assert len(found) <= 1, path
        named |= set(found)
    assert named == {f'"asyncvmm.{part}"' for part in PARTS}
    page = (SOURCE.parent.parent / "docs/metrics.md").read_text(encoding="utf-8")
    assert all(f"`asyncvmm.{part}`" in page for part in PARTS)


@pytest.mark.slow
def test_nothing_is_printed_where_logging_is_not_set_up() -> None:
    """Kills: warnings on the standard error of a program that has its own."""
    done = subprocess.run(
        [sys.executable, "-c", WARNS], capture_output=True, text=True, check=True, timeout=100
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_cause_is_told_once_until_it_was_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a line for each time, causes that hide each other, and a set that grows for ever."""
    now = 0.0
    monkeypatch.setattr(_logs, "monotonic", lambda: now)
    once = Once(logging.getLogger("asyncvmm.exporter"))
    with caplog.at_level(logging.DEBUG, "asyncvmm"):
        for at in (0.0, 59.0, 118.0, 180.0, 200.0):
            now = at
            once.warning("a", "slot %d", 1)
        once.warning("b", "slot %d", 2)
        once.warning("a", "another message")
    levels = [record.levelno for record in caplog.records]
    warning, debug = logging.WARNING, logging.DEBUG
    assert levels == [warning, debug, debug, warning, debug, warning, warning]
    for number in range(1000):
        once.warning(number, "x")
    assert len(once._seen) == _logs.MOST_CAUSES


def test_errors_of_a_driver_differ_by_call_and_answer() -> None:
    a = BackendError("GPU 0", call="cuEventQuery", code="CUDA_ERROR_UNKNOWN")
    b = BackendError("GPU 1", call="cuEventQuery", code="CUDA_ERROR_UNKNOWN")
    c = BackendError("GPU 0", call="cuEventQuery", code="CUDA_ERROR_NOT_PERMITTED")
    assert kind_of(a) == kind_of(b) != kind_of(c)
    assert kind_of(ValueError("x")) == ("ValueError", "", "")


async def test_a_driver_that_refuses_every_time_is_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a line per hand-off for as long as the driver is in a mood."""
    asked = 0

    def refuse(fences: list[Fence]) -> list[bool]:
        nonlocal asked
        asked += 1
        raise BackendError("refused", call="cuEventQuery", code="CUDA_ERROR_UNKNOWN")

    async with open_pair(port=FakePort(FakeDevice())) as pair:
        monkeypatch.setattr(pair.exporter._region, "ask", refuse)
        for _ in range(20):
            ack = await pair.exporter.send({"x": torch.ones(3)})
            with await pair.consumer.receive() as batch:
                batch[0]["x"]
            del batch
            await ack
    assert asked >= 20
    warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "left to the watcher" in warned[0].getMessage()
