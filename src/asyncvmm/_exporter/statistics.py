"""What an exporter says about itself: frozen numbers, taken in one moment."""

from __future__ import annotations

from dataclasses import dataclass

from asyncvmm._exporter.latencies import Latencies
from asyncvmm._types import Key


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """How many slots are in each state; they sum to ``total``."""

    total: int
    free: int
    filling: int
    held: int
    draining: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class OwnerStatistics:
    """One owner that is out."""

    key: Key
    slot: int
    generation: int
    nbytes: int
    state: str
    """The slot's state: filling, held, draining or quarantined."""
    age: float
    """Seconds since it was published; since it was reserved while it is filling."""
    held_by: tuple[Key, ...]
    """Consumers that have it and have not let go."""
    waiting_for: tuple[Key, ...]
    """Ranks that have not attached, or not redeemed their ticket; "*" is any competitor."""
    exported: bool
    """True if it is held for those who redeem a ticket, and not streamed."""


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """One consumer that is attached, or that left owing something."""

    member: Key
    """Its rank, or its name under Compete."""
    pid: int
    """0 where it lives in another pid namespace."""
    state: str
    """connecting, open, closing (it said goodbye or lost its link), closed."""
    quarantined: bool
    """Its link is gone, its process lives, and it still holds owners."""
    holding: int
    untaken: int
    """Under Compete: batches it has been sent and has not begun."""
    oldest: float
    """Seconds since the oldest owner it holds was published."""
    released: int
    stale: int
    """Late, doubled or misnamed releases that were counted and ignored."""
    queued: int
    """Messages that its socket has not taken yet."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """One exporter's pool, at one moment.  Bytes are bytes, times are seconds."""

    device: str
    pool_bytes: int
    """Usable bytes now."""
    physical_bytes: int
    """What the segments take, rounded up to the backend's granule."""
    max_pool_bytes: int
    used_bytes: int
    free_bytes: int
    largest_gap: int
    """The largest owner that would fit now, if a slot is free."""
    gaps: int
    high_water: int
    """Most bytes that were ever in use at once."""
    segments: int
    grown: int
    shrunk: int
    slots: SlotCounts
    waiting: int
    """Sends and reservations that wait for room now."""
    oldest_wait: float
    waits: int
    """How many have had to wait so far."""
    longest_wait: float
    total_wait: float
    published: int
    acknowledged: int
    refused: int
    lost: int
    """Deliveries that a dead consumer took with it."""
    copied_bytes: int
    """Payload bytes that ``send`` copied in; views and reservations copy none."""
    copies: int
    fallbacks: int
    exported: int
    """Owners published by ticket; they are among ``published``."""
    cancelled: int
    """Of those: withdrawn before everybody had redeemed them."""
    handoff: Latencies
    """From an owner's publication to its memory being back."""
    release: Latencies
    """From an owner's publication to the last consumer letting go of it; what is between the two
    is the device's work that was still to be waited for."""
    wait: Latencies
    """What those waited that had to wait for room."""
    owners: tuple[OwnerStatistics, ...]
    """Those that are out, oldest first."""
    consumers: tuple[ConsumerStatistics, ...]
