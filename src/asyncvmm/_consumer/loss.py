"""How the end of a link is told to those who ask."""

from __future__ import annotations

from typing import TypeVar

from asyncvmm._core import wire
from asyncvmm._errors import (
    AccessDeniedError,
    AsyncVMMError,
    ExporterLimitError,
    HandshakeError,
    PeerLostError,
    RankError,
    VersionMismatchError,
)

ErrorT = TypeVar("ErrorT", bound=AsyncVMMError)


def loss(error: Exception | None, message: str) -> AsyncVMMError:
    """Return what a link's end means to a consumer; None is end-of-file."""
    if isinstance(error, AsyncVMMError) and not isinstance(error, PeerLostError):
        return error
    lost = PeerLostError(message, peer="exporter")
    lost.__cause__ = error
    return lost


def rejected(message: wire.Rejected) -> HandshakeError:
    """Return the typed error that an exporter's refusal stands for."""
    numbers = [None if n == -1 else n for n in message.numbers]
    if message.reason == "rank" and len(numbers) == 2:
        return RankError(message.text, rank=numbers[0], consumer_count=numbers[1])
    if message.reason == "access_denied":
        uid = numbers[0] if numbers else None
        return AccessDeniedError(message.text, uid=-1 if uid is None else uid)
    if message.reason == "version" and len(message.numbers) == 1:
        return VersionMismatchError(wire.VERSION, message.numbers[0])
    if message.reason == "descriptor_limit" and len(message.numbers) == 2:
        limit, used = message.numbers
        return ExporterLimitError(message.text, limit=limit, used=used)
    return HandshakeError(message.text, reason=message.reason)


def anew(error: ErrorT) -> ErrorT:
    """Return a copy to be raised once.

    A raised error holds the frames it went through, and with them views and owners.  One that is
    kept and raised to every caller would hold those of all of them for as long as it is kept.
    """
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    if hasattr(error, "__notes__"):
        copy.__notes__ = list(error.__notes__)
    copy.__cause__ = error.__cause__
    return copy
