"""The link: order, coalescing, descriptors, and what the peer may do wrong."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from asyncvmm import _errors as errors
from asyncvmm._fds import OwnedFd
from asyncvmm._io.link import PACKET_LIMIT
from tests.io.ends import CountingSocket, End, content, memfd, open_fds, pair, turns


@pytest.fixture
def ends() -> Iterator[list[End]]:
    """Ends that are closed when the test is over."""
    opened: list[End] = []
    yield opened
    for end in opened:
        end.close()


def shrink(sock: socket.socket) -> None:
    """Leave room for a few packets only; the kernel doubles what it is asked for."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)


async def test_messages_arrive_in_order_through_a_full_socket(ends: list[End]) -> None:
    """Kills: a send queue that is last in, first out, and one that drops a refused packet."""
    a, b = pair()
    shrink(a)
    sender, receiver = End(a), End(b, accept_fds=1)
    ends += [sender, receiver]
    sender.link.start()
    sent = []
    for number in range(400):
        message = b"%d" % number + b"." * (number % 700)
        sender.link.post(message, [memfd(b"%d" % number)] if number % 50 == 7 else ())
        sent.append(message)
    sender.link.flush()
    assert sender.link.queued > 100  # else nothing was full
    receiver.link.start()
    await receiver.until(lambda: len(receiver.messages) == len(sent))
    assert receiver.messages == sent
    assert [content(fd) for fd in receiver.fds] == [b"%d" % n for n in range(7, 400, 50)]
    await turns()
    assert sender.link.queued == 0


async def test_flush_does_not_overtake_a_refused_packet(ends: list[End]) -> None:
    """Kills: a flush that sends new messages while an encoded packet waits for the writer."""
    a, b = pair()
    shrink(a)
    counting = CountingSocket.of(a)
    sender, receiver = End(counting), End(b)
    ends += [sender, receiver]
    while not counting.calls["EAGAIN"]:
        sender.link.post(b"x" * 3000)
        sender.link.flush()
    tried = counting.calls["send"]
    sender.link.post(b"last")
    sender.link.flush()
    assert counting.calls["send"] == tried
    receiver.link.start()
    await receiver.until(lambda: b"last" in receiver.messages)
    assert receiver.messages[-1] == b"last"
    assert counting.calls["EAGAIN"] <= 2


@pytest.mark.parametrize(
    ("posted", "packets"),
    [([100] * 10, [10]), ([100] * 40, [16, 16, 8]), ([20_000] * 3, [1, 1, 1]), ([30_000, 9], [2])],
)
async def test_messages_of_one_turn_leave_in_few_packets(
    ends: list[End], posted: list[int], packets: list[int]
) -> None:
    """Kills: a packet for each message; a limit of messages or of bytes that is not kept."""
    a, b = pair()
    counting = CountingSocket.of(a)
    sender, receiver = End(counting), End(b)
    ends += [sender, receiver]
    receiver.link.start()
    for size in posted:
        sender.link.post(b"m" * size)
    await receiver.until(lambda: len(receiver.messages) == len(posted))
    assert counting.calls == {"send": len(packets)}
    assert len(receiver.packets) == len(packets)


async def test_backlog_is_joined_when_the_socket_has_room(ends: list[End]) -> None:
    """Kills: packets encoded one by one while the socket is full; a packet of the whole queue."""
    a, b = pair()
    sender, receiver = End(a), End(b)
    ends += [sender, receiver]
    while True:
        sender.link.post(b"w" * 8000)
        sender.link.flush()
        if sender.link.queued:
            break
    blocked = len(receiver.messages)
    for _ in range(64):
        sender.link.post(b"tiny")
        sender.link.flush()
    receiver.link.start()
    await receiver.until(lambda: receiver.messages.count(b"tiny") == 64)
    with_tiny = [packet for packet in receiver.packets[blocked:] if b"tiny" in packet]
    assert 4 <= len(with_tiny) <= 5


async def test_one_system_call_for_each_packet_on_each_side(ends: list[End]) -> None:
    """Kills: a reader that is taken off and put back, a read that tries once more until EAGAIN."""
    a, b = (CountingSocket.of(sock) for sock in pair())
    left, right = End(a), End(b)
    ends += [left, right]
    left.link.start()
    right.link.start()
    right.on_packet = lambda _view, _fds: right.link.post(b"pong")
    for round_ in range(1, 101):
        left.link.post(b"ping")
        await left.until(lambda done=round_: len(left.messages) == done)  # type: ignore[misc]  # a lambda's default
    assert a.calls == b.calls == {"send": 100, "recv_into": 100}


