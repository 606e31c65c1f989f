"""What the doctor says of GPUs: each state provoked on the stand-in, and named."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pytest

from asyncvmm.cli.doctor import examination, gpu, trial
from asyncvmm.cli.doctor.line import Line, verdict
from tests.standin import Ledger, Standin

GPU_LINES = [
    "cuda-bindings", "driver", "virtual memory", "POSIX descriptors", "FABRIC handles",
    "interprocess events", "read-only import", "peer access", "MPS",
]  # fmt: skip


def lines() -> dict[str, Line]:
    found = list(examination._gpu_lines(0))
    assert [line.name for line in found] == GPU_LINES
    return {line.name: line for line in found}


def not_ok(found: dict[str, Line]) -> dict[str, str]:
    """Return the lines that are not ok; each of them says what to do."""
    bad = {name: line for name, line in found.items() if line.state != "ok"}
    assert all(line.advice for line in bad.values())
    return {name: line.state for name, line in bad.items()}


def works(found: Iterable[Line]) -> bool:
    return verdict("cuda:0", list(found)).works


@pytest.fixture(autouse=True)
def _healthy(driver: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with a GPU that has everything."""
    monkeypatch.setenv("STANDIN_FABRIC", "0")
    monkeypatch.setenv("STANDIN_MPS", "on")


def test_a_healthy_gpu_has_measured_figures_and_nothing_to_do(driver: Standin) -> None:
    """Kills: a check that leaves memory, events or contexts behind (the ledger is looked at)."""
    found = lines()
    assert not_ok(found) == {}
    assert works(found.values())
    assert not works(line for line in [Line("x", "missing", "", "", ("cuda",))])
    assert "CUDA 13.0, 1 x Stand-in 0" in found["driver"].figure
    assert " us in the middle of 100" in found["interprocess events"].figure.replace("ms", "us")
    assert "CUDA_ERROR_INVALID_VALUE" in found["read-only import"].figure
    assert driver.ledger() == Ledger()


@pytest.mark.parametrize(
    ("setting", "value", "name", "state", "words", "still"),
    [
        ("FABRIC", "800", "FABRIC handles", "missing", "IMEX channel", True),
        ("FABRIC", "off", "FABRIC handles", "missing", "FABRIC_SUPPORTED is 0", True),
        ("POSIX", "801", "POSIX descriptors", "missing", "NOT_SUPPORTED", True),
        ("MPS", "off", "MPS", "degraded", "take turns", True),
        ("GUARD", "off", "read-only import", "degraded", "was let pass", True),
        ("EVENTS", "off", "interprocess events", "missing", "cuIpcOpenEventHandle", False),
        ("VMM", "off", "virtual memory", "missing", "no virtual memory management", False),
    ],
)
def test_each_state_is_named(
    setting: str,
    value: str,
    name: str,
    state: str,
    words: str,
    still: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: a state that passes for another one, or does not decide whether the GPU works."""
    monkeypatch.setenv(f"STANDIN_{setting}", value)
    if setting not in ("GUARD", "EVENTS"):  # a second process takes its time
        monkeypatch.setattr(trial, "run", lambda *_: trial.Outcome(0, 0, 0, True, "refused"))
    found = lines()
    assert not_ok(found)[name] == state
    assert words in found[name].figure
    assert works(found.values()) is still


def test_without_any_handle_type_the_gpu_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: two ways that are each optional, and none left."""
    monkeypatch.setenv("STANDIN_FABRIC", "800")
    monkeypatch.setenv("STANDIN_POSIX", "801")
    monkeypatch.setattr(trial, "run", lambda *_: trial.Outcome(0, 0, 0, True, "refused"))
    found = lines()
    assert found["POSIX descriptors"].state == found["FABRIC handles"].state == "missing"
    assert not works([found["POSIX descriptors"]])


def test_gpus_apart_are_named_in_pairs(driver: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.devices("0,1")
    assert gpu.peer_access().state == "ok"
    assert "all 2 GPUs" in gpu.peer_access().figure
    monkeypatch.setenv("STANDIN_PEERS", "none")
    line = gpu.peer_access()
    assert line.state == "degraded"
    assert line.figure == "2 of 2 pairs do not: memory of 1 from 0, 0 from 1"


def test_no_visible_gpu_is_a_missing_driver_and_stops_no_line(driver: Standin) -> None:
    driver.devices("")
    found = lines()
    assert found["driver"].state == "missing"
    assert "CUDA_VISIBLE_DEVICES" in found["driver"].advice
    assert {found[name].state for name in examination.WITHOUT_GPU} == {"missing"}
    assert not works(found.values())


def test_another_process_that_ends_or_cannot_start_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: a doctor that hangs with its patient."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    line = lines()["interprocess events"]
    assert line.state == "missing"
    assert "the other process" in line.figure


def test_wrong_bytes_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "POISON", 0x11)
    line = lines()["interprocess events"]
    assert line.state == "missing"
    assert "read something else" in line.figure


@pytest.mark.parametrize(
    ("version", "state"),
    [("13.0.2", "degraded"), ("13.0.3", "ok"), ("13.9.1", "ok"), ("14.0.0", "degraded")],
)
def test_only_bindings_that_were_tried_are_ok(
    version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "version", lambda name: version)
    assert gpu.bindings().state == state
