"""Under what name, for whom and with what note an owner is published."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asyncvmm._core.describing import NUMBER_BYTES, OWNER_BYTES, check_owners
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.routing import To
from asyncvmm._core.wire import MESSAGE_LIMIT, check_key
from asyncvmm._errors import ArgumentError
from asyncvmm._exporter.acknowledgement import Require
from asyncvmm._groups import AttentionGroup
from asyncvmm._types import Group, Key, plain


class Terms(msgspec.Struct, eq=False, frozen=True, gc=False):
    """Under what name, for whom and with what note an owner is published."""

    key: Key | None = None
    metadata: bytes = b""
    to: To = None
    require: Require = "all"
    proof: bytes = b""
    """Of the tickets it is exported by; empty for one that is streamed."""
    described: int = OWNER_BYTES + NUMBER_BYTES
    """Bytes that the owner takes in a message beside its features, at most."""


PLAIN = Terms()
"""The terms of an owner about which nothing was said: most of them."""


def pack_metadata(metadata: object) -> bytes:
    """Encode plain data; refuse what is not plain or too large for a message.

    It is read back here, for some of what can be written cannot be read, such as a map whose key
    is a dataclass, and the consumer could do nothing about it.
    """
    if metadata is None:
        return b""
    try:
        data = msgspec.msgpack.encode(metadata)
        msgspec.msgpack.decode(data)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.DecodeError) as error:
        raise ArgumentError(f"metadata must be plain data that can be read back: {error}") from None
    if len(data) > MESSAGE_LIMIT // 2:
        raise ArgumentError(
            f"metadata takes {len(data):,} bytes, at most {MESSAGE_LIMIT // 2:,} are allowed; "
            f"send large values as features"
        )
    return data


def make_terms(
    core: ExporterCore, features: int, key: Key | None, metadata: object, to: To, require: Require
) -> Terms:
    """Check what was said about an owner, before anything is taken for it.

    ``features`` are the bytes that its features take in a message.
    """
    key = plain(key)
    named = NUMBER_BYTES if key is None else check_key(key)
    if to is not None:
        if not isinstance(to, int | Group | AttentionGroup | Iterable):
            raise ArgumentError(
                f"to={to!r:.80} names no ranks; give a rank, several, or asyncvmm.Group(...)"
            )
        if isinstance(to, Iterable):
            to = tuple(to)
        core.check_narrowing(to)
    if require not in ("all", "any", "none"):
        raise ArgumentError(f"require={require!r} is unknown; give 'all', 'any' or 'none'")
    data = pack_metadata(metadata)
    described = OWNER_BYTES + named + len(data)
    check_owners(features + described)
    return Terms(key, data, to, require, described=described)
