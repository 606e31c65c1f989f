"""Messages, packets, limits, version.

A packet is one MessagePack array of messages; a message is an array that begins with its tag.
The packets of the handshake (Hello, Welcome or Rejected, Attached), and those of observers, carry
four magic bytes and the version before that, so that two ends of different versions can still say
so.  Every field is typed and bounded here; what a field may *name* is checked by the cores.

This module does not know which side it is on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from asyncvmm._core.observation import MAX_SECRET as MAX_SECRET
from asyncvmm._core.observation import Observe as Observe
from asyncvmm._core.observation import Snapshot as Snapshot
from asyncvmm._core.observation import check_secret as check_secret
from asyncvmm._core.resuming import Resume as Resume
from asyncvmm._core.resuming import Resumed as Resumed
from asyncvmm._core.ticket_messages import Denied as Denied
from asyncvmm._core.ticket_messages import PutBack as PutBack
from asyncvmm._core.ticket_messages import Redeem as Redeem
from asyncvmm._core.ticket_messages import Waive as Waive
from asyncvmm._errors import ArgumentError, RemoteProtocolError, VersionMismatchError
from asyncvmm._types import MAX_SLOTS, RegionInfo, SegmentInfo

VERSION = 2
"""Raised whenever an older release could misread a packet."""

MAGIC = b"AVMM"
PACKET_LIMIT = 65536
"""Bytes.  A quarter of what the kernel takes at default settings (212,960 was measured), so that
several packets fit a socket buffer."""

MESSAGE_LIMIT = PACKET_LIMIT - 64
"""Bytes of one encoded message; leaves room for the packet's own header."""

MAX_FEATURES = 1024
MAX_EVENT_HANDLE = 64
MAX_TEXT = 1024
MAX_KEY = 4096
MAX_WINDOW = 65536
NO_LANE = 65535
"""The lane of releases whose events finish in any order."""

_Natural: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
_Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
_Handle: TypeAlias = Annotated[bytes, Meta(max_length=MAX_EVENT_HANDLE)]
_Key: TypeAlias = Annotated[str, Meta(max_length=MAX_KEY)] | int


