"""Paths that are longer than a socket address: the same place for both ends, or an error."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import asyncvmm
from asyncvmm import _errors as errors
from asyncvmm._io.binding import new_socket, node_at
from asyncvmm._io.listener import Listener, connect
from asyncvmm._io.names import ADDRESS_LIMIT, LEAF_LIMIT, Address, resolve
from asyncvmm.cli.observing import Observer
from tests.io.ends import open_fds
from tests.io.test_listener import door, free_descriptors


@pytest.fixture
def deep(short_folder: Path) -> Path:
    """A folder whose path alone is longer than an address; ``short_folder/h`` leads to it."""
    folder = short_folder.joinpath(*["d" * 60] * 4)
    folder.mkdir(parents=True)
    (short_folder / "h").symlink_to(folder)
    return folder


@pytest.fixture
def long(deep: Path) -> Address:
    """A free path in it, with the longest name that a file may have there."""
    return resolve(deep / ("x" * LEAF_LIMIT))


def short_way(address: Address, short_folder: Path) -> Address:
    """Return the same place, as seen where its folder has a short path."""
    found = resolve(short_folder / "h" / os.path.basename(address.sockaddr))
    assert len(found.sockaddr) <= ADDRESS_LIMIT < len(address.sockaddr)
    return found


@pytest.mark.parametrize("bound_short", [True, False])
async def test_both_ends_meet_however_long_each_sees_the_path(
    long: Address, short_folder: Path, bound_short: bool
) -> None:
    """As two containers do that share a volume.  Kills: a long path that is put elsewhere."""
    short = short_way(long, short_folder)
    before = open_fds()
    with door(short if bound_short else long) as opened:
        opened.start()
        assert stat.S_ISSOCK(os.lstat(long.sockaddr).st_mode)
        for number, address in enumerate((short, long), 1):
            with await connect(address, wait=False):
                await opened.until(lambda number=number: len(opened.came) == number)  # type: ignore[misc]  # mypy cannot infer such a lambda
    assert node_at(long.sockaddr) is None
    assert open_fds() == before


async def test_a_tensor_goes_by_a_long_path(deep: Path) -> None:
    """The public face, and an observer.  Kills: an end that dials in a way of its own."""
    name = deep / "vision.sock"
    async with (
        asyncvmm.open_exporter(name, device="cpu", pool_bytes="1MiB") as exporter,
        asyncvmm.connect(name, device="cpu", rank=0),
    ):
        await exporter.wait_attached(1)
        assert os.listdir(deep) == ["vision.sock"]
        observer = Observer(resolve(name))
        assert observer.pid == os.getpid()
        observer.close()


def test_a_live_one_is_left_and_a_stale_one_taken_over(long: Address, short_folder: Path) -> None:
    """Kills: a long path that nobody is found at."""
    short = short_way(long, short_folder)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
            stale.bind(short.sockaddr)
        bound = Listener.bind(long, shared=True)
        assert stat.S_IMODE(os.stat(long.sockaddr).st_mode) == 0o666
        with pytest.raises(errors.NameInUseError) as caught:
            Listener.bind(long)
        assert caught.value.pid == os.getpid()
        bound.close()
        assert not os.path.lexists(long.sockaddr)


@pytest.mark.parametrize(
    "name", [str.__add__, lambda folder, leaf: Path(folder + leaf)], ids=["text", "path"]
)
def test_what_no_socket_can_have_is_refused_at_once(
    deep: Path, name: Callable[[str, str], str | os.PathLike[str]]
) -> None:
    """Before the ``async with``, with the numbers.  Kills: a limit that the kernel tells of."""
    wrong = name(f"{deep}/", "x" * (LEAF_LIMIT + 1))
    for opening in (asyncvmm.open_exporter, asyncvmm.connect):
        with pytest.raises(errors.ArgumentError, match=f"{LEAF_LIMIT}; got {len(str(wrong))}"):
            opening(wrong)


def test_a_relative_one_is_refused_where_it_leads(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: looking at the length of what was written."""
    monkeypatch.chdir(deep)
    with pytest.raises(errors.ArgumentError, match="file name"):
        resolve("./" + "x" * (LEAF_LIMIT + 1))


async def test_without_proc_it_says_so(long: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: "no exporter listens", and waiting for one for ever."""
    before = open_fds()
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "isdir", lambda _: False)
        with pytest.raises(errors.ArgumentError, match="/proc"):
            Listener.bind(long)
        with pytest.raises(errors.ArgumentError, match="/proc"):
            await connect(long, wait=True)
    assert open_fds() == before


async def test_nobody_there_and_no_descriptor_left(long: Address) -> None:
    """Kills: an OSError, and a socket that stays open."""
    before = open_fds()
    for address in (long, resolve(f"{long.sockaddr}/x/y")):
        with pytest.raises(errors.ExporterNotFoundError):
            await connect(address, wait=False)
    with free_descriptors(1), pytest.raises(errors.DescriptorLimitError):
        await connect(long, wait=True)
    with free_descriptors(1), pytest.raises(errors.DescriptorLimitError):
        Listener.bind(long)
    with free_descriptors(1), pytest.raises(errors.DescriptorLimitError):
        Observer(long)
    with new_socket():
        assert open_fds() == before + 1
