"""Taking a name: live ones, stale ones, other people's."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import threading
from pathlib import Path

import pytest

from asyncvmm import _errors as errors
from asyncvmm._io import binding
from asyncvmm._io.listener import Listener
from asyncvmm._io.names import Address, resolve
from tests.io.children import LISTEN, child
from tests.io.ends import open_fds
from tests.patience import PROMPTLY

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_node_is_private_from_its_first_moment(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a mode that is tightened after the bind."""
    monkeypatch.setattr(os, "chmod", None)
    before = os.umask(0)
    try:
        bound = Listener.bind(address)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(address.sockaddr).st_mode) == 0o600
    bound.close()
    assert not os.path.exists(address.sockaddr)


def test_node_can_be_used_under_any_umask(address: Address) -> None:
    """Kills: a node that its own user may not connect to."""
    before = os.umask(0o777)
    try:
        bound = Listener.bind(address)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(address.sockaddr).st_mode) == 0o600
    bound.close()


def test_live_name_is_refused_and_goes_on(either: Address) -> None:
    """Kills: unlinking first and looking later."""
    with child(LISTEN, either.display, bare=True) as process:
        for _ in range(2):
            with pytest.raises(errors.NameInUseError) as caught:
                Listener.bind(either)
            assert caught.value.pid == process.pid
            assert caught.value.name == either.display
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(either.sockaddr)


def test_name_of_a_killed_exporter_is_taken_over(either: Address) -> None:
    """Kills: a node that makes every later start fail."""
    with child(LISTEN, either.display, bare=True) as process:
        process.kill()
        process.wait()
    if either.kind == "path":
        assert os.path.exists(either.sockaddr)
    for _ in range(2):
        Listener.bind(either).close()


