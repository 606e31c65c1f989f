"""What a hostile exporter says to a consumer: it is refused, and nothing of it stays mapped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import asyncvmm
from asyncvmm._core import wire
from asyncvmm._types import RegionInfo, SegmentInfo
from asyncvmm.testing import Counters
from tests.patience import PROMPTLY
from tests.process.harness import turns, until
from tests.process.ports import WatchedPort
from tests.process.raw import (
    PAGE,
    SEALS,
    RawExporter,
    deliver,
    memfd,
    owner,
    packet,
    welcome,
)
from tests.process.test_hostile_consumer import HEADER, RUBBISH

REGION = RegionInfo("host", 4 * PAGE, PAGE, 4)
SEGMENT = SegmentInfo(0, 0, PAGE)


@pytest.fixture
async def fake(folder: Path) -> AsyncIterator[RawExporter]:
    """An exporter by hand; afterwards nothing is open or mapped that was not before."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: unhandled.append(found))
    # A worker thread of the loop and whatever it opens for itself are not what is counted.
    await asyncio.to_thread(int)
    before = Counters.of()
    with RawExporter(str(folder / "pool")) as fake:
        yield fake
    with contextlib.suppress(TimeoutError):  # a worker thread may be closing the last of it
        await until(lambda: Counters.of().descriptors == before.descriptors)
    after = Counters.of()
    assert after.descriptors == before.descriptors
    assert after.mappings == before.mappings == 0
    assert unhandled == []


def connecting(fake: RawExporter, **options: Any) -> asyncio.Task[asyncvmm.Consumer]:
    """Begin to connect to the fake."""
    manager = asyncvmm.connect(fake.address, device="cpu", rank=0, **options)
    return asyncio.ensure_future(manager.__aenter__())


async def fails(task: asyncio.Task[Any], *kinds: type[asyncvmm.AsyncVMMError]) -> str:
    """Expect one of these errors; return its text, and keep nothing of it."""
    try:
        async with asyncio.timeout(PROMPTLY):
            await task
    except kinds as error:
        return str(error)
    raise AssertionError(f"none of {kinds} was raised")


# -- the handshake -------------------------------------------------------------------------------

