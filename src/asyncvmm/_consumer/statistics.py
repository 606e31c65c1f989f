"""What a consumer says about itself: frozen numbers, taken in one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """open, closing or closed; connecting while the next exporter is looked for."""
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
    exporters: int = 1
    """Exporters attached to so far: 1, unless connected with ``reconnect=True``."""
    losses: int = 0
    """Exporters that were lost, so went without a goodbye."""
    lost: int = 0
    """Batches that had come and were not received when their exporter was lost."""


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
        losses=int(consumer._lost is not None),
        lost=consumer._unread_lost,
    )


def together(states: Sequence[ConsumerState]) -> ConsumerState:
    """Add up what one consumer had of several exporters; the last one is the present one."""
    return replace(
        states[-1],
        unread=sum(each.unread for each in states),
        held=sum(each.held for each in states),
        viewed=sum(each.viewed for each in states),
        delivered=sum(each.delivered for each in states),
        released=sum(each.released for each in states),
        refused=sum(each.refused for each in states),
        waiting=sum(each.waiting for each in states),
        pinned=tuple(key for each in states for key in each.pinned),
        exporters=sum(each.exporters for each in states),
        losses=sum(each.losses for each in states),
        lost=sum(each.lost for each in states),
    )
