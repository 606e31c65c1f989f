"""What a consumer says about itself: frozen numbers, taken in one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncvmm._types import Key

if TYPE_CHECKING:
    from asyncvmm._consumer.consumer import Consumer


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """What one consumer has, at one moment."""

    member: Key | None
    device: str
    state: str
    """open, closing or closed."""
    unread: int
    """Batches that were delivered and not yet received by the program."""
    held: int
    """Owners received and not yet given back."""
    viewed: int
    """Of those: released, but a view of them is still alive."""
    delivered: int
    released: int
    refused: int
    waiting: int
    """Calls of ``receive`` that wait."""
    pinned: tuple[Key, ...]
    """Keys of the owners that are released and still viewed."""


def report(consumer: Consumer) -> ConsumerState:
    """Count it all, now."""
    core = consumer._core
    live = consumer._leases.live.values()
    pinned = tuple(lease.frame.key for lease in live if lease.said)
    return ConsumerState(
        member=consumer.member,
        device=consumer.device,
        state="closed" if consumer._closed else core.state.value,
        unread=len(core.inbox),
        held=len(live),
        viewed=len(pinned),
        delivered=core.delivered,
        released=core.released,
        refused=core.refused,
        waiting=len(consumer._waiters),
        pinned=pinned,
    )
