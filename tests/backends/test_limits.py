"""How much memory there is, over made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncvmm._backends.limits import Room, check_room, tightest
from asyncvmm._errors import PoolMemoryError

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Machine:
    """A made-up /proc and a made-up tree of control groups."""

    def __init__(self, path: Path) -> None:
        self.proc = path / "proc"
        self.groups = path / "control groups"  # mountinfo escapes the space
        self.mounts: list[str] = []
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "sys/vm").mkdir(parents=True)
        self.meminfo(MemAvailable=1_000_000)

    def meminfo(self, **lines: int) -> None:
        text = "".join(f"{name}:  {value} kB\n" for name, value in lines.items())
        (self.proc / "meminfo").write_text(f"MemTotal: 9999999 kB\n{text}HugePages_Total: 0\n")

    def member(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, root: str, kind: str, options: str, name: str = "") -> None:
        place = str(self.groups / name).replace(" ", "\\040")
        self.mounts.append(f"30 20 0:26 {root} {place} rw shared:9 - {kind} cgroup {options}\n")
        (self.proc / "self/mountinfo").write_text("".join(self.mounts))

    def group(
        self, path: str, limit: int | str, usage: int, inactive: int = 0, files: object = V2
    ) -> Path:
        group = self.groups / path
        group.mkdir(parents=True, exist_ok=True)
        names = V1 if files is V1 else V2
        (group / names[0]).write_text(f"{limit}\n")
        (group / names[1]).write_text(f"{usage}\n")
        (group / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\nfile 7\n")
        return group

    def tightest(self) -> tuple[int, str]:
        room = tightest(self.proc)
        assert room is not None
        return room


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_machine_alone(machine: Machine) -> None:
    assert machine.tightest() == (1_024_000_000, "this machine (MemAvailable)")


def test_strict_accounting_counts_what_is_promised(machine: Machine) -> None:
    machine.meminfo(MemAvailable=1000, CommitLimit=900, Committed_AS=300)
    mode = machine.proc / "sys/vm/overcommit_memory"
    mode.write_text("0\n")
    assert machine.tightest()[0] == 1000 * 1024
    mode.write_text("2\n")
    assert machine.tightest()[0] == 600 * 1024
    machine.meminfo(MemAvailable=1000, CommitLimit=900, Committed_AS=1300)
    assert machine.tightest()[0] == 0


@pytest.mark.parametrize("tight", ["a/b/c", "a/b", "a", ""])
def test_every_group_up_to_the_root_counts(machine: Machine, tight: str) -> None:
    """Planted bug: only the process's own group is looked at, or the root is left out.

    Field report 55.
    """
    machine.mount("/", "cgroup2", "rw")
    machine.member("0::/a/b/c")
    for path in ("a/b/c", "a/b", "a", ""):
        machine.group(path, 900 if path == tight else "max", 300)
    available, where = machine.tightest()
    assert available == 600
    assert where == f"the control group {machine.groups / tight} (memory.max 900)"


def test_version_1_counts_in_its_own_words(machine: Machine) -> None:
    machine.mount("/", "cgroup", "rw,cpu,cpuacct", "cpu")
    machine.mount("/", "cgroup", "rw,memory", "memory")
    machine.member("5:cpu,cpuacct:/other", "4:memory:/job", "1:name=systemd:/x", "0::/")
    machine.group("memory/job", 5000, 4000, 1500, V1)
    machine.group("memory", 9223372036854771712, 4000, 0, V1)
    available, where = machine.tightest()
    assert available == 2500
    assert where.endswith("memory/job (memory.limit_in_bytes 5,000)")


def test_a_container_that_sees_only_its_own_group(machine: Machine) -> None:
    """The group is named by the host's path, and only its own folder is mounted.

    Planted bug: the path is looked up below the mount, found nowhere, and no limit holds.
    """
    machine.mount("/docker/1234", "cgroup", "rw,memory", "memory")
    machine.member("4:memory:/docker/1234/inner")
    machine.group("memory", 5000, 1000, 0, V1)
    assert machine.tightest()[0] == 4000
    machine.group("memory/inner", 3000, 1000, 0, V1)
    assert machine.tightest()[0] == 2000


@pytest.mark.parametrize(
    ("root", "path"), [("/", "/../elsewhere"), ("/docker/1234", "/docker/other")]
)
def test_a_group_outside_the_mount_falls_back_to_the_mount(
    machine: Machine, root: str, path: str
) -> None:
    """Planted bug: the path is followed out of the mount, to files of something else."""
    machine.group("../elsewhere", 1000, 999)
    machine.mount(root, "cgroup2", "rw")
    machine.member(f"0::{path}")
    machine.group("", 5000, 1000)
    assert machine.tightest()[0] == 4000


def test_pages_of_files_not_used_lately_count_as_free(machine: Machine) -> None:
    """Planted bug: a process that has read its model's weights finds no room for its pool."""
    machine.mount("/", "cgroup2", "rw")
    machine.member("0::/")
    machine.group("", 5000, 4999, inactive=3000)
    assert machine.tightest()[0] == 3001
    machine.group("", 5000, 7000, inactive=1000)
    assert machine.tightest()[0] == 0
    machine.group("", 5000, 100, inactive=200)  # read at different moments
    assert machine.tightest()[0] == 5000


def test_what_cannot_be_read_does_not_count(machine: Machine) -> None:
    machine.mount("/", "cgroup2", "rw")
    assert machine.tightest()[0] == 1_024_000_000
    machine.member("0::/gone")
    assert machine.tightest()[0] == 1_024_000_000
    (machine.proc / "meminfo").unlink()
    assert tightest(machine.proc) is None
    check_room(1 << 60, machine.proc)


def test_the_last_byte_fits_and_one_more_does_not(machine: Machine) -> None:
    """Planted bug: the comparison is off by one (field report 55)."""
    check_room(1_024_000_000, machine.proc)
    with pytest.raises(PoolMemoryError) as caught:
        check_room(1_024_000_001, machine.proc)
    error = caught.value
    assert Room(error.available, error.where) == tightest(machine.proc)
    assert (error.asked, error.call, error.code) == (1_024_000_001, "create_pool", "no_memory")


def test_this_machine_has_room_for_a_page() -> None:
    room = tightest()
    assert room is not None
    assert room.available > 4096