ANSWERS: dict[str, bytes] = {
    **RUBBISH,
    **{f"{name}, after the magic": HEADER + data for name, data in RUBBISH.items()},
    "a hello": wire.encode_greeting(wire.Hello(0, None, "host")),
    "an attached": wire.encode_greeting(wire.Attached()),
    "a delivery": deliver(owner()),
    "a short identity": HEADER
    + msgspec.msgpack.encode([2, b"x", 0, 1, msgspec.to_builtins(REGION), 1]),
    "segments below": HEADER
    + msgspec.msgpack.encode([2, b"x" * 16, 0, 1, msgspec.to_builtins(REGION), -1]),
    "unknown memory": HEADER
    + msgspec.msgpack.encode([2, b"x" * 16, 0, 1, ["tape", PAGE, PAGE, 1], 1]),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_what_is_no_welcome_is_refused(fake: RawExporter, answer: bytes) -> None:
    """Kills: rubbish that is reported as a lost peer, or met with an untyped error."""
    task = connecting(fake)
    with await fake.accept() as end:
        await end.send(answer)
        await fails(task, asyncvmm.RemoteProtocolError)
        await end.rest()


async def test_an_exporter_of_another_version_is_named_as_such(fake: RawExporter) -> None:
    """Kills: a version that is read after the message, which may not be readable."""
    task = connecting(fake)
    with await fake.accept() as end:
        await end.send(wire._HEADER.pack(wire.MAGIC, wire.VERSION + 7) + b"from the future")
        with pytest.raises(asyncvmm.VersionMismatchError) as caught:
            await task
    assert (caught.value.ours, caught.value.theirs) == (wire.VERSION, wire.VERSION + 7)


REJECTIONS: list[tuple[str, list[int], type[asyncvmm.HandshakeError]]] = [
    ("rank", [0, 2], asyncvmm.RankError),
    ("rank", [-1, -1], asyncvmm.RankError),
    ("rank", [], asyncvmm.HandshakeError),
    ("rank", [1] * 64, asyncvmm.HandshakeError),
    ("version", [3], asyncvmm.VersionMismatchError),
    ("version", [], asyncvmm.HandshakeError),
    ("access_denied", [], asyncvmm.AccessDeniedError),
    ("access_denied", [2**63], asyncvmm.AccessDeniedError),
    ("\x00" * 1024, [-(2**63)], asyncvmm.HandshakeError),
]


@pytest.mark.parametrize(("reason", "numbers", "kind"), REJECTIONS)
async def test_any_rejection_is_a_typed_error(
    fake: RawExporter, reason: str, numbers: list[int], kind: type[asyncvmm.HandshakeError]
) -> None:
    """Kills: a rejection that is taken apart without a look at how long it is."""
    task = connecting(fake)
    with await fake.accept() as end:
        await end.send(wire.encode_greeting(wire.Rejected(reason, "no", numbers)))
        with pytest.raises(kind) as caught:
            await task
    assert type(caught.value) is kind


@pytest.mark.parametrize(("numbers", "uid"), [([0], 0), ([1000], 1000), ([-1], -1), ([], -1)])
async def test_a_refused_user_is_named(fake: RawExporter, numbers: list[int], uid: int) -> None:
    """Kills: root taken for nobody."""
    task = connecting(fake)
    with await fake.accept() as end:
        await end.send(wire.encode_greeting(wire.Rejected("access_denied", "no", numbers)))
        with pytest.raises(asyncvmm.AccessDeniedError) as caught:
            await task
    assert caught.value.uid == uid


def region(**fields: Any) -> RegionInfo:
    return msgspec.structs.replace(REGION, **fields)


REGIONS: dict[str, RegionInfo] = {
    "no slots": region(slots=0),
    "slots below": region(slots=-1),
    "too many slots": region(slots=1025),
    "2^62 slots": region(slots=1 << 62),
    "no bytes": region(max_nbytes=0),
    "bytes below": region(max_nbytes=-PAGE),
    "half a granule": region(max_nbytes=PAGE + 1),
    "no granule": region(granule=0),
    "a granule below": region(granule=-PAGE),
    "a granule of 256": region(granule=256, max_nbytes=PAGE),
    "a granule of 3 bytes": region(granule=3, max_nbytes=3 * PAGE),
    "more than the address space": region(max_nbytes=1 << 62),
    "another kind": region(kind="cuda", handle_type="posix"),
    "another handle": region(handle_type="fabric"),
    "writable": region(writable=True),
}


@pytest.mark.parametrize("wrong", REGIONS.values(), ids=REGIONS)
async def test_a_pool_that_cannot_be_is_refused(fake: RawExporter, wrong: RegionInfo) -> None:
    """Kills: a size that is used before it is looked at, also where memory is only reserved."""
    task = connecting(fake)
    with await fake.accept() as end:
        await end.send(welcome(wrong))
        await fails(task, asyncvmm.RemoteProtocolError, asyncvmm.BackendError)
        await end.rest()


# -- segments ------------------------------------------------------------------------------------

FdOf = Callable[[], AbstractContextManager[int]]


class opened:
    """A descriptor of something that is no memfd."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)


SEGMENTS: dict[str, tuple[SegmentInfo, FdOf | None]] = {
    "no descriptor": (SEGMENT, None),
    "no seals": (SEGMENT, lambda: memfd(PAGE, 0)),
    **{
        f"without seal {seal:#x}": (SEGMENT, lambda seal=seal: memfd(PAGE, SEALS & ~seal))  # type: ignore[misc]  # a default binds it
        for seal in (1, 2, 4, 16)
    },
    "an empty file": (SEGMENT, lambda: memfd(0)),
    "a file too short": (SegmentInfo(0, 0, 2 * PAGE), lambda: memfd(PAGE)),
    "a file too long": (SEGMENT, lambda: memfd(2 * PAGE)),
    "a file that is not whole pages": (SEGMENT, lambda: memfd(PAGE - 1)),
    "a device": (SEGMENT, lambda: opened(os.open("/dev/zero", os.O_RDWR))),
    "a folder": (SEGMENT, lambda: opened(os.open("/", os.O_RDONLY))),
    "a pidfd": (SEGMENT, lambda: opened(os.pidfd_open(os.getpid()))),
    "a file of this test": (SEGMENT, lambda: opened(os.open(__file__, os.O_RDONLY))),
    "an index below": (SegmentInfo(-1, 0, PAGE), lambda: memfd(PAGE)),
    "a start below": (SegmentInfo(0, -PAGE, PAGE), lambda: memfd(PAGE)),
    "a crooked start": (SegmentInfo(0, 1, PAGE), lambda: memfd(PAGE)),
    "no bytes": (SegmentInfo(0, 0, 0), lambda: memfd(0)),
    "bytes below": (SegmentInfo(0, PAGE, -PAGE), lambda: memfd(PAGE)),
    "past the end": (SegmentInfo(0, 4 * PAGE, PAGE), lambda: memfd(PAGE)),
    "across the end": (SegmentInfo(0, 3 * PAGE, 2 * PAGE), lambda: memfd(2 * PAGE)),
    "far out": (SegmentInfo(0, 1 << 62, PAGE), lambda: memfd(PAGE)),
    "huge": (SegmentInfo(0, 0, 1 << 62), lambda: memfd(PAGE)),
}


@pytest.mark.parametrize(("info", "fd_of"), SEGMENTS.values(), ids=SEGMENTS)
async def test_a_segment_that_is_not_what_it_must_be_is_not_mapped(
    fake: RawExporter, info: SegmentInfo, fd_of: FdOf | None
) -> None:
    """Unsealed, of another size, elsewhere, no memfd at all (field reports 51, 52).

    Kills: memory that is mapped before its seals and size were looked at, which its maker can
    take away under a reader.
    """
    task = connecting(fake)
    with await fake.accept() as end, ExitStack() as stack:
        await end.send(welcome(REGION))
        fds = [stack.enter_context(fd_of())] if fd_of is not None else []
        await end.send(packet(wire.Segment(info)), fds=fds)
        text = await fails(task, asyncvmm.RemoteProtocolError, asyncvmm.BackendError)
        assert "segment" in text
        assert Counters.of().mappings == 0
        await end.rest()


@pytest.mark.parametrize("count", [2, 253])
async def test_more_descriptors_than_a_segment_has_are_refused(
    fake: RawExporter, count: int
) -> None:
    """Kills: descriptors that nobody asked for and nobody closes (field report 33)."""
    task = connecting(fake)
    with await fake.accept() as end, memfd(PAGE) as fd:
        await end.send(welcome(REGION))
        await end.send(packet(wire.Segment(SEGMENT)), fds=[fd] * count)
        await fails(task, asyncvmm.RemoteProtocolError)
        await end.rest()


async def test_what_comes_before_the_pool_is_mapped_is_bounded(fake: RawExporter) -> None:
    """Flood a consumer between its welcome and its mapping, with descriptors.

    Kills: packets and descriptors that pile up in the process until there is memory for them.
    """
    go_on = threading.Event()

    def before_call(name: str) -> None:
        if name == "attach":
            go_on.wait()

    task = connecting(fake, _port=WatchedPort(before_call))
    with await fake.accept() as end, memfd(PAGE) as fd:
        await end.send(welcome(REGION, segments=1 << 62))
        await turns(50)
        before = Counters.of().descriptors
        flood = packet(wire.Segment(SEGMENT))
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < 10_000:
                end.put(flood, [fd])
                sent += 1
                await turns(1)
        assert sent < 1000  # what a socket holds
        assert Counters.of().descriptors == before
        go_on.set()
        await fails(task, asyncvmm.RemoteProtocolError)  # the second one overlaps the first


# -- deliveries ----------------------------------------------------------------------------------


def feature(name: str = "x", dtype: str = "uint8", shape: tuple[int, ...] = (100,)) -> wire.Feature:
    return wire.Feature(name, dtype, shape)


def raw_owner(**fields: Any) -> bytes:
    """Return a delivery whose fields need not be what the wire allows."""
    values = {
        "slot": 0, "generation": 1, "start": 0, "nbytes": 256, "key": 1,
        "features": [["x", "uint8", [100]]], "metadata": b"", **fields,
    }  # fmt: skip
    return b"\x91" + msgspec.msgpack.encode([7, [list(values.values())]])


BAD: dict[str, list[bytes]] = {
    **{name: [data] for name, data in RUBBISH.items()},
    "a slot above": [deliver(owner(slot=4))],
    "a huge slot": [deliver(owner(slot=1 << 62))],
    "a slot below": [raw_owner(slot=-1)],
    "generation 0": [deliver(owner(generation=0))],
    "a generation twice": [deliver(owner()), deliver(owner())],
    "a generation backwards": [deliver(owner(generation=7)), deliver(owner(generation=6))],
    "a slot that is held": [deliver(owner()), deliver(owner(generation=2))],
    "a slot twice in one batch": [deliver(owner(), owner(generation=2))],
    "an empty batch": [b"\x91" + msgspec.msgpack.encode([7, []])],
    "a crooked start": [deliver(owner(start=128))],
    "a start below": [raw_owner(start=-256)],
    "past the segment": [deliver(owner(start=PAGE))],
    "across the end of the segment": [
        deliver(owner(start=PAGE - 256, features=[feature(shape=(512,))]))
    ],
    "in a hole": [deliver(owner(start=2 * PAGE))],
    "far out": [deliver(owner(start=1 << 62))],
    "wrapped around": [deliver(owner(start=(1 << 62) - 256, nbytes=1 << 62))],
    "no bytes": [deliver(owner(nbytes=0))],
    "bytes below": [raw_owner(nbytes=-256)],
    "too few bytes": [deliver(owner(nbytes=256, features=[feature(shape=(257,))]))],
    "too many bytes": [deliver(owner(nbytes=512))],
    "a huge shape": [deliver(owner(nbytes=256, features=[feature(shape=(1 << 62,) * 64)]))],
    "a shape that wraps": [
        deliver(owner(nbytes=256, features=[feature(dtype="int64", shape=(1 << 61,))]))
    ],
    "nothing, of a huge shape": [
        deliver(owner(nbytes=256, features=[feature(shape=(0, 1 << 62, 1 << 62))]))
    ],
    "65 dimensions": [deliver(owner(nbytes=256, features=[feature(shape=(1,) * 65)]))],
    "a length below": [raw_owner(features=[["x", "uint8", [-100]]])],
    "two lengths below": [raw_owner(features=[["x", "uint8", [-10, -10]]])],
    "a length that is text": [raw_owner(features=[["x", "uint8", ["100"]]])],
    "an unknown dtype": [deliver(owner(nbytes=256, features=[feature(dtype="float80")]))],
    "a dtype that is code": [
        deliver(owner(nbytes=256, features=[feature(dtype="__import__('os')")]))
    ],
    "a feature twice": [deliver(owner(features=[feature(), feature()]))],
    "too many features": [
        raw_owner(nbytes=256 * 1025, features=[[str(i), "uint8", [1]] for i in range(1025)])
    ],
    "an event in host memory": [packet(wire.Ready(0, b"x" * 64))],
    "an event for a slot above": [packet(wire.Ready(4, b"x" * 64))],
    "an unmap of nothing": [packet(wire.Unmap(1))],
    "an unmap of what is held": [deliver(owner()), packet(wire.Unmap(0))],
    "a segment twice": [packet(wire.Segment(SEGMENT))],
    "a segment that overlaps": [packet(wire.Segment(SegmentInfo(1, 0, PAGE)))],
    "a batch after the goodbye": [packet(wire.Goodbye()), deliver(owner())],
    "a release": [packet(wire.Release(0, 1))],
    "a welcome": [welcome(REGION)],
}


@pytest.mark.parametrize("name", BAD)
async def test_a_message_that_cannot_be_right_ends_the_stream(fake: RawExporter, name: str) -> None:
    """Offsets, lengths, shapes, slots, generations (field reports 19, 51, 53).

    What was good is received before or dropped; what comes behind it raises, and no view can be
    had of bytes that were not checked.  Kills: any one check of ``ConsumerCore`` left out.
    """
    packets = BAD[name]
    task = connecting(fake)
    with await fake.greet(REGION, SEGMENT, SegmentInfo(5, 3 * PAGE, PAGE)) as end:
        async with asyncio.timeout(PROMPTLY):
            consumer = await task
        assert await end.packet() is not None  # attached
        with memfd(PAGE) as fd:
            await end.send(*packets[:-1])
            await end.send(packets[-1], fds=[fd] if "segment" in name else [])

        async def receive() -> None:
            _ = [await consumer.receive() for _ in packets]  # all held until one raises

        # Behind a goodbye nobody looks for errors: the stream has ended either way.
        kinds = [asyncvmm.RemoteProtocolError, *[asyncvmm.EndOfStream] * ("goodbye" in name)]
        await fails(asyncio.ensure_future(receive()), *kinds)
        assert "goodbye" not in name or consumer.statistics().delivered == 0
        await consumer.aclose()
        await end.rest()


async def test_right_messages_are_taken(fake: RawExporter) -> None:
    """The control of the tests above: the same ends with nothing wrong in what they say."""
    task = connecting(fake)
    with await fake.greet(REGION, SEGMENT, SegmentInfo(5, 3 * PAGE, PAGE)) as end:
        consumer = await task
        await end.packet()
        await end.send(deliver(owner(), owner(slot=1, start=256)), packet(wire.Unmap(5)))
        await end.send(deliver(owner(slot=2, generation=9, start=512)))
        first, second = await consumer.receive(), await consumer.receive()
        assert [o.key for o in (*first, *second)] == ["0.1", "1.1", "2.9"]
        assert first[0]["x"].tolist() == [0] * 100
        first.release()
        second.release()
        await end.send(deliver(owner(generation=2)), packet(wire.Goodbye(), wire.Goodbye()))
        (await consumer.receive()).release()
        with pytest.raises(asyncvmm.EndOfStream):
            await consumer.receive()
        closing = asyncio.ensure_future(consumer.aclose())
        await turns(3)
        end.close()
        await closing
        del first, second


METADATA: dict[str, bytes] = {
    **RUBBISH,
    "cut short": b"\x81\xa1x",
    "too much": b"\xc0\xc0",
}


@pytest.mark.parametrize("metadata", METADATA.values(), ids=METADATA)
async def test_metadata_that_cannot_be_read_costs_its_reader_alone(
    fake: RawExporter, metadata: bytes
) -> None:
    """Kills: metadata that is unpickled, or whose declared size is believed (field report 53)."""
    task = connecting(fake)
    with await fake.greet(REGION, SEGMENT) as end:
        consumer = await task
        await end.packet()
        await end.send(raw_owner(metadata=metadata[:40_000]))
        batch = await consumer.receive()
        with contextlib.suppress(asyncvmm.RemoteProtocolError):
            assert batch[0].metadata is not None
        assert batch[0]["x"].tolist() == [0] * 100  # the tensors are there all the same
        batch.release()
        del batch
        closing = asyncio.ensure_future(consumer.aclose())
        await turns(3)
        end.close()
        await closing


async def test_a_consumer_of_a_liar_and_an_honest_one_share_a_process(
    fake: RawExporter, folder: Path
) -> None:
    """Kills: an error of one link that reaches another."""
    name = str(folder / "honest")
    async with (
        asyncvmm.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter,
        asyncvmm.connect(name, device="cpu", rank=0) as honest,
    ):
        task = connecting(fake)
        with await fake.greet(REGION, SEGMENT) as end:
            liar = await task
            await end.send(deliver(owner(slot=9)))
            with pytest.raises(asyncvmm.RemoteProtocolError):
                await liar.receive()
            await liar.aclose()
        ack = await exporter.send({"x": torch.ones(3)})
        (await honest.receive()).release()
        assert (await ack).complete
