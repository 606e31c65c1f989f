"""What somebody who only looks may ask an exporter, and what he is told.

An observer's every packet is an :class:`Observe`, and each is answered by one :class:`Snapshot`;
both are greetings, so they carry the protocol's version.  Nothing of the pool, no descriptor and
no feature is in an answer, and nothing that an observer can say changes anything.

The fields have the names of :class:`asyncvmm.PoolStatistics` and of its parts, where they are
explained.  Lists and texts are cut to the bounds below, so that an answer fits one packet however
many consumers there are.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from asyncvmm._errors import ArgumentError

MOST_CONSUMERS = 64
MOST_OWNERS = 16
MOST_NAME = 80
"""Characters of a consumer's name or an owner's key."""

MOST_WORDS = 4096
"""Characters of an explanation."""

MAX_SECRET = 1024
BUCKETS = 32

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0)]
Name: TypeAlias = Annotated[str, Meta(max_length=MOST_NAME)]


class Observe(msgspec.Struct, array_like=True, frozen=True, tag=20):
    """Observer: how do things stand?"""

    secret: Annotated[bytes, Meta(max_length=MAX_SECRET)] = b""


class LatencyLine(msgspec.Struct, array_like=True, frozen=True):
    """How long something took, counted by powers of two."""

    counts: Annotated[tuple[Count, ...], Meta(max_length=BUCKETS)]
    total: Seconds


class SlotLine(msgspec.Struct, array_like=True, frozen=True):
    """How many slots are in each state."""

    total: Count
    free: Count
    filling: Count
    held: Count
    draining: Count
    quarantined: Count


class OwnerLine(msgspec.Struct, array_like=True, frozen=True):
    """One owner that is out."""

    key: Name | int
    slot: Count
    generation: Count
    nbytes: Count
    state: Name
    age: Seconds


class ConsumerLine(msgspec.Struct, array_like=True, frozen=True):
    """One consumer."""

    member: Name | int
    pid: Count
    state: Name
    quarantined: bool
    holding: Count
    untaken: Count
    oldest: Seconds
    released: Count
    stale: Count
    queued: Count


class PoolLine(msgspec.Struct, array_like=True, frozen=True):
    """An exporter's pool and what went through it."""

    device: Name
    pool_bytes: Count
    physical_bytes: Count
    max_pool_bytes: Count
    used_bytes: Count
    free_bytes: Count
    largest_gap: Count
    gaps: Count
    high_water: Count
    segments: Count
    grown: Count
    shrunk: Count
    slots: SlotLine
    waiting: Count
    oldest_wait: Seconds
    waits: Count
    longest_wait: Seconds
    total_wait: Seconds
    published: Count
    acknowledged: Count
    refused: Count
    lost: Count
    copied_bytes: Count
    copies: Count
    fallbacks: Count
    exported: Count
    cancelled: Count
    handoff: LatencyLine
    release: LatencyLine
    wait: LatencyLine


class Snapshot(msgspec.Struct, array_like=True, frozen=True, tag=21):
    """Exporter: this is how things stand."""

    exporter: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """The same for as long as it is the same exporter."""
    name: Annotated[str, Meta(max_length=1024)]
    pid: Count
    uptime: Seconds
    route: Name
    pool: PoolLine
    explanation: Annotated[str, Meta(max_length=MOST_WORDS)]
    """``str()`` of :meth:`asyncvmm.Exporter.explain`."""
    owners: Annotated[list[OwnerLine], Meta(max_length=MOST_OWNERS)]
    """The oldest."""
    owners_out: Count
    """All of them."""
    consumers: Annotated[list[ConsumerLine], Meta(max_length=MOST_CONSUMERS)]
    consumers_known: Count


def check_secret(secret: object) -> bytes:
    """Return a secret as bytes; refuse one that the other end would refuse."""
    if isinstance(secret, str):
        try:
            secret = secret.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ArgumentError(f"a secret is text without lone surrogates: {error}") from None
    if not isinstance(secret, bytes):
        raise ArgumentError(f"a secret is text or bytes, got a {type(secret).__name__}")
    if len(secret) > MAX_SECRET:
        raise ArgumentError(f"a secret may have at most {MAX_SECRET:,} bytes, got {len(secret):,}")
    return secret
