"""Who comes in through a listener, and how a consumer finds it."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest

from asyncvmm import _errors as errors
from asyncvmm._io import binding, listener
from asyncvmm._io.listener import Listener, connect
from asyncvmm._io.liveness import PeerIdentity
from asyncvmm._io.names import Address, resolve
from tests.io.children import LISTEN, child
from tests.io.ends import open_fds, turns
from tests.patience import PROMPTLY


class Door:
    """A listener under way, and who came in."""

    def __init__(self, address: Address) -> None:
        self.listener = Listener.bind(address)
        self.came: list[tuple[socket.socket, PeerIdentity]] = []
        self._news = asyncio.Event()

    def start(self) -> None:
        self.listener.start(
            asyncio.get_running_loop(),
            self._on_connection,
            lambda error: b"%d %d" % (error.limit, error.used),
        )

    def _on_connection(self, sock: socket.socket, peer: PeerIdentity) -> None:
        self.came.append((sock, peer))
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PROMPTLY):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def close(self) -> None:
        self.listener.close()
        for sock, peer in self.came:
            sock.close()
            if peer.pidfd is not None:
                peer.pidfd.close()


@contextmanager
def door(address: Address) -> Iterator[Door]:
    """Open a door and close it, whatever the test does."""
    opened = Door(address)
    try:
        yield opened
    finally:
        opened.close()


async def test_connection_comes_with_the_peers_identity(either: Address) -> None:
    """Kills: a blocking socket on either side; a link that forks and execs take along."""
    with door(either) as opened:
        opened.start()
        with await connect(either, wait=False) as sock:
            await opened.until(lambda: len(opened.came) == 1)
            ((accepted, peer),) = opened.came
            assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
            assert [s.gettimeout() for s in (sock, accepted)] == [0.0, 0.0]
            assert not any(os.get_inheritable(s.fileno()) for s in (sock, accepted))
            sock.send(b"hello")
            assert accepted.recv(10) == b"hello"


async def test_socket_of_another_kind_is_live_all_the_same(address: Address) -> None:
    """Kills: taking EPROTOTYPE for nobody there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(address.sockaddr)
        stream.listen()
        with pytest.raises(errors.NameInUseError):
            Listener.bind(address)
        with pytest.raises(errors.HandshakeError) as caught:
            await connect(address, wait=True)
        assert caught.value.reason == "not_an_exporter"
    Listener.bind(address).close()


async def test_error_of_on_connection_closes_what_came(address: Address) -> None:
    """Kills: a socket and a pidfd that nobody owns."""
    seen: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: seen.append(context["exception"]))

    def fail(_sock: socket.socket, _peer: PeerIdentity) -> None:
        raise ZeroDivisionError

    bound = Listener.bind(address)
    bound.start(loop, fail)
    with await connect(address, wait=False) as sock:
        before = open_fds()
        async with asyncio.timeout(PROMPTLY):
            assert await loop.sock_recv(sock, 1) == b""
        assert open_fds() == before
    assert [type(error) for error in seen] == [ZeroDivisionError]
    bound.close()


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let this process open ``count`` more descriptors and no further one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0) for _ in range(20)]  # fills the gaps below
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whenever the loop calls a listener: whether it has a spare descriptor then."""
    seen: list[bool] = []
    accept = Listener._accept

    def counted(self: Listener) -> None:
        seen.append(self._spare is not None)
        accept(self)

    monkeypatch.setattr(Listener, "_accept", counted)
    return seen


@pytest.mark.parametrize("free", [0, 1])
async def test_who_comes_at_the_open_file_limit_is_told(
    address: Address, caplog: pytest.LogCaptureFixture, tries: list[bool], free: int
) -> None:
    """None left for the socket, or one, and none for the peer's pidfd.

    Kills: a newcomer that waits, or is hung up on, without a word; a loop that spins on accept; a
    log line for each; a spare descriptor that is used once; a listener that gives up.
    """
    before = open_fds()
    with door(address) as opened:
        newcomers = [binding.new_socket() for _ in range(4)]
        with free_descriptors(free):
            opened.start()
            for sock in newcomers:
                sock.connect(address.sockaddr)
                sock.send(b"hello")
            await turns(20)
            assert opened.came == []
            assert tries == [True] * len(newcomers)
            for sock in newcomers:
                told, end = sock.recv(100), sock.recv(100)
                limit, used = map(int, told.split())
                assert used > 0
                assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                assert end == b""
        with await connect(address, wait=False):
            await opened.until(lambda: len(opened.came) == 1)
        for sock in newcomers:
            sock.close()
    limits = [record for record in caplog.records if "open-file limit" in record.getMessage()]
    assert len(limits) == 1
    assert open_fds() == before


async def test_accepting_pauses_where_the_spare_descriptor_is_gone_too(
    address: Address,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tries: list[bool],
) -> None:
    """Another thread took it in between.  Kills: a loop that spins on accept; a log line for each
    try; a listener that gives up, or that has no spare descriptor from then on."""
    monkeypatch.setattr(listener, "ACCEPT_PAUSE", 0.005)
    with door(address) as opened, binding.new_socket() as first, binding.new_socket() as second:
        spare = opened.listener._spare
        assert spare is not None
        with free_descriptors(0):
            began = monotonic()
            monkeypatch.setattr(opened.listener, "_spare", Mock())  # closed, and taken at once
            opened.start()
            first.connect(address.sockaddr)
            second.connect(address.sockaddr)
            for _ in range(500):
                await asyncio.sleep(0)
            while len(tries) < 2:  # noqa: ASYNC110 - nobody is told that a pause is over
                await asyncio.sleep(0.001)
            assert opened.came == []
            # One try per pause, however long this took.
            assert len(tries) <= 2 + (monotonic() - began) / listener.ACCEPT_PAUSE
        await opened.until(lambda: len(opened.came) == 2)
        assert tries[-1]
        spare.close()
    limits = [record for record in caplog.records if "open-file limit" in record.getMessage()]
    assert len(limits) == 1


async def test_stop_while_paused(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a timer that puts a closed listener back to work."""
    monkeypatch.setattr(listener, "ACCEPT_PAUSE", 0.001)
    with door(address) as opened, binding.new_socket() as sock:
        assert opened.listener._spare is not None
        opened.listener._spare.close()
        opened.listener._spare = None
        with free_descriptors(0):
            opened.start()
            sock.connect(address.sockaddr)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            opened.listener.stop()
        await asyncio.sleep(0.005)
        assert opened.came == []


