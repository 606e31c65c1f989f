"""Messages and packets: what goes round, what is refused, and that nothing else comes out."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncvmm._core import observation, wire
from asyncvmm._errors import ArgumentError, RemoteProtocolError, VersionMismatchError
from asyncvmm._types import RegionInfo, SegmentInfo

BIG = 2**62
naturals = st.integers(0, BIG)
handles = st.binary(max_size=wire.MAX_EVENT_HANDLE)
plain = st.characters(exclude_categories=["Cs"])
texts = st.text(plain, max_size=20) | st.just("x" * wire.MAX_TEXT)
keys = st.text(plain, max_size=20) | st.integers(-(2**63), 2**64 - 1)
features = st.builds(
    wire.Feature, texts, texts, st.lists(naturals, max_size=4).map(lambda shape: tuple(shape))
)
owners = st.builds(
    wire.OwnerFrame,
    naturals,
    naturals,
    naturals,
    naturals,
    keys,
    st.lists(features, max_size=3),
    st.binary(max_size=50),
)
segments = st.builds(SegmentInfo, naturals, naturals, naturals)
regions = st.builds(
    RegionInfo,
    st.sampled_from(["host", "cuda"]),
    naturals,
    naturals,
    naturals,
    st.booleans(),
    st.sampled_from(["memfd", "posix", "fabric"]),
    st.text(plain, max_size=10),
)
proofs = st.binary(min_size=16, max_size=16)
rejections = st.builds(wire.Rejected, texts, texts, st.lists(st.integers(-9, 9), max_size=64))
goodbyes = st.builds(wire.Goodbye, naturals, texts)
from_consumer = st.one_of(
    st.builds(wire.Take, naturals, naturals),
    st.builds(wire.Release, naturals, naturals, handles, st.integers(0, 65535)),
    st.builds(wire.Refuse, naturals, naturals, texts),
    st.builds(wire.Redeem, naturals, naturals, proofs),
    st.builds(wire.Waive, naturals, naturals, proofs, naturals, naturals),
    st.builds(wire.PutBack, naturals, naturals),
    goodbyes,
)
from_exporter = st.one_of(
    st.builds(wire.Segment, segments, handles),
    st.builds(wire.Unmap, naturals),
    st.builds(wire.Ready, naturals, handles),
    st.builds(wire.Deliver, st.lists(owners, min_size=1, max_size=3)),
    st.builds(wire.Redeemed, owners),
    st.builds(wire.Denied, naturals, naturals, texts),
    rejections,
    goodbyes,
)
greetings = st.one_of(
    st.builds(
        wire.Hello,
        st.none() | st.integers(-(2**63), 2**63),
        st.none() | texts,
        texts,
        st.booleans(),
        st.integers(1, 65536),
        st.binary(max_size=100),
    ),
    st.builds(
        wire.Welcome,
        st.binary(min_size=16, max_size=16),
        naturals,
        naturals,
        regions,
        naturals,
        st.booleans(),
    ),
    rejections,
    st.just(wire.Attached()),
    st.builds(wire.Observe, st.binary(max_size=1024)),
    st.builds(wire.Resume, st.binary(min_size=16, max_size=16), naturals, st.binary(max_size=1024)),
    st.builds(wire.Resumed, st.lists(st.tuples(naturals, naturals), max_size=9)),
)
DECODERS: dict[str, Callable[[bytes], object]] = {
    "from consumer": wire.decode_from_consumer,
    "from exporter": wire.decode_from_exporter,
    "greeting": wire.decode_greeting,
}


def refused_or_read(decode: Callable[[bytes], object], packet: bytes) -> bool:
    """Decode; say whether it was refused.  Whatever else is raised fails the test."""
    try:
        decode(packet)
    except (RemoteProtocolError, VersionMismatchError):
        return True
    return False


# -- round trips ------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.lists(from_consumer, max_size=20))
def test_what_a_consumer_says_is_heard(messages: list[wire.FromConsumer]) -> None:
    """Kills a field that is dropped, swapped or bounded too tightly."""
    packet = wire.frame([wire.encode(message) for message in messages])
    assert wire.decode_from_consumer(packet) == messages
    assert wire.decode_from_consumer(memoryview(packet)) == messages


@pytest.mark.slow
@given(st.lists(from_exporter, max_size=20))
def test_what_an_exporter_says_is_heard(messages: list[wire.FromExporter]) -> None:
    """Kills a field that is dropped, swapped or bounded too tightly."""
    packet = wire.frame([wire.encode(message) for message in messages])
    assert wire.decode_from_exporter(packet) == messages
    assert wire.decode_from_exporter(memoryview(packet)) == messages


@pytest.mark.slow
@given(greetings)
def test_greetings_go_round(message: wire.Greeting) -> None:
    """Kills a greeting that is framed like any other packet."""
    packet = wire.encode_greeting(message)
    assert packet.startswith(wire.MAGIC)
    assert wire.frame([packet]) == packet
    assert wire.decode_greeting(packet) == message


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 255, 256, 5000])
def test_any_number_of_messages_fits_a_packet(count: int) -> None:
    """Kills a packet whose header counts to fifteen."""
    messages: list[wire.FromConsumer] = [wire.Take(slot, 1) for slot in range(count)]
    packet = wire.frame([wire.encode(message) for message in messages])
    assert len(packet) <= wire.PACKET_LIMIT
    assert wire.decode_from_consumer(packet) == messages


def test_a_list_in_a_message_is_copied_out_of_the_packet() -> None:
    """Kills metadata that changes when the link reads its next packet into the same memory."""
    buffer = bytearray(
        wire.frame([wire.encode(wire.Deliver([wire.OwnerFrame(0, 1, 0, 256, 1, [], b"old")]))])
    )
    (message,) = wire.decode_from_exporter(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert isinstance(message, wire.Deliver)
    assert message.owners[0].metadata == b"old"


def snapshot() -> observation.Snapshot:
    """Return one in which no two fields that could be confused have the same value."""
    numbers = iter(range(1, 100))
    pool: dict[str, Any] = {}
    for name in observation.PoolLine.__struct_fields__:
        if name == "device":
            pool[name] = "cpu"
        elif name == "slots":
            pool[name] = observation.SlotLine(*(next(numbers) for _ in range(6)))
        elif name in ("handoff", "release", "wait"):
            pool[name] = observation.LatencyLine((next(numbers),), 0.5)
        else:
            pool[name] = float(next(numbers)) if name.endswith("_wait") else next(numbers)
    owner = observation.OwnerLine("k", 1, 2, 256, "held", 0.5)
    consumer = observation.ConsumerLine(0, 9, "open", False, 1, 2, 0.25, 3, 4, 5)
    return observation.Snapshot(
        b"e" * 16,
        "n",
        7,
        1.5,
        "compete",
        observation.PoolLine(**pool),
        "why",
        [owner],
        1,
        [consumer],
        1,
    )


GOLDEN: dict[str, tuple[wire.Message, str]] = {
    "hello": (wire.Hello(1, "n", "host"), "970101a16ea4686f7374c202c400"),
    "welcome": (
        wire.Welcome(b"e" * 16, 3, 2, RegionInfo("host", 4096, 4096, 8), 1),
        "9702c410" + "65" * 16 + "030297a4686f7374cd1000cd100008c2a56d656d6664a001c2",
    ),
    "rejected": (wire.Rejected("rank", "t"), "9403a472616e6ba17490"),
    "attached": (wire.Attached(), "910c"),
    "segment": (wire.Segment(SegmentInfo(1, 0, 9), b"h"), "930493010009c40168"),
    "unmap": (wire.Unmap(3), "920503"),
    "ready": (wire.Ready(3, b"h"), "930603c40168"),
    "deliver": (
        wire.Deliver([wire.OwnerFrame(1, 2, 0, 256, "k", [wire.Feature("a", "bool", (3,))])]),
        "92079197010200cd0100a16b9193a161a4626f6f6c9103c400",
    ),
    "take": (wire.Take(1, 2), "93080102"),
    "release": (wire.Release(1, 2), "96090102c4000090"),
    "refuse": (wire.Refuse(1, 2, "r"), "940a0102a172"),
    "goodbye": (wire.Goodbye(), "930b00a0"),
    "observe": (wire.Observe(b"s"), "9214c40173"),
    "snapshot": (
        snapshot(),
        "9c15c41065656565656565656565656565656565a16e07cb3ff8000000000000a7636f6d70657465"
        "dc001ea36370750102030405060708090a0b960c0d0e0f101112cb403300000000000014cb403500"
        "0000000000cb40360000000000001718191a1b1c1d1e1f929120cb3fe0000000000000929121cb3f"
        "e0000000000000929122cb3fe0000000000000a37768799196a16b0102cd0100a468656c64cb3fe0"
        "00000000000001919a0009a46f70656ec20102cb3fd000000000000003040501",
    ),
    "redeem": (wire.Redeem(1, 2, b"p" * 16), "940d0102c410" + "70" * 16),
    "waive": (wire.Waive(1, 2, b"p" * 16, 3, 4), "960e0102c410" + "70" * 16 + "0304"),
    "put back": (wire.PutBack(1, 2), "930f0102"),
    "denied": (wire.Denied(1, 2, "r"), "94100102a172"),
    "redeemed": (
        wire.Redeemed(wire.OwnerFrame(1, 2, 0, 256, "k", [wire.Feature("a", "bool", (3,))])),
        "921197010200cd0100a16b9193a161a4626f6f6c9103c400",
    ),
    "resume": (wire.Resume(b"e" * 16, 3), "9416c410" + "65" * 16 + "03c400"),
    "resumed": (wire.Resumed([(1, 2)]), "921791920102"),
}


@pytest.mark.parametrize("what", GOLDEN)
def test_the_bytes_of_a_message_change_only_with_the_version(what: str) -> None:
    """Kills a field that moves, or a tag or default that changes, without anybody noticing.

    Whoever changes this table raises VERSION, unless an older release reads the new bytes right.
    """
    message, data = GOLDEN[what]
    assert wire.encode(message).hex() == data
    assert wire.VERSION == 2
    with pytest.raises(AttributeError):
        setattr(message, next(iter(message.__struct_fields__), "any"), 0)


def test_a_greeting_is_a_packet_of_its_own() -> None:
    """Kills a greeting that is wrapped, and a first message that is not."""
    greeting = wire.encode_greeting(wire.Attached())
    assert greeting == b"AVMM\x00\x02\x91\x0c"
    assert wire.frame([greeting]) == greeting
    assert wire.frame([wire.encode(wire.Take(1, 2))]).hex() == "9193080102"
    assert wire.frame([]) == b"\x90"


# -- bounds -----------------------------------------------------------------------------------

DELIVER = wire.Deliver([wire.OwnerFrame(0, 1, 0, 256, "k", [wire.Feature("a", "bool", (3,))])])
OUT_OF_BOUNDS: dict[str, object] = {
    "negative slot": wire.Release(-1, 1),
    "slot over 2**62": wire.Release(BIG + 1, 1),
    "negative generation": wire.Take(0, -1),
    "handle of 65 bytes": wire.Release(0, 1, b"h" * 65),
    "lane over 65535": wire.Release(0, 1, b"", 65536),
    "negative lane": wire.Release(0, 1, b"", -1),
    "others with a negative slot": wire.Release(0, 1, b"", 1, [(-1, 1)]),
    "others with a slot over 2**62": wire.Release(0, 1, b"", 1, [(BIG + 1, 1)]),
    "more others than slots": wire.Release(0, 1, b"", 1, [(0, 1)] * 1025),
    "reason of 1,025": wire.Refuse(0, 1, "x" * 1025),
    "negative lingering": wire.Goodbye(-1),
    "goodbye of 1,025": wire.Goodbye(0, "x" * 1025),
    "proof of 15": wire.Redeem(0, 1, b"p" * 15),
    "proof of 17": wire.Waive(0, 1, b"p" * 17),
    "negative rank": wire.Waive(0, 1, b"p" * 16, -1),
    "negative count": wire.Waive(0, 1, b"p" * 16, 0, -1),
    "negative put back": wire.PutBack(-1, 1),
    "denial of 4,097": wire.Denied(0, 1, "x" * 4097),
    "float slot": wire.Release(1.5, 1),  # type: ignore[arg-type]  # wrong on purpose
    "text slot": wire.Release("1", 1),  # type: ignore[arg-type]  # wrong on purpose
    "true slot": wire.Release(True, 1),
    "negative unmap": wire.Unmap(-1),
    "event of 65 bytes": wire.Ready(0, b"h" * 65),
    "segment handle of 65 bytes": wire.Segment(SegmentInfo(0, 0, 1), b"h" * 65),
    "batch of no owner": wire.Deliver([]),
    "key that is no key": wire.Deliver([msgspec.structs.replace(DELIVER.owners[0], key=True)]),
    "key of 4,097": wire.Deliver([msgspec.structs.replace(DELIVER.owners[0], key="k" * 4097)]),
    "1,025 features": wire.Deliver(
        [msgspec.structs.replace(DELIVER.owners[0], features=[wire.Feature("", "", ())] * 1025)]
    ),
    "negative length": wire.Deliver(
        [msgspec.structs.replace(DELIVER.owners[0], features=[wire.Feature("a", "bool", (-1,))])]
    ),
}


@pytest.mark.parametrize("what", OUT_OF_BOUNDS)
def test_a_field_out_of_bounds_is_refused(what: str) -> None:
    """Kills a bound that is documented and not kept (field report 53)."""
    packet = wire.frame([msgspec.msgpack.encode(OUT_OF_BOUNDS[what])])
    for decode in (wire.decode_from_consumer, wire.decode_from_exporter):
        with pytest.raises(RemoteProtocolError, match="is no packet"):
            decode(packet)


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(2**63, "n" * 1024, "k" * 1024, window=wire.MAX_WINDOW, secret=b"s" * 1024),
        wire.Hello(None, None, "", window=1),
        wire.Resume(b"e" * 16, BIG, b"s" * 1024),
        wire.Resumed([(BIG, BIG)] * 1024),
        wire.Welcome(b"e" * 16, BIG, BIG, RegionInfo("cuda", 2**63, 2**63, 2**63), BIG, debug=True),
        wire.Rejected("r" * 1024, "t" * 1024, [-1] * 64),
        wire.Release(BIG, BIG, b"h" * 64, 65535, [(BIG, BIG)] * 1024),
        wire.Refuse(0, 0, "\u20ac" * 1024),
        wire.Goodbye(BIG, "x" * 1024),
        wire.Redeem(BIG, BIG, b"p" * 16),
        wire.Waive(BIG, BIG, b"p" * 16, BIG, BIG),
        wire.PutBack(BIG, BIG),
        wire.Denied(BIG, BIG, "x" * 4096),
        wire.Redeemed(wire.OwnerFrame(BIG, BIG, BIG, BIG, "k" * 4096, [])),
        wire.Segment(SegmentInfo(2**63, 2**63, 2**63), b"h" * 64),
        wire.Ready(BIG, b"h" * 64),
        wire.Unmap(BIG),
        wire.Deliver([wire.OwnerFrame(BIG, BIG, BIG, BIG, "k" * 4096, [])]),
        wire.Deliver([wire.OwnerFrame(0, 0, 0, 0, 2**64 - 1, [wire.Feature("", "", ())] * 1024)]),
    ],
)
def test_a_field_at_its_bound_is_taken(message: wire.Message) -> None:
    """Kills a bound that is off by one."""
    if isinstance(message, wire.Greeting):
        assert wire.decode_greeting(wire.encode_greeting(message)) == message
        return
    packet = wire.frame([wire.encode(message)])
    from_consumer = isinstance(message, wire.FromConsumer)
    decode = wire.decode_from_consumer if from_consumer else wire.decode_from_exporter
    assert decode(packet) == [message]


@pytest.mark.parametrize("direction", ["from consumer", "from exporter"])
def test_each_side_may_say_only_its_own_messages(direction: str) -> None:
    """Kills a consumer that sends batches, and an exporter that releases."""
    owner = DELIVER.owners[0]
    others: list[wire.Message]
    if direction == "from consumer":
        others = [wire.Segment(SegmentInfo(0, 0, 1)), wire.Unmap(0), wire.Ready(0, b""), DELIVER]
        others += [wire.Denied(0, 1, ""), wire.Redeemed(owner), wire.Rejected("", "")]
    else:
        others = [wire.Take(0, 1), wire.Release(0, 1), wire.Refuse(0, 1, ""), wire.PutBack(0, 1)]
        others += [wire.Redeem(0, 1, b"p" * 16), wire.Waive(0, 1, b"p" * 16)]
    others += [wire.Hello(0, None, "host"), wire.Attached()]
    others += [wire.Observe(), wire.Resume(b"e" * 16, 0), wire.Resumed([])]
    for message in others:
        assert refused_or_read(DECODERS[direction], wire.frame([wire.encode(message)]))


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(0, "n" * 1025, "host"),
        wire.Hello(0, None, "host", window=0),
        wire.Hello(0, None, "host", secret=b"s" * 1025),
        wire.Hello(0, "\ud800", "host"),
        wire.Hello(2**70, None, "host"),
        wire.Welcome(b"short", 0, 0, RegionInfo("host", 1, 1, 1), 0),
        wire.Rejected("rank", "t" * 1025),
        wire.Resume(b"e" * 15, 0),
        wire.Resume(b"e" * 16, -1),
        wire.Resume(b"e" * 16, 0, b"s" * 1025),
        wire.Resumed([(0, -1)]),
        wire.Resumed([(0, 1)] * 1025),
    ],
)
def test_a_greeting_that_the_other_end_would_refuse_is_refused_here(
    message: wire.Greeting,
) -> None:
    """Kills a bad argument that is blamed on the other end."""
    with pytest.raises(ArgumentError):
        wire.encode_greeting(message)


def test_a_message_larger_than_a_packet_is_refused_with_the_numbers() -> None:
    """Kills a message that no link can send (field report 35)."""
    fits = wire.MESSAGE_LIMIT - 20
    for size in (fits, wire.MESSAGE_LIMIT + 1):
        message = wire.Deliver([wire.OwnerFrame(0, 1, 0, 256, 1, [], b"m" * size)])
        if size == fits:
            assert len(wire.frame([wire.encode(message)])) <= wire.PACKET_LIMIT
        else:
            with pytest.raises(ArgumentError, match=f"{wire.MESSAGE_LIMIT:,} fit a packet"):
                wire.encode(message)


@pytest.mark.parametrize("key", [2**64, -(2**63) - 1, "\udfff", object()])
def test_what_cannot_be_written_is_an_argument_error(key: object) -> None:
    """Kills an OverflowError in the middle of a publication."""
    bad = msgspec.structs.replace(DELIVER.owners[0], key=key)
    with pytest.raises(ArgumentError, match="Deliver message cannot be written"):
        wire.encode(wire.Deliver([bad]))


def test_a_key_is_text_or_a_number() -> None:
    """Kills a key that only the other end refuses."""
    for key in ("", "k" * wire.MAX_KEY, -(2**63), 2**64 - 1):
        wire.check_key(key)
    for bad in ("k" * (wire.MAX_KEY + 1), True, None, 1.0, b"k", ("k",)):
        with pytest.raises(ArgumentError, match="a key"):
            wire.check_key(bad)


def test_a_secret_is_text_or_bytes() -> None:
    """Kills a secret that only the other end refuses."""
    assert wire.check_secret("s\u20ac") == "s\u20ac".encode()
    assert wire.check_secret(b"s" * 1024) == b"s" * 1024
    for bad in ("\u20ac" * 342, b"s" * 1025, None, 7, [b"s"]):
        with pytest.raises(ArgumentError, match="a secret"):
            wire.check_secret(bad)


def test_a_message_of_just_the_limit_fits_a_packet() -> None:
    """Kills a limit that leaves no room for the packet's header, or wastes some."""
    empty = wire.Deliver([wire.OwnerFrame(0, 1, 0, 256, 1, [], b"m" * 60_000)])
    rest = wire.MESSAGE_LIMIT - len(wire.encode(empty))
    full = wire.Deliver([wire.OwnerFrame(0, 1, 0, 256, 1, [], b"m" * (60_000 + rest))])
    assert len(wire.encode(full)) == wire.MESSAGE_LIMIT == 65472
    assert len(wire.frame([wire.encode(full)])) <= wire.PACKET_LIMIT == 65536
    more = wire.Deliver([wire.OwnerFrame(0, 1, 0, 256, 1, [], b"m" * (60_001 + rest))])
    with pytest.raises(ArgumentError, match="takes 65,473 bytes"):
        wire.encode(more)