async def test_descriptors_arrive_with_their_packet_and_close_on_exec(ends: list[End]) -> None:
    """Kills: inheritable descriptors, copies that stay open here, a packet that overtakes."""
    a, b = pair()
    sender, receiver = End(a), End(b, accept_fds=2)
    ends += [sender, receiver]
    receiver.link.start()
    fds = [memfd(b"one"), memfd(b"two")]
    sender.link.post(b"before")
    sender.link.post(b"with", fds)
    sender.link.post(b"after")
    await receiver.until(lambda: len(receiver.messages) == 3)
    assert [len(packet) for packet in receiver.packets] == [10, 8, 9]
    assert receiver.messages == [b"before", b"with", b"after"]
    assert [content(fd) for fd in receiver.fds] == [b"one", b"two"]
    assert not any(os.get_inheritable(fd.fileno()) for fd in receiver.fds)
    assert [fd.number for fd in fds] == [-1, -1]


async def test_descriptors_nobody_took_are_closed(ends: list[End]) -> None:
    """Kills: a link that trusts on_packet to close what it does not want."""
    a, b = pair()
    sender, receiver = End(a), End(b, accept_fds=4, take_fds=False)
    ends += [sender, receiver]
    seen: list[OwnedFd] = []
    receiver.on_packet = lambda _view, fds: seen.append(fds[0]) if fds else None
    receiver.link.start()
    before = open_fds()
    sender.link.post(b"x", [memfd(b"1")])
    await receiver.until(lambda: bool(receiver.messages))
    await turns()
    assert seen[0].number == -1
    assert open_fds() == before


@pytest.mark.parametrize("count", [1, 3, 250])
async def test_descriptors_never_asked_for_are_closed_by_the_kernel(
    ends: list[End], count: int
) -> None:
    """Kills: a reader that makes room for descriptors it will not take."""
    a, b = pair()
    receiver = End(b)
    ends.append(receiver)
    receiver.link.start()
    before = open_fds()
    with a, memfd(b"stray") as stray:
        socket.send_fds(a, [b"\4\0\0\0stay"], [stray.fileno()] * count)
        await receiver.until(lambda: bool(receiver.messages))
    assert open_fds() <= before
    assert receiver.ends == []


@pytest.mark.parametrize("accepted", [1, 2, 3])
async def test_more_descriptors_than_allowed_end_the_link(ends: list[End], accepted: int) -> None:
    """Kills: raising before the descriptors that did come are wrapped, which leaks them."""
    a, b = pair()
    receiver = End(b, accept_fds=accepted)
    ends.append(receiver)
    receiver.link.start()
    before = open_fds()
    with a, memfd(b"many") as many:
        socket.send_fds(a, [b"x"], [many.fileno()] * (accepted + 1))
        error = await receiver.ended()
    assert isinstance(error, errors.RemoteProtocolError)
    assert str(accepted) in str(error)
    assert receiver.packets == []
    assert open_fds() == before - 2  # both sockets are gone too


