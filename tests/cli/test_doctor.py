"""The doctor: each state of the host provoked and named; the GPU's are in ``tests/standin``."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncvmm._errors import ArgumentError
from asyncvmm._io import liveness
from asyncvmm.cli.doctor import examination, gpu, host
from asyncvmm.cli.doctor.line import Line, in_bytes, in_words, tried, verdict
from tests.backends.test_limits import Machine


def check(name: str) -> Line:
    """Carry out one check of the host as the examination does."""
    ((_, function, needed),) = [each for each in host.CHECKS if each[0] == name]
    line = tried(name, function, needed)
    assert line.name == name
    assert (line.state == "ok") is (line.advice == "")
    return line


def cannot(line: Line) -> set[str]:
    """Return the kinds of device that cannot work with such a line."""
    return {device for device in ("cpu", "cuda") if not verdict(device, [line]).works}


# -- what is there -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [each[0] for each in host.CHECKS if "CUDA" not in each[0]])
def test_what_every_tested_host_has(name: str) -> None:
    line = check(name)
    assert line.state in ("ok", "degraded"), line
    assert line.figure


@contextlib.contextmanager
def file_limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# -- what is not ---------------------------------------------------------------------------------


def test_a_low_open_file_limit_is_degraded_and_a_used_up_one_missing() -> None:
    """Kills: a look at the hard limit, or at the limit without what is in use."""
    used = len(os.listdir("/proc/self/fd"))
    with file_limit(used + 200):
        line = check("open-file limit")
        assert (line.state, cannot(line)) == ("degraded", set())
        assert f"{used + 200:,} (at most " in line.figure
        assert "ulimit -n" in line.advice
    with file_limit(used + 10):
        line = check("open-file limit")
        assert (line.state, cannot(line)) == ("missing", {"cpu", "cuda"})


def test_open_files_without_proc(tmp_path: Path) -> None:
    """Kills: "cannot work here", said of a host that only lacks /proc."""
    line = host.open_files(tmp_path)
    assert line.state in ("ok", "degraded")
    assert line.figure.endswith("how many are in use cannot be read")


def test_a_control_group_that_leaves_too_little_is_named(tmp_path: Path) -> None:
    """Kills: a doctor that looks at the machine's memory and not at the container's."""
    machine = Machine(tmp_path)
    machine.mount("/", "cgroup2", "rw")
    machine.member("0::/pod")
    machine.group("pod", 300 << 20, 100 << 20)
    line = host.memory(machine.proc)
    assert line.state == "degraded"
    assert "200 MiB left in the control group" in line.figure
    assert "pool_bytes=" in line.advice
    machine.group("pod", 600 << 20, 100 << 20)
    assert host.memory(machine.proc).state == "ok"
    line = host.memory(tmp_path / "nowhere")
    assert (line.state, line.figure) == ("degraded", "no limit can be read")


def test_without_pidfds_deaths_are_seen_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a fallback that nobody is told of."""
    monkeypatch.setattr(liveness, "_SO_PEERPIDFD", 9999)
    line = check("pidfd")
    assert (line.state, line.figure) == ("degraded", "pidfd_open only")
    assert "namespaces" in line.advice

    def refuse(pid: int) -> int:
        raise PermissionError(1, "seccomp")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    line = check("pidfd")
    assert (line.state, line.figure) == ("degraded", "none: the end of the socket only")


def test_a_folder_that_others_may_enter_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a verdict of "works" where every exporter with a bare name would be refused."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "asyncvmm").mkdir()
    (tmp_path / "asyncvmm").chmod(0o755)
    line = check("socket folder")
    assert (line.state, cannot(line)) == ("missing", {"cpu", "cuda"})
    assert "0755" in line.figure
    (tmp_path / "asyncvmm").chmod(0o700)
    assert check("socket folder").figure == str(tmp_path / "asyncvmm")
    assert os.listdir(tmp_path / "asyncvmm") == []