class Feature(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One tensor of an owner: where it lies follows from the layout."""

    name: _Text
    dtype: _Text
    shape: tuple[_Natural, ...]


class OwnerFrame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One owner as it travels."""

    slot: _Natural
    generation: _Natural
    start: _Natural
    nbytes: _Natural
    key: _Key
    features: Annotated[list[Feature], Meta(max_length=MAX_FEATURES)]
    metadata: bytes = b""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Consumer: who I am, and what I can take."""

    rank: int | None
    name: _Text | None
    kind: _Text
    """The memory this end can map: "host" or "cuda"."""
    writable: bool = False
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)] = 2
    """Under Compete: batches I may have without having taken them."""
    secret: Annotated[bytes, Meta(max_length=MAX_SECRET)] = b""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Exporter: you are in, and this is my pool.  One Segment message follows per segment."""

    exporter: Annotated[bytes, Meta(min_length=16, max_length=16)]
    peer: _Natural
    consumer_count: _Natural
    """0 under Compete."""
    region: RegionInfo
    segments: _Natural
    """How many Segment messages follow before anything else."""
    debug: bool = False


class Rejected(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Exporter: you are not, instead of a Welcome or after it; the link ends here."""

    reason: _Text
    text: _Text
    numbers: Annotated[list[int], Meta(max_length=64)] = []


class Attached(msgspec.Struct, array_like=True, frozen=True, tag=12):
    """Consumer: your segments are mapped here; deliver.

    Until then nothing is delivered, so a consumer that cannot map has nothing to refuse.
    """


class Segment(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Exporter: map this segment.  Its handle is the packet's descriptor, or these bytes."""

    info: SegmentInfo
    handle: _Handle = b""


class Unmap(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Exporter: this segment is given back; let go of it."""

    index: _Natural


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """Exporter: the slot's ready event, once, before its first owner."""

    slot: _Natural
    handle: _Handle


class Deliver(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """Exporter: one batch, which is ready once the event of its first owner's slot is."""

    owners: Annotated[list[OwnerFrame], Meta(min_length=1)]


class Redeemed(msgspec.Struct, array_like=True, frozen=True, tag=17):
    """Exporter: the owner of the ticket that you showed."""

    owner: OwnerFrame


class Take(msgspec.Struct, array_like=True, frozen=True, tag=8, gc=False):
    """Consumer, under Compete: this batch (by its first owner) is in work; my credit is back."""

    slot: _Natural
    generation: _Natural


class Release(msgspec.Struct, array_like=True, frozen=True, tag=9, gc=False):
    """Consumer: I am done with this owner, and with the others, once my event for its slot is."""

    slot: _Natural
    generation: _Natural
    handle: _Handle = b""
    """The slot's release event, the first time only."""
    lane: Annotated[int, Meta(ge=0, le=NO_LANE)] = 0
    """Releases of one lane were recorded on one stream, so their events finish in order."""
    others: Annotated[list[tuple[_Natural, _Natural]], Meta(max_length=MAX_SLOTS)] = []
    """Slots and generations of owners that were read on the same streams."""


class Refuse(msgspec.Struct, array_like=True, frozen=True, tag=10, gc=False):
    """Consumer: I never used this owner, and this is why."""

    slot: _Natural
    generation: _Natural
    reason: _Text


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag=11):
    """Either side: nothing new will come from me.

    A consumer says how many owners its views still hold; their releases may follow.
    """

    lingering: _Natural = 0
    reason: _Text = ""


FromConsumer: TypeAlias = Take | Release | Refuse | Goodbye | Redeem | Waive | PutBack
FromExporter: TypeAlias = Segment | Unmap | Ready | Deliver | Goodbye | Denied | Redeemed | Rejected
Greeting: TypeAlias = Hello | Welcome | Rejected | Attached | Observe | Snapshot | Resume | Resumed
Message: TypeAlias = Greeting | FromConsumer | FromExporter

_encoder = msgspec.msgpack.Encoder()
_from_consumer = msgspec.msgpack.Decoder(list[FromConsumer])
_from_exporter = msgspec.msgpack.Decoder(list[FromExporter])
_greeting: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_HEADER = struct.Struct(">4sH")


def clip(text: str) -> str:
    """Return what a text field can carry of a text that nobody should have to check."""
    return printable(text)[:MAX_TEXT]


def printable(text: str) -> str:
    """Return a text without what no packet can carry: lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def check_key(key: object) -> int:
    """Refuse an owner's key that the other end would refuse, or that no message can carry.

    Returns the bytes that it takes in one.
    """
    if not isinstance(key, str | int) or isinstance(key, bool):
        raise ArgumentError(f"a key is a str or an int, got {key!r:.80}")
    if isinstance(key, str) and len(key) > MAX_KEY:
        raise ArgumentError(
            f"a key may have at most {MAX_KEY:,} characters, got {len(key):,}; use an id"
        )
    return len(encode(key))


def encode(message: Message | list[Feature] | str | int) -> bytes:
    """Encode one message; refuse one that no packet can hold."""
    try:
        data = _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ArgumentError(
            f"a {type(message).__name__} message cannot be written: {error}; names and keys are "
            f"text without lone surrogates, or ints of 64 bits, and metadata is bytes"
        ) from None
    if len(data) > MESSAGE_LIMIT:
        raise too_long(len(data))
    return data


def too_long(nbytes: int) -> ArgumentError:
    """Return what is raised for a message of so many bytes."""
    return ArgumentError(
        f"the description takes {nbytes:,} bytes, but at most {MESSAGE_LIMIT:,} fit a packet; "
        f"send fewer features or less metadata per owner, or fewer owners at once"
    )


def frame(messages: Sequence[bytes]) -> bytes:
    """Join encoded messages into one packet: a MessagePack array header, then the messages."""
    count = len(messages)
    if count == 1 and messages[0].startswith(MAGIC):
        return messages[0]  # a greeting is a packet of its own
    if count < 16:
        return b"".join((bytes((0x90 | count,)), *messages))
    return b"".join((b"\xdc", count.to_bytes(2, "big"), *messages))


def decode_from_consumer(packet: memoryview | bytes) -> list[FromConsumer]:
    """Decode a packet on the exporter's side."""
    try:
        return _from_consumer.decode(packet)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"a consumer sent a packet that is no packet: {error}") from None


def decode_from_exporter(packet: memoryview | bytes) -> list[FromExporter]:
    """Decode a packet on a consumer's side."""
    try:
        return _from_exporter.decode(packet)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(
            f"the exporter sent a packet that is no packet: {error}"
        ) from None


def encode_greeting(message: Greeting, *, version: int = VERSION) -> bytes:
    """Encode a side's first packet; refuse one that the other end would refuse."""
    data = encode(message)
    try:
        _greeting.decode(data)
    except msgspec.MsgspecError as error:
        raise ArgumentError(f"this {type(message).__name__} is out of bounds: {error}") from None
    return _HEADER.pack(MAGIC, version) + data


def decode_greeting(packet: memoryview | bytes) -> Greeting:
    """Decode the other side's first packet; another version is told apart from rubbish."""
    data = bytes(packet)
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        raise RemoteProtocolError(
            f"the other end does not speak this protocol: its first packet of {len(data)} bytes "
            f"does not begin with {MAGIC!r}"
        )
    version = _HEADER.unpack_from(data)[1]
    if version != VERSION:
        raise VersionMismatchError(VERSION, version)
    try:
        return _greeting.decode(data[_HEADER.size :])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"the other end's greeting cannot be read: {error}") from None
