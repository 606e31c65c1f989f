"""Messages that leave at once, past a queue that is empty."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from asyncvmm import _errors as errors
from asyncvmm._io.link import PACKET_LIMIT
from tests.io.ends import CountingSocket, End, frame, pair, turns


@pytest.fixture
def ends() -> Iterator[list[End]]:
    """Ends that are closed when the test is over."""
    opened: list[End] = []
    yield opened
    for end in opened:
        end.close()


async def test_it_leaves_before_the_turn_ends_and_once(ends: list[End]) -> None:
    """Kills: a message that waits for the turn's end; one that is sent and queued as well."""
    a, b = pair()
    counting = CountingSocket.of(a)
    sender, receiver = End(counting), End(b)
    ends += [sender, receiver]
    sender.link.post_now((b"now",))
    assert counting.calls == {"send": 1}
    receiver.link.start()
    await receiver.until(lambda: receiver.messages == [b"now"])
    await turns()
    assert counting.calls == {"send": 1}
    assert receiver.messages == [b"now"]


async def test_it_overtakes_nothing_that_is_queued(ends: list[End]) -> None:
    """Kills: a message that passes by what was posted before it."""
    a, b = pair()
    sender, receiver = End(a), End(b)
    ends += [sender, receiver]
    sender.link.post(b"first")
    sender.link.post_now((b"second",))
    sender.link.post_now((b"third", b"fourth"))
    receiver.link.start()
    await receiver.until(lambda: len(receiver.messages) == 4)
    assert receiver.messages == [b"first", b"second", b"third", b"fourth"]
    assert receiver.packets[1] == frame([b"third", b"fourth"])


async def test_what_a_full_socket_refuses_leaves_first_later(ends: list[End]) -> None:
    """Kills: a message that is dropped with EAGAIN; one that passes by a refused packet."""
    a, b = pair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
    sender, receiver = End(a), End(b)
    ends += [sender, receiver]
    sent = [b"%d" % number + b"." * (number % 700) for number in range(300)]
    for message in sent:
        sender.link.post_now((message,))
    assert sender.link.queued > 100  # else nothing was full
    receiver.link.start()
    await receiver.until(lambda: len(receiver.messages) == len(sent))
    assert receiver.messages == sent
    sender.link.post_now((b"after",))
    await receiver.until(lambda: receiver.messages[-1] == b"after")


async def test_it_does_not_overtake_the_one_packet_that_was_refused(ends: list[End]) -> None:
    """Though the queue behind it is empty, and the socket has room again.

    Kills: a look at the queue alone.
    """
    a, b = pair()
    b.setblocking(False)
    sender = End(a)
    ends.append(sender)
    sent = 0
    while not sender.link.queued:
        sender.link.post_now((b"%d" % sent + b"x" * 8000,))
        sent += 1
    packets = [b.recv(PACKET_LIMIT) for _ in range(sent - 1)]
    sender.link.post_now((b"after",))
    await turns()
    packets += [b.recv(PACKET_LIMIT), b.recv(PACKET_LIMIT)]
    assert packets[sent - 1][4:].startswith(b"%dx" % (sent - 1))
    assert packets[sent] == frame([b"after"])
    b.close()


async def test_one_that_no_packet_holds_is_our_error(ends: list[End]) -> None:
    """Kills: giving the kernel what the peer must refuse."""
    a, b = pair()
    sender = End(a)
    ends.append(sender)
    sender.link.post_now((bytes(PACKET_LIMIT),))
    assert isinstance(await sender.ended(), errors.LocalProtocolError)
    b.close()


async def test_last_words_are_read_where_nobody_hears_it(ends: list[End]) -> None:
    """Kills: an error of the socket that is swallowed, or that ends the link with words unread."""
    a, b = pair()
    receiver = End(b)
    ends.append(receiver)
    a.send(frame([b"goodbye"]))
    a.close()
    receiver.link.post_now((b"too late",))
    assert isinstance(await receiver.ended(), errors.PeerLostError)
    assert receiver.messages == [b"goodbye"]


async def test_it_reaches_a_peer_that_has_hung_up_its_half(ends: list[End]) -> None:
    """The link has seen the end of file, and ends once all is sent."""
    a, b = pair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
    left, right = End(a), End(b)
    ends += [left, right]
    while not left.link.queued:
        left.link.post_now((b"x" * 3000,))
    left.link.start()
    b.shutdown(socket.SHUT_WR)
    await turns()
    left.link.post_now((b"last",))
    right.link.start()
    await right.until(lambda: bool(right.messages) and right.messages[-1] == b"last")
    assert await left.ended() is None
