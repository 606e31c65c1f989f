"""How a link ends: by itself, by the peer, in order, at once, or by being given away."""

from __future__ import annotations

import asyncio
import logging
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from asyncvmm import _errors as errors
from asyncvmm._fds import OwnedFd
from tests.io.ends import End, frame, memfd, open_fds, pair, turns
from tests.patience import PROMPTLY


@pytest.fixture
def ends() -> Iterator[list[End]]:
    """Ends that are closed when the test is over."""
    opened: list[End] = []
    yield opened
    for end in opened:
        end.close()


def joined(ends: list[End], **options: Any) -> tuple[End, End]:
    """Return two started ends of one connection."""
    a, b = pair()
    left, right = End(a, **options), End(b, **options)
    for end in (left, right):
        end.link.start()
        ends.append(end)
    return left, right


def fill(end: End) -> int:
    """Post until the kernel takes no more; return how many messages there are."""
    count = 0
    while not end.link.queued:
        end.link.post(b"%d" % count + bytes(5000))
        end.link.flush()
        count += 1
    return count


async def test_end_of_file_is_told_once_as_none(ends: list[End]) -> None:
    """Kills: a reader left registered at end-of-file, which calls for ever."""
    _, right = joined(ends)
    ends[0].link.abort()
    assert await right.ended() is None
    await turns(5)
    assert right.ends == [None]
    assert right.link.closed


async def test_last_words_before_a_reset_are_read(ends: list[End]) -> None:
    """Kills: ending at ECONNRESET, which the kernel reports before the packets that came first."""
    a, b = pair()
    receiver = End(b)
    ends.append(receiver)
    receiver.link.post(b"unread, so that the peer's close is a reset")
    receiver.link.flush()
    words = [b"%d" % number for number in range(20)]
    for word in words:
        a.send(frame([word]))
    a.close()
    receiver.link.start()
    assert isinstance(await receiver.ended(), errors.PeerLostError)
    assert receiver.messages == words


async def test_the_error_of_a_link_keeps_nothing_of_who_was_sending(ends: list[End]) -> None:
    """A receive that is told so by the kernel has the views of its caller on the stack.

    Kills: an error that carries the traceback of the socket call, and so every frame below it.
    """

    class View:
        """Something that the caller has in a variable."""

    def send(end: End) -> weakref.ref[View]:
        view = View()
        end.link.post(b"taken")
        end.link.flush()
        return weakref.ref(view)

    a, b = pair()
    sender = End(b)
    ends.append(sender)
    a.close()
    view = send(sender)
    error = await sender.ended()
    assert isinstance(error, errors.PeerLostError)
    assert isinstance(error.__cause__, OSError)
    assert view() is None


async def test_last_words_before_a_broken_pipe_are_read(ends: list[End]) -> None:
    """Kills: ending at the first EPIPE of a send, with the goodbye still unread."""
    a, b = pair()
    receiver = End(b)
    ends.append(receiver)
    a.send(frame([b"goodbye"]))
    a.close()
    receiver.link.start()
    fd = memfd(b"")
    receiver.link.post(b"too late", [fd])
    receiver.link.flush()
    receiver.link.post(b"even later", [fd])
    assert isinstance(await receiver.ended(), errors.PeerLostError)
    assert receiver.messages == [b"goodbye"]
    assert fd.number == -1


@pytest.mark.parametrize("reset", [False, True])
async def test_last_words_can_be_read_at_once(ends: list[End], reset: bool) -> None:
    """Kills: a read of what is pending that stops at the reset, or that waits for the loop."""
    a, b = pair()
    receiver = End(b)
    ends.append(receiver)
    receiver.link.start()
    if reset:
        receiver.link.post(b"unread")
        receiver.link.flush()
    words = [b"%d" % number for number in range(20)]
    for word in words:
        a.send(frame([word]))
    receiver.link.read_pending()
    assert receiver.messages == words
    a.send(frame([b"last"]))
    a.close()
    receiver.link.read_pending()
    assert receiver.messages == [*words, b"last"]
    assert receiver.link.closed
    assert isinstance(await receiver.ended(), errors.PeerLostError if reset else type(None))