@given(st.text(st.characters(), max_size=50) | st.text("\ud800x", max_size=3000))
@settings(max_examples=40)
def test_any_text_can_be_clipped_to_one_that_travels(text: str) -> None:
    """Kills a reason that loses the message it explains."""
    message = wire.Goodbye(reason=wire.clip(text))
    assert wire.decode_from_exporter(wire.frame([wire.encode(message)])) == [message]
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert message.reason == text[: wire.MAX_TEXT]


# -- versions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 65535])
def test_another_version_is_told_apart_from_rubbish(version: int) -> None:
    """Kills "bad packet" where "install the same release" is meant (field report 53)."""
    packet = wire.encode_greeting(wire.Hello(0, None, "host"), version=version)
    for data in (packet, packet[:6], packet[:6] + b"what a later version says"):
        with pytest.raises(VersionMismatchError) as caught:
            wire.decode_greeting(data)
        assert (caught.value.ours, caught.value.theirs) == (wire.VERSION, version)


@pytest.mark.parametrize("data", [b"", b"AVM", b"AVMM\0", b"avmm\0\1\x90", b"GET / HTTP/1.1"])
def test_another_protocol_is_refused(data: bytes) -> None:
    """Kills a read past the end of a short packet."""
    with pytest.raises(RemoteProtocolError, match="does not speak this protocol"):
        wire.decode_greeting(data)