def test_live_name_with_a_full_backlog_is_refused(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: taking a busy exporter for a dead one; a probe that blocks."""
    monkeypatch.setattr(binding, "_BACKLOG", 0)
    bound = Listener.bind(address)
    with binding.new_socket() as first:
        first.connect(address.sockaddr)
        with binding.new_socket() as second, pytest.raises(BlockingIOError):
            second.connect(address.sockaddr)
        with pytest.raises(errors.NameInUseError):
            Listener.bind(address)
    bound.close()


def test_socket_that_does_not_listen_yet_is_not_taken_over(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: deciding without the lock on the folder."""
    waiting = threading.Event()
    flock = fcntl.flock

    def told(fd: int, operation: int) -> None:
        try:
            flock(fd, operation)
        except BlockingIOError:
            waiting.set()
            raise

    monkeypatch.setattr(fcntl, "flock", told)
    found: list[BaseException] = []

    def second() -> None:
        try:
            Listener.bind(address).close()
        except BaseException as error:
            found.append(error)

    with binding._folder_locked(address):
        sock = binding.new_socket()
        sock.bind(address.sockaddr)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(PROMPTLY)
        sock.listen()
    thread.join()
    sock.close()
    assert [type(error) for error in found] == [errors.NameInUseError]


def test_lock_that_somebody_keeps_is_told(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a bind that hangs because anybody may lock a shared folder."""
    monkeypatch.setattr(binding, "_LOCK_PATIENCE", 0.01)
    with binding._folder_locked(address):
        before = open_fds()
        with pytest.raises(errors.HandshakeError) as caught:
            Listener.bind(address)
        assert caught.value.reason == "folder_locked"
        assert open_fds() == before


def test_close_leaves_a_later_node_alone(address: Address) -> None:
    """Kills: unlinking by name."""
    first = Listener.bind(address)
    os.rename(address.sockaddr, address.sockaddr + ".away")
    second = Listener.bind(address)
    first.close()
    first.close()
    with binding.new_socket() as sock:
        sock.connect(address.sockaddr)
    second.close()
    assert not os.path.exists(address.sockaddr)
    Listener.bind(address).close()


def test_close_after_the_node_is_gone(address: Address) -> None:
    """Kills: an error on the way out because somebody cleaned the folder."""
    bound = Listener.bind(address)
    os.unlink(address.sockaddr)
    bound.close()


@pytest.mark.slow
def test_forked_child_neither_holds_nor_unlinks_the_name(address: Address) -> None:
    """Kills: a child that closes the listener it inherited, and with it its parent's name."""
    program = """
        import os, sys
        from asyncvmm._io.listener import Listener
        from asyncvmm._io.names import resolve
        listener = Listener.bind(resolve(sys.argv[1]))
        if os.fork() == 0:
            listener.close()
            os._exit(0)
        os.wait()
        if os.fork() == 0:
            print("ready", flush=True)
            sys.stdin.read()
            os._exit(0)
        sys.stdin.read()
    """
    with child(program, address.display) as process:
        with binding.new_socket() as sock:
            sock.connect(address.sockaddr)
        process.kill()
        process.wait()
        # The second child still lives, and does not answer in its parent's name.
        Listener.bind(address).close()


@pytest.mark.slow
def test_abstract_name_that_a_child_of_a_dead_exporter_keeps_says_so() -> None:
    """Kills: "is alive", said of a process that is not."""
    program = """
        import ctypes, os, sys
        from asyncvmm._io.listener import Listener
        from asyncvmm._io.names import resolve
        listener = Listener.bind(resolve(sys.argv[1]))
        pid = ctypes.PyDLL(None).fork()  # past Python, so nothing is closed in the child
        if pid == 0:
            ctypes.PyDLL(None).pause()
        print(f"ready\\n{pid}", flush=True)
        sys.stdin.read()
    """
    address = resolve(f"@asyncvmm-kept-{os.getpid()}")
    with child(program, address.display) as process:
        assert process.stdout is not None
        kept_by = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            with pytest.raises(errors.NameInUseError, match="which has ended") as caught:
                Listener.bind(address)
            assert caught.value.pid == process.pid
            assert "alive" not in str(caught.value)
        finally:
            os.kill(kept_by, signal.SIGKILL)


def test_what_is_no_socket_is_left_alone(address: Address) -> None:
    """Kills: removing a user's file because nobody answers on it."""
    Path(address.sockaddr).write_text("precious")
    with pytest.raises(errors.ArgumentError, match="no socket"):
        Listener.bind(address)
    assert Path(address.sockaddr).read_text() == "precious"
    os.unlink(address.sockaddr)
    os.symlink("/dev/null", address.sockaddr)
    with pytest.raises(errors.ArgumentError):
        Listener.bind(address)


@pytest.mark.parametrize("made", [False, True])
def test_folder_that_is_not_there(short_folder: Path, made: bool) -> None:
    """Kills: an OSError of the kernel instead of one of ours."""
    if made:
        (short_folder / "folder").write_text("")
    with pytest.raises(errors.ArgumentError, match="folder"):
        Listener.bind(resolve(short_folder / "folder" / "a.sock"))


@as_root
@pytest.mark.slow
def test_another_user_may_neither_take_nor_reach_the_name(
    address: Address, short_folder: Path
) -> None:
    """Kills: an OSError of the kernel, or a node that all may connect to."""
    program = """
        import asyncio, os, sys
        from asyncvmm._errors import AccessDeniedError
        from asyncvmm._io.listener import Listener, connect
        from asyncvmm._io.names import resolve

        os.setgid(12345)
        os.setuid(12345)
        print("ready", flush=True)
        address = resolve(sys.argv[1])
        for attempt in (lambda: Listener.bind(address),
                        lambda: asyncio.run(connect(address, wait=True))):
            try:
                attempt()
            except AccessDeniedError as error:
                print(type(error).__name__, error.uid, flush=True)
    """
    short_folder.chmod(0o777)
    bound = Listener.bind(address)
    with child(program, address.display) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "AccessDeniedError 0\nAccessDeniedError -1\n"
    bound.close()
