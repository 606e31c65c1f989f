"""The consumer's side of a request's life: tickets become tensors again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncvmm._consumer.consumer import Consumer
from asyncvmm._consumer.reconnecting import ReconnectingConsumer
from asyncvmm._errors import ArgumentError
from asyncvmm._groups import AttentionGroup
from asyncvmm._ticket import Ticket
from asyncvmm.tickets.requests import each, owners, places


async def restore_features(
    consumer: Consumer | ReconnectingConsumer,
    requests: Iterable[Any],
    *,
    count: int = 1,
    group: AttentionGroup | None = None,
    stream: object = None,
) -> None:
    """Replace every ticket in the fields of requests by its tensor on the consumer's device.

    Owners are copied once each; host copies (``on_full="host"``) are moved to the device.  The
    arguments are those of ``Consumer.reconstruct``, and so are the errors.  What was restored
    before an error or a cancellation stays restored; call it again, or :func:`abandon_features`.
    """
    _check(consumer)
    for request in each(requests):
        for place in places(request):
            value = place.get()
            if isinstance(value, Ticket):
                place.set(
                    await consumer.reconstruct(value, count=count, group=group, stream=stream)
                )
            else:
                place.set(await consumer._to_device(value, stream))


def abandon_features(
    consumer: Consumer | ReconnectingConsumer,
    requests: Iterable[Any],
    *,
    count: int = 1,
    group: AttentionGroup | None = None,
) -> None:
    """Release every owner that requests still have tickets of, unread; again is a no-op."""
    _check(consumer)
    for ticket in owners(requests).values():
        consumer.acknowledge(ticket.owner, count=count, group=group)


def _check(consumer: object) -> None:
    if not isinstance(consumer, Consumer | ReconnectingConsumer):
        raise ArgumentError(
            f"a consumer that asyncvmm.connect() gives is asked for, got a "
            f"{type(consumer).__module__}.{type(consumer).__name__}; for one of asyncvmm.blocking "
            f"there are functions of the same names"
        )
