"""Time limits of the library, raised for all tests.

They are there for a peer that never answers.  One that is only kept off the processor, for a
second or two on a busy machine, must not be taken for it, or a test fails of what it is not about.
"""

from __future__ import annotations

from asyncvmm._consumer import consumer, resuming
from asyncvmm._exporter import connections

PROMPTLY = 30.0
"""Seconds within which whoever waits must have been told of an end: far more than that takes
anywhere, and less than the limits below, so that who waits for one of them is too late."""

LIMIT = 90.0
"""Seconds; less than a test may take."""


def raise_limits() -> None:
    """Have this process be patient with its peers."""
    consumer.GOODBYE_SECONDS = LIMIT
    resuming.GOODBYE_SECONDS = LIMIT
    connections.GREETING_SECONDS = LIMIT
    connections.DYING_SECONDS = LIMIT
    connections.HANG_UP_SECONDS = LIMIT
