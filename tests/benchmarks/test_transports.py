"""Every transport hands over what it was given, to both of two consumers or to either."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rows import REQUIRED
from benchmarks.setting import KIB, Payload
from benchmarks.transports import MODULES
from benchmarks.workloads import WORKLOADS
from tests import standin
from tests.benchmarks.conftest import TINY, Run

OPTIONAL = {"zmq", "iceoryx2", "ucxx", "nixl"}

BROADCAST = replace(TINY, consumers=2)
COMPETE = replace(TINY, consumers=2, compete=True)


def check(run: Run, name: str) -> None:
    row = run.row(name)
    assert "failed" not in row, row["failed"]
    assert set(REQUIRED) <= set(row)
    assert (row["wrong"], row["fallbacks"], row["lost"]) == (0, 0, 0)
    assert row["per_s"] > 0
    assert 0 < row["p50_us"] <= row["p99_us"]
    assert row["cpu_us"] > 0
    assert len(row["rounds"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workload", [BROADCAST, COMPETE], ids=["broadcast", "compete"])
def test_every_transport_hands_over_what_it_was_given(
    run: Callable[..., Run], workload: object
) -> None:
    names = list(MODULES)
    seen = run(*names, workload=workload)
    skipped = {skip["transport"] for skip in seen.skipped}
    assert skipped <= OPTIONAL | {"plain_copy", "floor_turning"}
    for name in names:
        if name not in skipped:
            check(seen, name)
    assert all(skip["reason"] for skip in seen.skipped)


@pytest.mark.slow
def test_each_kind_of_workload_gives_its_numbers(run: Callable[..., Run]) -> None:
    row = run("asyncvmm", workload=replace(TINY, kind="reuse", depth=1)).row("asyncvmm")
    assert row["p50_us"] > 0

    row = run("floor_loop", workload=replace(TINY, kind="connect", depth=1)).row("floor_loop")
    assert row["p50_us"] > 0

    row = run("asyncvmm", workload=WORKLOADS["allocator_10"]).row("asyncvmm")
    assert row["p50_us"] > 0
    assert row["wrong"] == 0


@pytest.mark.slow
def test_loops_that_never_sleep_hand_over_one_at_a_time(run: Callable[..., Run]) -> None:
    check(run("floor_turning", workload=replace(TINY, depth=1)), "floor_turning")


@pytest.mark.slow
def test_bursts_of_more_than_may_be_in_flight_come_to_an_end(run: Callable[..., Run]) -> None:
    """Planted bug: a sender that takes no answers while its own way is full, for ever."""
    workload = replace(TINY, kind="bursts", burst=4 * TINY.depth, work=1e-3)
    seen = run(*MODULES, workload=workload)
    for row in seen.rows:
        check(seen, row["transport"])
        assert row["waits"] >= 0
        assert row["peak_mib"] > 0


@pytest.mark.slow
def test_gaps_are_measured_where_there_is_a_loop(run: Callable[..., Run]) -> None:
    names = ("floor_loop", "floor", "plain_copy")
    seen = run(*names, workload=replace(TINY, payload=Payload(1, KIB)))
    assert seen.row("floor_loop")["gap_p99_ms"] > seen.row("floor_loop")["gap_busy_p99_ms"] > 0
    assert seen.row("floor_loop")["loop"] == "uvloop"
    assert seen.row("floor")["gap_p99_ms"] is None
    assert seen.row("floor")["loop"] == "none"
    for name in names:
        check(seen, name)


@pytest.mark.slow
def test_the_floor_of_a_gpu_on_the_standin_driver(tmp_path: Path) -> None:
    """Every driver call of the floor is made, in an order and with types that one accepts."""
    out = tmp_path / "out.json"
    transport = "tests.benchmarks.standin_floor:StandinFloor"
    options = ("--rounds", "1", "--seconds", "0.02", "--json", str(out))
    command = (sys.executable, "-m", "benchmarks", "run", "--transports", transport)
    subprocess.run(
        [*command, "--workloads", "closed_20x1MiB,fanout_2_broadcast", *options],
        env=standin.environment(tmp_path / "state", {"OMP_NUM_THREADS": "1"}),
        cwd=standin.ROOT,
        check=True,
    )
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        assert "failed" not in row, row["failed"]
        assert (row["wrong"], row["lost"]) == (0, 0)