async def test_peer_that_reads_no_more_but_stays_is_lost(ends: list[End]) -> None:
    """Kills: waiting for an end-of-file that never comes after a broken pipe."""
    a, b = pair()
    sender = End(a)
    ends.append(sender)
    sender.link.start()
    with b:
        b.shutdown(socket.SHUT_RD)
        sender.link.post(b"x")
        assert isinstance(await sender.ended(), errors.PeerLostError)


async def test_what_is_queued_reaches_a_peer_that_has_hung_up_its_half(ends: list[End]) -> None:
    """Kills: dropping a full queue at end-of-file although the peer still listens."""
    a, b = pair()
    b.setblocking(False)
    sender = End(a)
    ends.append(sender)
    sender.link.start()
    count = fill(sender)
    for _ in range(40):
        sender.link.post(b"more")
    b.shutdown(socket.SHUT_WR)
    await turns()
    assert sender.ends == []
    got = 0
    while data := await asyncio.get_running_loop().sock_recv(b, 65536):
        got += len(data)
    b.close()
    assert got == sum(4 + len(b"%d" % n) + 5000 for n in range(count)) + 40 * 8
    assert await sender.ended() is None


async def test_post_after_the_end_only_closes_descriptors(ends: list[End]) -> None:
    """Kills: a post that raises in the turn between the end and its being told."""
    left, right = joined(ends)
    left.link.abort()
    await right.ended()
    fd = memfd(b"")
    right.link.post(b"late", [fd])
    right.link.flush()
    assert fd.number == -1
    assert right.link.queued == 0


async def test_abort_tells_nobody_and_closes_queued_descriptors(ends: list[End]) -> None:
    """Kills: an on_end after abort; queued descriptors that live as long as the link."""
    left, right = joined(ends, accept_fds=1)
    fill(left)
    fds = [memfd(b"") for _ in range(3)]
    for fd in fds:
        left.link.post(b"with", [fd])
    before = open_fds()
    left.link.abort()
    left.link.abort()
    assert open_fds() == before - 4
    assert left.link.closed
    await right.ended()
    await turns()
    assert left.ends == []


async def test_abort_before_the_end_was_told_keeps_it_silent(ends: list[End]) -> None:
    """Kills: telling an end that is already on its way after abort."""
    left, right = joined(ends)
    right.link.abort()
    # The callback of a turn that began with the end-of-file runs before the telling of it.
    while True:
        await asyncio.sleep(0)
        if left.link.closed:
            break
    left.link.abort()
    await turns()
    assert left.ends == []


async def test_abort_inside_on_packet(ends: list[End]) -> None:
    """Kills: a link that goes on with a socket its owner has closed."""
    left, right = joined(ends, accept_fds=1)
    right.on_packet = lambda _view, _fds: right.link.abort()
    left.link.post(b"one", [memfd(b"")])
    left.link.post(b"two")
    await left.ended()
    assert right.messages == [b"one"]
    assert right.ends == []


async def test_error_after_an_abort_is_logged(
    ends: list[End], caplog: pytest.LogCaptureFixture
) -> None:
    """Kills: an exception that vanishes because the link was closed a moment before."""
    left, right = joined(ends)

    def abort_and_fail(_view: memoryview, _fds: list[OwnedFd]) -> None:
        right.link.abort()
        raise ZeroDivisionError("a bug")

    right.on_packet = abort_and_fail
    left.link.post(b"x")
    await left.ended()
    assert "a bug" in caplog.text


async def test_last_words_survive_finish_25_of_25() -> None:
    """Kills: finish() without shutting down the write half, or without reading on.

    Both ends have unread input of the other at that moment.
    """
    arrived = 0
    for _ in range(25):
        left, right = End((socks := pair())[0]), End(socks[1])
        for number in range(100):
            left.link.post(b"%d" % number)
            right.link.post(b"%d" % number)
        left.link.post(b"goodbye")
        left.link.start()
        right.link.start()
        assert await left.link.finish(PROMPTLY)
        assert await right.ended() is None
        arrived += right.messages[-1:] == [b"goodbye"]
        assert len(left.messages) == 100
        assert left.ends == []
        left.close()
        right.close()
    assert arrived == 25