def test_small_socket_buffers_are_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socketpair

    def small(*args: Any) -> tuple[socket.socket, socket.socket]:
        pair = real(*args)
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
        return pair

    monkeypatch.setattr(socket, "socketpair", small)
    line = check("packets")
    assert (line.state, cannot(line)) == ("degraded", set())
    assert "64 KiB are refused" in line.figure
    assert "wmem_default" in line.advice


def test_a_kernel_without_memfd_leaves_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    line = check("memfd and sealing")
    assert (line.state, cannot(line)) == ("missing", {"cpu"})
    assert "memfd_create" in line.figure


@pytest.mark.parametrize(
    ("module", "name", "state", "devices"),
    [
        ("uvloop", "uvloop", "degraded", set()),
        ("torch", "torch", "missing", {"cpu", "cuda"}),
        ("torch", "torch with CUDA", "missing", {"cuda"}),
    ],
)
def test_a_package_that_is_not_there_is_named(
    module: str, name: str, state: str, devices: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    line = check(name)
    assert (line.state, cannot(line)) == (state, devices)
    assert f"pip install {module}" in line.advice


def test_torch_without_cuda_and_torch_without_a_gpu_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in host.torch_cuda().figure
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = host.torch_cuda()
    assert (line.state, line.figure) == ("missing", "built for CUDA 13.0, sees no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert host.torch_cuda().state == "ok"


def test_without_bindings_or_driver_the_right_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: "no driver" where it is the bindings that are not installed."""
    from asyncvmm._backends import driver

    monkeypatch.setattr(driver, "_loaded", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    line = gpu.driver_version()
    assert (line.state, line.figure) == ("missing", "the bindings cannot be imported")
    assert cannot(line) == {"cuda"}


def test_one_check_that_raises_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise OSError(28, "no space left")

    monkeypatch.setattr(host, "HostExporterRegion", type("_", (), {"create": broken}))
    lines = list(examination._host_lines())
    assert [line.name for line in lines] == [each[0] for each in host.CHECKS]
    (bad,) = [line for line in lines if line.name == "memfd and sealing"]
    assert (bad.state, bad.needed) == ("missing", ("cpu",))


def test_a_device_that_is_none_is_refused() -> None:
    for device in ("tpu", "cuda:x", "cuda"):
        with pytest.raises(ArgumentError, match="auto, cpu or cuda:N"):
            examination.examine(device)


def test_units() -> None:
    assert [in_words(s) for s in (2.5, 0.0025, 0.0000025)] == ["2.50 s", "2.50 ms", "2.5 us"]
    assert [in_bytes(n) for n in (5, 2048, 3 << 30)] == ["5 B", "2 KiB", "3 GiB"]


# -- the command ---------------------------------------------------------------------------------

WITHOUT = """
import sys
for name in ("typer", "rich"):
    sys.modules[name] = None
import runpy
sys.argv = ["doctor", "--json"]
runpy.run_module("asyncvmm.cli.doctor", run_name="__main__")
"""


@pytest.mark.slow
def test_the_doctor_runs_without_typer_and_rich() -> None:
    """Kills: an import at the top that a machine with nothing but torch does not have."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["works"]) == (0, True)
    assert set(report) == {"device", "works", "lines"}
    for line in report["lines"]:
        assert set(line) == {"name", "state", "figure", "advice", "needed"}
        assert line["state"] in ("ok", "degraded", "missing")
    assert report["device"] in ("cpu", "cuda:0")


@pytest.mark.slow
def test_the_exit_status_says_that_the_device_cannot_work(tmp_path: Path) -> None:
    """With a table for people, one line of which is red."""
    (tmp_path / "asyncvmm").mkdir()
    (tmp_path / "asyncvmm").chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-m", "asyncvmm.cli", "doctor", "--device", "cpu"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cpu cannot work here" in done.stdout
    assert any("socket folder" in row and "missing" in row for row in done.stdout.splitlines())
    assert done.stderr == ""