# -- rubbish ----------------------------------------------------------------------------------


@contextmanager
def little_memory(nbytes: int = 256 << 20) -> Iterator[None]:
    """Let this process have only so much more address space."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Boom:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1/0",)


HUGE = b"\xff\xff\xff\xff"
RUBBISH: dict[str, bytes] = {
    "nothing": b"",
    "a pickle": pickle.dumps([Boom()]),
    "an old pickle": pickle.dumps([Boom()], protocol=0),
    "arrays 10,000 deep": b"\x91" * 10_000,
    "maps 10,000 deep": b"\x81" * 10_000,
    "arrays deep in an unknown field": b"\x91\x95\x08\x01\x01" + b"\x91" * 60_000,
    "maps deep in an unknown field": b"\x91\x95\x08\x01\x01" + b"\x81\x01" * 30_000,
    "arrays deep in a field": b"\x91\x92\x07" + b"\x91" * 60_000,
    "4 Gi messages": b"\xdd" + HUGE,
    "4 Gi owners": b"\x91\x92\x07\xdd" + HUGE,
    "4 Gi dimensions": b"\x91\x92\x07\x91\x96\x01\x01\x01\x01\x01\x91\x93\xa1a\xa1b\xdd" + HUGE,
    "4 GiB of text": b"\x91\x93\x0b\x00\xdb" + HUGE,
    "4 GiB of bytes": b"\x91\x93\x06\x00\xc6" + HUGE,
    "4 GiB of extension": b"\x91\xc9" + HUGE + b"\x01",
    "a 4 Gi map": b"\x91\xdf" + HUGE,
    "a huge int": b"\x91\x93\x08\xcf" + b"\xff" * 8 + b"\x01",
    "a huge negative int": b"\x91\x93\x08\xd3\x80" + b"\0" * 7 + b"\x01",
    "a float": b"\x91\x93\x08\xcb" + b"\x40" * 8 + b"\x01",
    "no text": b"\x91\x93\x0b\x00\xa2\xff\xfe",
    "a lone surrogate": b"\x91\x93\x0b\x00\xa3\xed\xa0\x80",
    "an unknown tag": b"\x91\x93\x63\x01\x01",
    "a negative tag": b"\x91\x93\xff\x01\x01",
    "a message without a tag": b"\x91\x90",
    "too few fields": b"\x91\x92\x08\x01",
    "a byte too many": b"\x90\x90",
    "a reserved byte": b"\xc1",
    "a map of fields": msgspec.msgpack.encode([{"type": 8, "slot": 1, "generation": 1}]),
    "json": b"[[8,1,1]]",
}


@pytest.mark.parametrize("what", RUBBISH)
@pytest.mark.parametrize("direction", DECODERS)
def test_rubbish_is_refused_with_bounded_memory(direction: str, what: str) -> None:
    """Kills a decoder that unpickles, recurses without end, or believes a length (report 53)."""
    packet = RUBBISH[what]
    if direction == "greeting":
        packet = wire.encode_greeting(wire.Attached())[:6] + packet.removeprefix(b"\x91")
    with little_memory(), pytest.raises(RemoteProtocolError):
        DECODERS[direction](packet)


packets = st.one_of(
    st.lists(from_consumer, max_size=4).map(
        lambda said: wire.frame([wire.encode(message) for message in said])
    ),
    st.lists(from_exporter, max_size=4).map(
        lambda said: wire.frame([wire.encode(message) for message in said])
    ),
    greetings.map(wire.encode_greeting),
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(packet=st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(packet: bytes) -> None:
    """Kills any other exception (field report 53)."""
    for decode in DECODERS.values():
        refused_or_read(decode, packet)
    refused_or_read(wire.decode_greeting, wire.encode_greeting(wire.Attached())[:6] + packet)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(packet=packets, data=st.data())
def test_altered_packets_raise_nothing_else(packet: bytes, data: st.DataObject) -> None:
    """Kills any other exception for a packet flipped, cut, extended or spliced (report 53)."""
    at = data.draw(st.integers(0, len(packet)))
    kind = data.draw(st.sampled_from(["flip", "cut", "extend", "splice", "double"]))
    if kind == "flip" and packet:
        at = min(at, len(packet) - 1)
        bit = 1 << data.draw(st.integers(0, 7))
        altered = packet[:at] + bytes([packet[at] ^ bit]) + packet[at + 1 :]
    elif kind == "cut":
        altered = packet[:at]
    elif kind == "extend":
        altered = packet + data.draw(st.binary(min_size=1, max_size=20))
    elif kind == "splice":
        altered = packet[:at] + data.draw(packets)
    else:
        altered = packet[:at] + packet[at:] * 2
    for decode in DECODERS.values():
        refused_or_read(decode, altered)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(said=st.lists(from_exporter, min_size=1, max_size=4), data=st.data())
def test_a_packet_that_was_cut_or_extended_is_refused(
    said: list[wire.FromExporter], data: st.DataObject
) -> None:
    """Kills half a packet that is taken for a whole one (field report 35)."""
    packet = wire.frame([wire.encode(message) for message in said])
    cut = data.draw(st.integers(0, len(packet) - 1))
    assert refused_or_read(wire.decode_from_exporter, packet[:cut])
    assert refused_or_read(wire.decode_from_exporter, packet + packet[:1])
