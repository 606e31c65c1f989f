"""Who the peer is, and how its death is told."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncvmm._fds import OwnedFd
from asyncvmm._io import liveness
from asyncvmm._io.binding import new_socket
from asyncvmm._io.liveness import DeathWatch, identify
from tests.io.children import child
from tests.io.ends import End, pair, turns
from tests.patience import PROMPTLY

CONNECT = """
    import os, socket, sys
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.read()
"""

CONNECT_AND_FORK = """
    import os, socket, sys
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(sys.argv[1])
    if os.fork() == 0:
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
"""

LINK_AND_FORK = """
    import asyncio, os, socket, sys
    from asyncvmm._io.link import Link

    async def main():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(sys.argv[1])
        link = Link(sock, loop=asyncio.get_running_loop(), frame=b"".join,
                    on_packet=lambda view, fds: None, on_end=lambda error: None)
        link.start()
        if os.fork() == 0:
            print("ready", flush=True)
            sys.stdin.read()
            os._exit(0)
        await asyncio.sleep(60)

    asyncio.run(main())
"""


@pytest.fixture
def listening(short_folder: Path) -> Iterator[socket.socket]:
    """A listening socket of this process."""
    with new_socket() as sock:
        sock.bind(str(short_folder / "s"))
        sock.listen()
        yield sock


class Deaths:
    """Counts what a DeathWatch tells."""

    def __init__(self) -> None:
        self.count = 0
        self._news = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._news.set()

    async def told(self) -> None:
        async with asyncio.timeout(PROMPTLY):
            await self._news.wait()


def own(pidfd: OwnedFd | None) -> OwnedFd:
    assert pidfd is not None
    return pidfd


def test_identity_of_the_process_at_the_other_end(listening: socket.socket) -> None:
    """Kills: an inheritable pidfd; a pid that is looked up instead of asked for."""
    with child(CONNECT, listening.getsockname(), bare=True) as process:
        accepted, _ = listening.accept()
        with accepted:
            peer = identify(accepted)
            assert (peer.pid, peer.uid, peer.gid) == (process.pid, os.geteuid(), os.getegid())
            assert peer.source == "peerpidfd"
            assert not os.get_inheritable(own(peer.pidfd).fileno())
            signal.pidfd_send_signal(own(peer.pidfd).fileno(), 0)
            own(peer.pidfd).close()


def test_older_kernels_and_reaped_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: an identity that cannot be had without SO_PEERPIDFD, or that hides how it was had."""
    a, b = pair()
    with a, b:
        monkeypatch.setattr(liveness, "_SO_PEERPIDFD", 9999)
        peer = identify(a)
        assert peer.source == "pidfd_open"
        own(peer.pidfd).close()

        def gone(_pid: int) -> int:
            raise ProcessLookupError

        monkeypatch.setattr(os, "pidfd_open", gone)
        peer = identify(a)
        assert (peer.source, peer.pidfd, peer.pid) == ("eof", None, os.getpid())


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a pid namespace"
)
def test_peer_outside_the_pid_namespace_has_a_pidfd_but_no_number(
    listening: socket.socket,
) -> None:
    """Kills: pidfd_open(0), and taking pid 0 for nobody."""
    program = """
import socket, sys
from asyncvmm._io.liveness import identify
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
peer = identify(sock)
print(peer.pid, peer.source)
"""
    done = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", program, listening.getsockname()],
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no pid namespace here: {done.stderr.strip()}")
    assert done.stdout == "0 peerpidfd\n", done.stderr


async def test_death_is_told_while_a_forked_child_holds_the_socket(
    listening: socket.socket,
) -> None:
    """Kills: taking end-of-file for the truth."""
    with child(CONNECT_AND_FORK, listening.getsockname(), bare=True) as process:
        accepted, _ = listening.accept()
        accepted.setblocking(False)
        deaths = Deaths()
        watch = DeathWatch(asyncio.get_running_loop(), own(identify(accepted).pidfd), deaths)
        with accepted:
            assert not watch.dead()
            process.kill()
            await deaths.told()
            assert watch.dead()
            with pytest.raises(BlockingIOError):  # no end-of-file: the grandchild has it
                accepted.recv(1)
            await turns(5)
            assert deaths.count == 1
            watch.close()
            watch.close()
            assert watch.dead()


@pytest.mark.slow
async def test_forked_child_does_not_hold_a_link(listening: socket.socket) -> None:
    """Kills: a link whose socket every forked child keeps, so that its end is not seen."""
    with child(LINK_AND_FORK, listening.getsockname()) as process:
        accepted, _ = listening.accept()
        end = End(accepted)
        end.link.start()
        process.kill()
        assert await end.ended() is None
        # The grandchild is alive: its standard output is still open.
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with pytest.raises(BlockingIOError):
            os.read(process.stdout.fileno(), 1)


async def test_death_is_known_at_once_without_the_loop(listening: socket.socket) -> None:
    """Kills: dead() that is true only after on_death was called."""
    with child(CONNECT, listening.getsockname(), bare=True) as process:
        accepted, _ = listening.accept()
        deaths = Deaths()
        with accepted:
            watch = DeathWatch(asyncio.get_running_loop(), own(identify(accepted).pidfd), deaths)
            process.kill()
            process.wait()
            assert watch.dead()
            assert deaths.count == 0
            await deaths.told()
            watch.close()


async def test_closed_watch_tells_nothing(listening: socket.socket) -> None:
    """Kills: a death told to somebody who no longer listens; a pidfd that stays open."""
    with child(CONNECT, listening.getsockname(), bare=True) as process:
        accepted, _ = listening.accept()
        deaths = Deaths()
        with accepted:
            pidfd = own(identify(accepted).pidfd)
            watch = DeathWatch(asyncio.get_running_loop(), pidfd, deaths)
            watch.close()
            assert pidfd.number == -1
            process.kill()
            process.wait()
            await turns(5)
            assert deaths.count == 0
            assert not watch.dead()


async def test_watch_may_be_closed_by_what_it_tells(listening: socket.socket) -> None:
    """Kills: a callback that touches the watch after it was closed."""
    with child(CONNECT, listening.getsockname(), bare=True) as process:
        accepted, _ = listening.accept()
        deaths = Deaths()
        with accepted:

            def close() -> None:
                watch.close()
                deaths()

            watch = DeathWatch(asyncio.get_running_loop(), own(identify(accepted).pidfd), close)
            process.kill()
            await deaths.told()
            assert watch.dead()
