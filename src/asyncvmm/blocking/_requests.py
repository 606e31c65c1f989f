"""The consumer's side of a request's life, for code that is not async."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from asyncvmm import tickets
from asyncvmm._errors import ArgumentError
from asyncvmm._groups import AttentionGroup
from asyncvmm.blocking._consumer import Consumer


def restore_features(
    consumer: Consumer,
    requests: Iterable[Any],
    *,
    count: int = 1,
    group: AttentionGroup | None = None,
    stream: object = None,
    timeout: float | None = None,
) -> None:
    """Replace every ticket in the fields of requests by its tensor on the consumer's device.

    It does what :func:`asyncvmm.tickets.restore_features` does, on the stream that is current in
    the calling thread unless another is given.  What was restored before an error, the
    ``timeout`` or an interruption stays restored; call it again, or :func:`abandon_features`.
    """
    _check(consumer)
    consumer._check()
    restore = partial(
        tickets.restore_features,
        consumer._consumer,
        requests,
        count=count,
        group=group,
        stream=consumer._port.stream_of(stream),
    )
    consumer._run(restore, timeout, "the owners of the requests' tickets")


def abandon_features(
    consumer: Consumer,
    requests: Iterable[Any],
    *,
    count: int = 1,
    group: AttentionGroup | None = None,
) -> None:
    """Release every owner that requests still have tickets of, unread; again is a no-op."""
    _check(consumer)

    async def abandon() -> None:
        tickets.abandon_features(consumer._consumer, requests, count=count, group=group)

    consumer._run(abandon)


def _check(consumer: object) -> None:
    if not isinstance(consumer, Consumer):
        raise ArgumentError(
            f"a consumer that asyncvmm.blocking.connect() gives is asked for, got a "
            f"{type(consumer).__module__}.{type(consumer).__name__}; for one of asyncvmm.connect() "
            f"there are functions of the same names in asyncvmm.tickets"
        )
