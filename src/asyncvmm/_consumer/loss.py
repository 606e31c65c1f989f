"""How the end of a link is told to those who ask."""

from __future__ import annotations

from typing import TypeVar

from asyncvmm._errors import AsyncVMMError, PeerLostError

ErrorT = TypeVar("ErrorT", bound=AsyncVMMError)


def loss(error: Exception | None, message: str) -> AsyncVMMError:
    """Return what a link's end means to a consumer; None is end-of-file."""
    if isinstance(error, AsyncVMMError) and not isinstance(error, PeerLostError):
        return error
    lost = PeerLostError(message, peer="exporter")
    lost.__cause__ = error
    return lost


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
