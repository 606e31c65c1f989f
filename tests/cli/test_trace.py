"""``asyncvmm demo --trace`` and ``asyncvmm trace join``, as their users run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.traces import Trace
from tests.cli.test_demo import report_of, run_demo

pytestmark = pytest.mark.slow


def test_a_traced_demo_adds_up_to_its_report(tmp_path: Path) -> None:
    """Kills the planted bugs of a rank whose part is missing, and of parts left behind."""
    report = report_of("--batches", "12", "--trace", str(tmp_path / "demo.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]
    trace = Trace(tmp_path / "demo.json")
    lives = {end.split(" @")[0]: len(found) for end, found in trace.lives.items()}
    assert lives == {"exporter": 12, "rank 0": 12, "rank 1": 12}
    assert trace.waits == report["waits"]
    assert len(trace.arrows) == 12 * 2 * 2


def test_a_trace_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    """Kills the planted bug of a traceback, and of a demo that runs for nothing."""
    done = run_demo("--trace", str(tmp_path / "nowhere" / "demo.json"), status=2)
    assert "there is no folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = run_demo("--trace", "/proc/demo.json", status=2)  # nobody can write there, not even root
    assert "nothing can be written in /proc" in done.stderr
    assert len(done.stderr.splitlines()) == 1
