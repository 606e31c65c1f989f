"""The doctor on a machine with a GPU: it works here, and every line is measured."""

from __future__ import annotations

import pytest

from asyncvmm.cli.doctor.examination import examine

pytestmark = pytest.mark.gpu


def test_the_doctor_finds_the_gpu_working() -> None:
    """Kills: a trial of two processes that only the stand-in driver lets pass."""
    report = examine("cuda:0")
    lines = {line.name: line for line in report.lines}
    assert report.works, report
    for name in ("driver", "virtual memory", "interprocess events", "read-only import", "torch"):
        assert lines[name].state == "ok", lines[name]
    assert any(lines[kind].state == "ok" for kind in ("POSIX descriptors", "FABRIC handles"))
    assert lines["MPS"].figure
