"""From a name to an address, and the folder nobody else can enter."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from asyncvmm import _errors as errors
from asyncvmm._io.names import ADDRESS_LIMIT, LEAF_LIMIT, private_folder, resolve


@pytest.fixture
def runtime(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of this user."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    return short_folder


def test_bare_name_lives_in_the_private_folder(runtime: Path) -> None:
    """Kills: a folder that others may enter, whatever the umask is."""
    before = os.umask(0)
    try:
        address = resolve("vision-0.a_B")
    finally:
        os.umask(before)
    assert address.kind == "name"
    assert address.display == "vision-0.a_B"
    assert address.sockaddr == f"{runtime}/asyncvmm/vision-0.a_B.sock"
    assert stat.S_IMODE((runtime / "asyncvmm").stat().st_mode) == 0o700


def test_private_folder_can_be_used_under_any_umask(runtime: Path) -> None:
    """Kills: a mode that the umask cuts down to nothing."""
    before = os.umask(0o777)
    try:
        resolve("vision")
    finally:
        os.umask(before)
    assert stat.S_IMODE((runtime / "asyncvmm").stat().st_mode) == 0o700


@pytest.mark.parametrize("runtime_dir", ["", "relative", "/nowhere/at/all", "/dev/null"])
def test_without_a_runtime_folder_the_temporary_one_serves(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, runtime_dir: str
) -> None:
    """Kills: trusting a variable that sudo and containers leave pointing nowhere."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime_dir)
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    expected = f"{short_folder}/asyncvmm-{os.geteuid()}"
    assert private_folder() == expected
    assert resolve("vision").sockaddr == f"{expected}/vision.sock"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another user owns")
def test_runtime_folder_of_another_user_is_not_used(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a private folder whose parent lets another user put his own in its place."""
    monkeypatch.setattr("tempfile.tempdir", str(runtime))
    os.chown(runtime, 12345, 12345)
    assert private_folder() == f"{runtime}/asyncvmm-0"


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_private_folder_that_others_may_enter_is_refused(runtime: Path, mode: int) -> None:
    """Kills: a check of the owner alone."""
    folder = runtime / "asyncvmm"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(errors.AccessDeniedError, match=f"{mode:04o}"):
        resolve("vision")


def test_private_folder_that_is_a_link_is_refused(runtime: Path) -> None:
    """Kills: stat for lstat; a link can be turned elsewhere after the check."""
    (runtime / "real").mkdir(mode=0o700)
    (runtime / "asyncvmm").symlink_to(runtime / "real")
    with pytest.raises(errors.AccessDeniedError, match="link"):
        resolve("vision")


def test_private_folder_that_is_a_file_is_refused(runtime: Path) -> None:
    """Kills: an OSError of the kernel instead of one of ours."""
    (runtime / "asyncvmm").write_text("")
    with pytest.raises(errors.AccessDeniedError):
        resolve("vision")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another user owns")
def test_private_folder_of_another_user_is_refused(runtime: Path) -> None:
    """Kills: a check of the mode alone."""
    folder = runtime / "asyncvmm"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(errors.AccessDeniedError) as caught:
        resolve("vision")
    assert (caught.value.uid, caught.value.allowed) == (12345, (0,))


def test_path_is_absolute_at_once(
    runtime: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: an address that moves with the working directory."""
    monkeypatch.chdir(short_folder)
    for name in ("./a.sock", Path("a.sock"), f"{short_folder}/b/../a.sock"):
        address = resolve(name)
        assert address.kind == "path"
        assert address.display == str(name)
        assert address.sockaddr == str(short_folder / "a.sock")
    assert not (runtime / "asyncvmm").exists()


def test_path_of_the_longest_kind_needs_no_descriptor(runtime: Path) -> None:
    """Kills: a limit that is off by one, against what the kernel takes."""
    for letters in range(ADDRESS_LIMIT - 2, ADDRESS_LIMIT + 3):
        path = "/" + "x" * letters
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(path)
            except FileNotFoundError:
                assert resolve(path).sockaddr == path
            except OSError:  # the path is too long, and so is the file's name
                with pytest.raises(errors.ArgumentError, match=f"got {letters + 1} bytes"):
                    resolve(path)


def test_long_path_is_kept_as_it_is(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a long path that leads to another place, such as the private folder."""
    deep = runtime / ("d" * 60)
    deep.mkdir()
    long_path = str(deep / ("ü" * 40))
    found = resolve(long_path)
    assert (found.kind, found.display, found.sockaddr) == ("path", long_path, long_path)
    monkeypatch.chdir(deep)
    assert resolve("./" + "ü" * 40).sockaddr == long_path
    assert not (runtime / "asyncvmm").exists()


def test_long_bare_name_is_the_same_file_in_any_folder(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a hash where the folder's path is long, as it may be for one end only; a hash that
    a bare name could take."""
    longest, longer, other = "n" * (LEAF_LIMIT - 5), "n" * (LEAF_LIMIT - 4), "m" * (LEAF_LIMIT - 4)
    found = []
    for letters in (1, 150):
        folder = short_folder / ("f" * letters)
        folder.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        found.append([os.path.basename(resolve(n).sockaddr) for n in (longest, longer, other)])
    first, second = found
    assert first == second
    assert first[0] == f"{longest}.sock"
    assert len(set(first)) == 3
    assert max(map(len, first)) == LEAF_LIMIT
    with pytest.raises(errors.ArgumentError):
        resolve(first[1])


def test_abstract_name() -> None:
    """Kills: an abstract name with a slash that is taken for a path; a limit off by one."""
    address = resolve("@asyncvmm/vision")
    assert address.kind == "abstract"
    assert address.display == "@asyncvmm/vision"
    assert address.sockaddr == "\0asyncvmm/vision"
    assert resolve("@" + "a" * (ADDRESS_LIMIT - 1)).kind == "abstract"
    with pytest.raises(errors.ArgumentError):
        resolve("@" + "a" * ADDRESS_LIMIT)


@pytest.mark.parametrize(
    "name",
    ["", "@", ".", "..", "a b", "vis:ion", "ü", "a\0b", "@a\0b", "/a\0b", "/tmp/", "/tmp/..",
     "n" * 201, "new\n", b"vision", 7, None],
)  # fmt: skip
def test_what_can_be_no_name_is_refused(runtime: Path, name: Any) -> None:
    """Kills: a name that leaves the private folder, or a TypeError from deep inside."""
    with pytest.raises(errors.ArgumentError):
        resolve(name)
    assert not (runtime / "asyncvmm").exists()