def test_descriptor_lost_at_the_open_file_limit_is_told() -> None:
    """Kills: taking MSG_CTRUNC for an empty list, and listing /proc/self/fd at the limit."""
    program = textwrap.dedent(
        """
        import asyncio, os, resource, socket
        from asyncvmm._errors import DescriptorLimitError
        from asyncvmm._io.link import Link

        async def main(free):
            a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ended = asyncio.get_running_loop().create_future()
            link = Link(b, loop=asyncio.get_running_loop(), frame=b"".join, accept_fds=4,
                        on_packet=lambda view, fds: None, on_end=ended.set_result)
            link.start()
            socket.send_fds(a, [b"segments"], [0, 0, 0])
            top = os.dup(0)
            os.close(top)
            before = len(os.listdir("/proc/self/fd")) - 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (top + free, 4096))
            error = await ended
            assert isinstance(error, DescriptorLimitError), error
            assert (error.limit, error.used) == (top + free, top + free), (error, top)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
            assert len(os.listdir("/proc/self/fd")) - 1 == before - 1
            a.close()

        for free in (0, 1, 2):
            asyncio.run(main(free))
        print("told")
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "told\n", done.stderr


@pytest.mark.parametrize("accept_fds", [0, 1])
@pytest.mark.parametrize("size", [PACKET_LIMIT, PACKET_LIMIT + 1, 200_000])
async def test_packet_over_the_limit_ends_the_link(
    ends: list[End], accept_fds: int, size: int
) -> None:
    """Kills: a packet that is cut silently at the size of the buffer."""
    a, b = pair()
    receiver = End(b, accept_fds=accept_fds)
    ends.append(receiver)
    receiver.on_packet = lambda _view, _fds: None
    receiver.link.start()
    message = (size - 4).to_bytes(4, "little") + bytes(size - 4)
    with a:
        a.send(message)
        if size <= PACKET_LIMIT:
            await receiver.until(lambda: bool(receiver.packets))
            assert receiver.packets == [message]
        else:
            assert isinstance(await receiver.ended(), errors.RemoteProtocolError)
            assert receiver.packets == []
            assert a.recv(1) == b""


async def test_own_packet_over_the_limit_is_our_error(ends: list[End]) -> None:
    """Kills: giving the kernel what the peer must refuse."""
    a, b = pair()
    sender = End(a)
    ends.append(sender)
    sender.link.post(bytes(PACKET_LIMIT))
    assert isinstance(await sender.ended(), errors.LocalProtocolError)
    b.close()


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (errors.RemoteProtocolError("theirs"), errors.RemoteProtocolError),
        (errors.LocalProtocolError("ours"), errors.LocalProtocolError),
        (ZeroDivisionError("a bug"), errors.LocalProtocolError),
    ],
)
async def test_error_from_on_packet_ends_the_link(
    ends: list[End], raised: Exception, told: type[Exception]
) -> None:
    """Kills: an exception that reaches only the loop's log while the link goes on."""
    a, b = pair()
    receiver = End(b, accept_fds=1, take_fds=False)
    ends.append(receiver)

    def fail(_view: memoryview, _fds: list[OwnedFd]) -> None:
        raise raised

    receiver.on_packet = fail
    receiver.link.start()
    before = open_fds()
    with a, memfd(b"") as fd:
        socket.send_fds(a, [b"\0\0\0\0"], [fd.fileno()])
        a.send(b"\0\0\0\0")
        error = await receiver.ended()
    assert type(error) is told
    assert error is raised or error.__cause__ is raised
    assert len(receiver.packets) == 1
    assert open_fds() == before - 2


async def test_view_is_dead_after_the_call(ends: list[End]) -> None:
    """Kills: a view that goes on to show whatever packet came last."""
    a, b = pair()
    receiver = End(b)
    ends.append(receiver)
    kept: list[memoryview] = []
    receiver.on_packet = lambda view, _fds: kept.append(view)
    receiver.link.start()
    with a:
        a.send(b"\0\0\0\0")
        await receiver.until(lambda: bool(kept))
    with pytest.raises(ValueError, match="released"):
        bytes(kept[0])


async def test_queue_over_its_limit_ends_the_link(ends: list[End]) -> None:
    """Kills: a queue towards a stopped peer that grows without bound (inv. 11)."""
    a, b = pair()
    shrink(a)
    sender = End(a, queue_limit=50)
    ends.append(sender)
    fds = [memfd(b"") for _ in range(200)]
    with b:
        for fd in fds:
            sender.link.post(b"x" * 1000, [fd])
        error = await sender.ended()
    assert isinstance(error, errors.LocalProtocolError)
    assert "51 messages" in str(error)
    assert sender.link.queued == 0
    assert {fd.number for fd in fds} == {-1}


async def test_many_links_leave_no_descriptor_behind() -> None:
    """Kills: one descriptor lost on any of the ways out, with packets and descriptors under way."""
    before = open_fds()
    for number in range(60):
        a, b = pair()
        shrink(a)
        sender, receiver = End(a), End(b, accept_fds=2)
        for link in (sender.link, receiver.link):
            link.start()
        for _ in range(20):
            sender.link.post(b"f" * 400, [memfd(b""), memfd(b"")])
        if number % 3 == 0:
            await receiver.until(lambda got=receiver: len(got.messages) > 3)  # type: ignore[misc]  # a lambda's default
        if number % 2:
            sender.close()
            await receiver.ended()
        receiver.close()
        if number % 2 == 0:
            assert isinstance(await sender.ended(), errors.PeerLostError)
        sender.close()
    await asyncio.sleep(0)
    assert open_fds() == before


async def test_a_small_socket_buffer_gets_small_packets(ends: list[End]) -> None:
    """Kills: a link that ends because its joined messages outgrow what the kernel takes at once."""
    a, b = pair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_608)
    sender, receiver = End(a), End(b)
    ends += [sender, receiver]
    receiver.link.start()
    posted = [bytes([number]) * 1_500 for number in range(40)]
    for message in posted:
        sender.link.post(message)
    await receiver.until(lambda: len(receiver.messages) == len(posted))
    assert receiver.messages == posted