async def test_nobody_there_is_told_at_once(either: Address) -> None:
    """Kills: a connect that waits although it was told not to."""
    with pytest.raises(errors.ExporterNotFoundError) as caught:
        async with asyncio.timeout(PROMPTLY):
            await connect(either, wait=False)
    assert caught.value.name == either.display
    if either.kind == "path":
        with child(LISTEN, either.display, bare=True) as process:
            process.kill()
            process.wait()
        with pytest.raises(errors.ExporterNotFoundError):
            await connect(either, wait=False)
        with pytest.raises(errors.ExporterNotFoundError):
            await connect(resolve(either.sockaddr + "/x"), wait=False)


async def test_connect_waits_for_the_exporter(
    either: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a pause that does not grow, or that grows without end."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(pause: float) -> None:
        pauses.append(pause)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", counted)
    waiting = asyncio.create_task(connect(either, wait=True))
    while len(pauses) < 10:
        await sleep(0)
    with door(either) as opened:
        opened.start()
        with await waiting:
            await opened.until(lambda: len(opened.came) == 1)
    assert pauses[0] == 0.005
    assert pauses[-1] == 0.1
    assert pauses == sorted(pauses)


async def test_cancelled_connect_leaves_nothing_behind(either: Address) -> None:
    """Kills: a socket that only the garbage collector closes."""
    before = open_fds()
    waiting = asyncio.create_task(connect(either, wait=True))
    await turns()
    assert open_fds() == before + 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert open_fds() == before


async def test_full_backlog_is_waited_for(either: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: telling a consumer that nobody is there while the exporter is only busy."""
    monkeypatch.setattr(binding, "_BACKLOG", 0)
    with door(either) as opened, await connect(either, wait=False):
        waiting = asyncio.create_task(connect(either, wait=False))
        await turns()
        assert not waiting.done()
        opened.start()
        with await waiting:
            await opened.until(lambda: len(opened.came) == 2)


async def test_stop_makes_no_file_call_and_close_may_run_elsewhere(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: file calls in stop(), which runs on the loop's thread; a close that needs the loop."""
    with door(address) as opened:
        opened.start()
        for name in ("lstat", "unlink"):
            monkeypatch.setattr(os, name, None)
        opened.listener.stop()
        opened.listener.stop()
        monkeypatch.undo()
        await asyncio.to_thread(opened.listener.close)
        Listener.bind(address).close()


def test_a_node_that_cannot_be_removed_stays_and_everything_else_is_closed(
    address: Address, short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder is a file by now; the same goes for one that is closed to this user.

    Kills: a close that raises half-way, and with it an exporter whose memory and sockets stay.
    """
    before = open_fds()
    bound = Listener.bind(address)
    aside = short_folder.with_name(short_folder.name + "-aside")
    short_folder.rename(aside)
    short_folder.touch()
    try:
        bound.close()
    finally:
        short_folder.unlink()
        aside.rename(short_folder)
    assert open_fds() == before
    assert "stays behind" in caplog.text
    Listener.bind(address).close()  # and is taken over, as that of a dead exporter


def test_unexpected_refusals_of_the_kernel_are_ours() -> None:
    """Kills: an OSError that no caller expects."""
    address = Address("x", "/nowhere/x", "path")
    told = binding._translated(OSError(errno.EROFS, "read-only"), address)
    assert isinstance(told, errors.HandshakeError)
    refused = listener._refused(address, OSError(errno.EIO, "broken"))
    assert (type(refused), refused.reason) == (errors.HandshakeError, "connect")
