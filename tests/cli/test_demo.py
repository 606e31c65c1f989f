"""The demo as its users run it: what it prints, how it ends, what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncvmm.cli.demo import images, model
from tests.patience import PROMPTLY

pytestmark = pytest.mark.slow

KEYS: dict[str, type | tuple[type, ...] | set[str]] = {
    "device": str,
    "route": str,
    "ranks": int,
    "batches": int,
    "bytes": int,
    "verified": bool,
    "mismatches": int,
    "lost": int,
    "slots": {"total", "free"},
    "waits": int,
    "handoff_us": {"p50", "p99"},
    "batches_per_s": float,
    "gbytes_per_s": float,
    "loop_gap_ms": {"p99", "max"},
    "copies_per_batch": (int, float),
}


def command(*arguments: str) -> list[str]:
    """Return the command line of a short demo on the host."""
    return [sys.executable, "-m", "asyncvmm.cli", "demo", "--device", "cpu", *arguments]


def run_demo(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == status, done.stderr
    return done


def report_of(*arguments: str) -> dict[str, object]:
    """Run the demo with ``--json`` and return the object it printed."""
    done = run_demo("--json", *arguments)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize(
    ("route", "loop", "options", "copies"),
    [("broadcast", "asyncio", [], 1), ("compete", "uvloop", ["--in-place"], 0)],
)
def test_json_has_exactly_the_promised_keys(
    route: str, loop: str, options: list[str], copies: int
) -> None:
    """Kills the planted bug of a key renamed or added without its readers knowing.

    And that of a reservation that is packed through a copy after all.
    """
    report = report_of("--batches", "12", "--route", route, "--loop", loop, *options)
    assert list(report) == list(KEYS)
    for key, kind in KEYS.items():
        value = report[key]
        if isinstance(kind, set):
            assert isinstance(value, dict)
            assert set(value) == kind
        else:
            assert isinstance(value, kind), key
    assert (report["route"], report["ranks"], report["batches"]) == (route, 2, 12)
    assert (report["verified"], report["mismatches"], report["lost"]) == (True, 0, 0)
    assert report["slots"] == {"total": 8, "free": 8}
    assert report["copies_per_batch"] == copies


def test_table_over_a_folder_of_images(tmp_path: Path) -> None:
    """Kills the planted bug of --images being ignored: two tiny images make few bytes."""
    torch.save(torch.zeros(3, 16, 16, dtype=torch.uint8), tmp_path / "a.pt")
    torch.save(torch.full((16, 32, 3), 0.5), tmp_path / "b.pt")
    done = run_demo("--batches", "5", "--ranks", "1", "--images", str(tmp_path))
    assert done.stderr == ""
    assert "every result, bit by bit" in done.stdout
    assert "8 of 8" in done.stdout
    payload = re.search(r"payload .* ([\d,]+) bytes", done.stdout)
    assert payload is not None
    assert int(payload[1].replace(",", "")) <= 5 * images.MOST_IMAGES * (2 * model.WIDTH * 4 + 16)


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A demo that would run for hours, with one rank unless a test asks for more."""
    ranks = getattr(request, "param", 1)
    process = subprocess.Popen(
        command("--batches", "1000000", "--ranks", str(ranks)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C can be sent to it alone
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def ranks_of(process: subprocess.Popen[str], count: int = 1) -> list[int]:
    """Wait until all ranks of the demo have mapped the pool, and return their pids."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            raise AssertionError(process.communicate())
        pids = [
            int(pid)
            for children in Path(f"/proc/{process.pid}/task").glob("*/children")
            for pid in children.read_text().split()
        ]
        if len(pids) == count and all(has_mapped_pool(pid) for pid in pids):
            return pids


def has_mapped_pool(pid: int) -> bool:
    """Say whether a process has mapped an exporter's pool."""
    try:
        return "/memfd:" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def assert_nothing_left(ranks: list[int]) -> None:
    """Fail if one of the processes is still there."""
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("running", [2], indirect=True)
def test_killed_rank_ends_the_demo_with_a_typed_error(running: subprocess.Popen[str]) -> None:
    """Kills the planted bug of a demo that waits for ever for a rank that is gone."""
    ranks = ranks_of(running, 2)
    os.kill(ranks[1], signal.SIGKILL)
    stdout, stderr = running.communicate(timeout=100)
    assert running.returncode == 1
    assert stdout == ""
    assert len(stderr.splitlines()) == 1
    assert "PeerLostError" in stderr
    assert "rank 1" in stderr
    assert_nothing_left(ranks)


@pytest.mark.parametrize(
    ("interrupt", "number", "status"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],
    ids=["ctrl-c in a terminal, which tells the ranks too", "kill"],
)
def test_interruption_leaves_nothing_behind(
    running: subprocess.Popen[str],
    interrupt: Callable[[int, int], None],
    number: signal.Signals,
    status: int,
) -> None:
    """Kills the planted bug of ranks that outlive the demo, or of a traceback after Ctrl-C."""
    ranks = ranks_of(running)
    interrupt(running.pid, number)
    stdout, stderr = running.communicate(timeout=100)
    assert running.returncode == status, stderr
    assert stdout == ""
    assert len(stderr.splitlines()) == 1
    assert_nothing_left(ranks)


def test_killed_demo_takes_its_ranks_along(running: subprocess.Popen[str]) -> None:
    """Kills the planted bug of ranks that wait for ever for an exporter that was killed."""
    ranks = ranks_of(running)
    pidfds = [os.pidfd_open(pid) for pid in ranks]
    try:
        running.kill()
        for pidfd in pidfds:
            wait_for_end(pidfd)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def wait_for_end(pidfd: int) -> None:
    """Wait until the process ends."""
    import select

    ready, _, _ = select.select([pidfd], [], [], PROMPTLY)
    assert ready, f"a rank outlived the demo by {PROMPTLY} s"


def test_help_is_there_without_torch() -> None:
    """Kills the planted bug of a slow --help: torch must not be imported for it."""
    probe = (
        "import sys; from asyncvmm.cli.app import app\n"
        "try: app(['demo', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=100, check=True
    )
    for option in ("--device", "--route", "--ranks", "--batches", "--images", "--json", "--loop"):
        assert option in done.stdout
