"""What goes wrong in a transport is found, named, and stops nobody else."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.setting import KIB, Payload, Setting
from tests.benchmarks.conftest import Run

FAULTY = "tests.benchmarks.faulty"


@pytest.mark.slow
def test_planted_corruption_is_counted(run: Callable[..., Run]) -> None:
    """Kills: a check that compares a payload with itself, or never looks."""
    seen = run(f"{FAULTY}:Corrupting", f"{FAULTY}:Stale", f"{FAULTY}:Losing", "floor_loop")
    # Ten checked hand-offs before and after; every fifth was changed.
    assert seen.row("corrupting")["wrong"] in range(3, 6)
    assert seen.row("stale")["wrong"] > 4
    assert seen.row("losing")["wrong"] >= 2
    assert seen.row("losing")["lost"] > 0
    assert seen.row("floor_loop")["wrong"] == 0
    assert seen.notes == []


@pytest.mark.slow
def test_a_transport_that_fails_is_out_and_the_others_go_on(
    run: Callable[..., Run], folder: Path
) -> None:
    names = ("Hanging", "Stuck", "Dying", "Raising")
    seen = run(*(f"{FAULTY}:{name}" for name in names), "floor_loop", patience=2.0, rounds=2)
    assert seen.row("floor_loop")["wrong"] == 0
    assert seen.row("floor_loop")["per_s"] > 0
    reasons = {name: seen.row(name)["failed"] for name in map(str.lower, names)}
    assert reasons["hanging"] == 'producer did not say "done" within 2 s'
    assert reasons["stuck"] == 'producer did not say "done" within 2 s'
    assert reasons["dying"] == "consumer 0 died with exit code 7: the reason why"
    assert "RuntimeError: no torch.float8_e4m3fn today" in reasons["raising"]
    assert len(seen.notes) == len(names)
    for name in reasons:
        assert seen.row(name)["per_s"] is None


@pytest.mark.slow
def test_nothing_is_left_behind(run: Callable[..., Run], folder: Path) -> None:
    """Kills: leaving a process that cannot hear that it is to end."""
    before = set(os.listdir("/dev/shm"))
    seen = run(f"{FAULTY}:Stuck", "torch_mp", "asyncvmm", patience=2.0)
    assert "failed" in seen.row("stuck")
    assert multiprocessing.active_children() == []
    gc.collect()  # semaphores go with their queues
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_behind(run: Callable[..., Run], folder: Path) -> None:
    """Kills: ending only the lane whose turn it was."""
    with pytest.raises(KeyboardInterrupt):
        run("floor", "floor_loop", "asyncvmm", interrupt=True)
    assert multiprocessing.active_children() == []


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    from benchmarks.cli import main

    for option in ("--transports", "--workloads"):
        with pytest.raises(SystemExit, match=r"asyncvmm|closed_16KiB"):
            main(["run", option, "nonesuch", "--json", "/dev/null"])


@pytest.mark.parametrize("option", ["--device", "--consumer-device"])
@pytest.mark.parametrize("command", ["run", "trace"])
def test_a_gpu_that_is_not_there_is_refused_once(command: str, option: str, tmp_path: Path) -> None:
    """Kills: a run in which each transport fails of it by itself, in torch's words."""
    from benchmarks.cli import main

    path = tmp_path / "result.json"
    with pytest.raises(SystemExit, match=r"cuda:\d+ was asked for, .* sees \d+ CUDA devices"):
        main([command, option, "cuda:99", "--json", str(path)])
    assert not path.exists()


def test_the_sides_are_held_to_cores_in_turn() -> None:
    """Kills: a side that goes where it likes, or a consumer put with the producer first of all."""
    from benchmarks.sides import hold

    allowed = sorted(os.sched_getaffinity(0))
    first, last = frozenset(allowed[:1]), frozenset(allowed[-1:])
    setting = Setting(Path(), Payload(1, KIB), 1, cores=(first, last))

    def held(place: int) -> set[int]:
        hold(setting, place)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:  # which alone is held
        assert [*thread.map(held, range(3))] == [first, last, first]
