"""The soak says what is wrong, and its exit status does; ``make soak`` runs it for minutes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncvmm.testing import ForkServer
from tests.process.chaos import Chaos
from tests.soak import __main__ as soak
from tests.soak import stream
from tests.soak.report import Look

FIRST = Look(
    owners=100_000,
    seconds=6.0,
    per_second=20_000.0,
    alone_p10=1.5e-4,
    alone_p50=2e-4,
    alone_p99=1e-3,
    in_flight_p50=3e-3,
    in_flight_p99=6e-3,
    cpu_us={"exporter": 50.0, "consumer": 25.0},
    load=1.0,
    descriptors={"exporter": {"socket": 3}, "consumer": {"socket": 2}},
    mappings={"exporter": 1, "consumer": 1},
    threads={"exporter": 2, "consumer": 2},
    rss={"exporter": 150 << 20, "consumer": 150 << 20},
    blocks={"exporter": 600_000, "consumer": 600_000},
)

WORSE: dict[str, Any] = {
    "descriptors": {"exporter": {"socket": 4}, "consumer": {"socket": 2}},
    "mappings": {"exporter": 1, "consumer": 2},
    "threads": {"exporter": 2, "consumer": 3},
    "rss": {"exporter": 152 << 20, "consumer": 150 << 20},
    "blocks": {"exporter": 600_000, "consumer": 602_000},
}


@pytest.mark.parametrize("what", WORSE)
def test_a_last_tenth_with_more_of_anything_is_a_problem(what: str) -> None:
    """Kills: a counter that is shown and not compared."""
    assert stream.compare_counters(FIRST, FIRST) == []
    (problem,) = stream.compare_counters(FIRST, replace(FIRST, **{what: WORSE[what]}))
    assert what in problem


def test_a_slower_last_tenth_is_a_problem() -> None:
    assert stream.compare_times(FIRST, FIRST) == []
    slower = replace(FIRST, alone_p10=4e-4, cpu_us={"exporter": 120.0, "consumer": 25.0})
    assert stream.compare_times(FIRST, slower) == [
        "stream: a hand-off by itself took 150 us, became 400",
        "stream: the exporter used 50 us of CPU for an owner, then 120",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_a_soak_reports_and_its_status_says_how_it_ended(
    nursery: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Run every lane for as short as it goes; fail one.  Kills: a problem that costs no status."""
    monkeypatch.setattr(soak, "fork_server", lambda: nullcontext(nursery))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")  # the soak sets its own
    monkeypatch.setattr(soak, "PACKETS", 0)
    monkeypatch.setattr(stream, "WARM", stream.CHUNK)
    if broken:
        monkeypatch.setattr(Chaos, "settle", _fails)
    lanes = ["chaos"] if broken else ["chaos", "stream"]
    arguments = ["--minutes", "0", "--kills", "1", "--seed", "7"]
    for lane in lanes:
        arguments += ["--only", lane]
    path = tmp_path / "report.json"
    assert soak.main([*arguments, "--report", str(path)]) == int(broken)
    found = json.loads(path.read_text())
    assert found["kills"] >= 1
    assert found["about"]["python"]
    assert len(found["stream"]) == len(lanes) - 1
    problems = ["chaos: AssertionError: planted"] if broken else []
    assert [each for each in found["problems"] if "names" not in each] == problems


async def _fails(self: Chaos) -> None:
    raise AssertionError("planted")