async def test_both_ends_may_finish_at_once(ends: list[End]) -> None:
    """Kills: two ends that wait for each other until the deadline."""
    left, right = joined(ends)
    left.link.post(b"goodbye")
    right.link.post(b"goodbye")
    async with asyncio.timeout(PROMPTLY):
        assert all(await asyncio.gather(left.link.finish(60), right.link.finish(60)))
    assert left.messages == right.messages == [b"goodbye"]


async def test_finish_sends_a_queue_that_the_kernel_had_refused(ends: list[End]) -> None:
    """Kills: shutting down the write half while packets still wait for the writer."""
    a, b = pair()
    left, right = End(a), End(b)
    ends += [left, right]
    left.link.start()
    count = fill(left)
    left.link.post(b"goodbye")
    finishing = asyncio.create_task(left.link.finish(PROMPTLY))
    await turns()
    left.link.post(b"after finish")
    right.link.start()
    assert await finishing
    await right.ended()
    assert len(right.messages) == count + 1
    assert right.messages[-1] == b"goodbye"


async def test_finish_gives_up_on_a_peer_that_does_not_read(ends: list[End]) -> None:
    """Kills: a finish that trusts the peer to hang up."""
    a, b = pair()
    left = End(a)
    ends.append(left)
    left.link.start()
    fill(left)
    with b:
        assert not await left.link.finish(0.001)
    assert left.link.closed
    assert not await left.link.finish(60)
    assert left.ends == []


async def test_cancelled_finish_closes_at_once(ends: list[End]) -> None:
    """Kills: a socket that stays open, or a future that is cancelled under a second waiter."""
    a, b = pair()
    left = End(a)
    ends.append(left)
    left.link.start()
    with b:
        first = asyncio.create_task(left.link.finish(60))
        second = asyncio.create_task(left.link.finish(60))
        await turns()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert left.link.closed
        assert await second is False
        assert b.recv(1) == b""
    assert left.ends == []


async def test_protocol_error_while_finishing_is_logged(
    ends: list[End], caplog: pytest.LogCaptureFixture
) -> None:
    """Kills: an on_end in the middle of finish, or an error nobody hears of."""
    left, right = joined(ends)

    def refuse(_view: memoryview, _fds: list[OwnedFd]) -> None:
        raise errors.RemoteProtocolError("nonsense")

    left.on_packet = refuse
    right.link.post(b"x")
    with caplog.at_level(logging.WARNING):
        assert not await left.link.finish(PROMPTLY)
    assert "nonsense" in caplog.text
    assert left.ends == []


async def test_detached_socket_works_without_the_loop(ends: list[End]) -> None:
    """Kills: a detach that loses what was posted in this turn, or stays registered."""
    left, right = joined(ends)
    left.link.post(b"posted")
    sock, unsent = left.link.detach()
    assert unsent == []
    with sock:
        assert left.link.closed
        left.link.post(b"ignored")
        sock.send(frame([b"by hand"]))
        right.link.post(b"for the new owner")
        await right.until(lambda: len(right.messages) == 2)
        await turns()
        assert right.messages == [b"posted", b"by hand"]
        assert left.messages == []
        assert left.ends == []
        assert sock.recv(100) == frame([b"for the new owner"])
    with pytest.raises(errors.LocalProtocolError):
        left.link.detach()


async def test_detach_gives_away_what_the_kernel_does_not_take(ends: list[End]) -> None:
    """Kills: messages that vanish, or change their order."""
    left, right = joined(ends)
    count = fill(left)
    fd = memfd(b"")
    left.link.post(b"a")
    left.link.post(b"b", [fd])
    sock, unsent = left.link.detach()
    with sock:
        assert fd.number == -1
        assert unsent[-2:] == [b"a", b"b"]
        await right.until(lambda: len(right.messages) == count - len(unsent) + 2)


def test_link_may_outlive_its_loop() -> None:
    """Close in order after the loop is gone, as at the end of a program."""
    import uvloop

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        a, b = pair()

        async def opened(sock: socket.socket = a) -> End:
            end = End(sock)
            end.link.start()
            return end

        with asyncio.Runner(loop_factory=new_loop) as runner:
            end = runner.run(opened())
        end.link.abort()
        assert b.recv(1) == b""
        b.close()
