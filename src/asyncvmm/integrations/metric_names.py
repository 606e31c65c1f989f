"""Every metric's name, kind, meaning and labels, and the field of the statistics it shows."""

from __future__ import annotations

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

_POOL: dict[str, tuple[Kind, str, str]] = {
    # name: kind, field of PoolStatistics, meaning
    "asyncvmm_pool_bytes": ("gauge", "pool_bytes", "Usable bytes of the pool."),
    "asyncvmm_pool_max_bytes": ("gauge", "max_pool_bytes", "Bytes it may grow to."),
    "asyncvmm_pool_physical_bytes": ("gauge", "physical_bytes", "Bytes that its segments take."),
    "asyncvmm_pool_used_bytes": ("gauge", "used_bytes", "Bytes on loan or held."),
    "asyncvmm_pool_free_bytes": ("gauge", "free_bytes", "Bytes free now, in whatever pieces."),
    "asyncvmm_pool_largest_gap_bytes": (
        "gauge", "largest_gap", "The largest owner that would fit now.",
    ),
    "asyncvmm_pool_gaps": ("gauge", "gaps", "Separate free pieces."),
    "asyncvmm_pool_high_water_bytes": (
        "gauge", "high_water", "Most bytes that were in use at once.",
    ),
    "asyncvmm_pool_segments": ("gauge", "segments", "Physical allocations."),
    "asyncvmm_pool_grown_total": ("counter", "grown", "Segments added since it was opened."),
    "asyncvmm_pool_shrunk_total": ("counter", "shrunk", "Segments given back."),
    "asyncvmm_waiting": ("gauge", "waiting", "Calls that wait for room now."),
    "asyncvmm_oldest_wait_seconds": (
        "gauge", "oldest_wait", "How long the first of them has waited.",
    ),
    "asyncvmm_wait_seconds": ("histogram", "wait", "Waits for room that are over."),
    "asyncvmm_handoff_seconds": (
        "histogram", "handoff", "From an owner's publication to its memory being back.",
    ),
    "asyncvmm_release_seconds": (
        "histogram", "release", "From an owner's publication to the last consumer letting go.",
    ),
    "asyncvmm_owners_published_total": ("counter", "published", "Owners published."),
    "asyncvmm_owners_acknowledged_total": (
        "counter", "acknowledged", "Owners whose memory is back.",
    ),
    "asyncvmm_owners_exported_total": ("counter", "exported", "Owners published by ticket."),
    "asyncvmm_owners_cancelled_total": (
        "counter", "cancelled", "Of those, withdrawn before all had redeemed them.",
    ),
    "asyncvmm_deliveries_refused_total": (
        "counter", "refused", "Deliveries that a consumer never used.",
    ),
    "asyncvmm_deliveries_lost_total": (
        "counter", "lost", "Deliveries that a dead consumer took with it.",
    ),
    "asyncvmm_copies_total": ("counter", "copies", "Owners that send copied in."),
    "asyncvmm_copied_bytes_total": ("counter", "copied_bytes", "Payload bytes it copied."),
    "asyncvmm_fallbacks_total": ("counter", "fallbacks", "Owners that went by host memory."),
}  # fmt: skip

_CONSUMER: dict[str, tuple[Kind, str, str]] = {
    # name: kind, field of ConsumerStatistics, meaning
    "asyncvmm_consumer_holding": ("gauge", "holding", "Owners it holds."),
    "asyncvmm_consumer_untaken": ("gauge", "untaken", "Batches sent to it and not begun."),
    "asyncvmm_consumer_oldest_seconds": (
        "gauge", "oldest", "Since the oldest owner it holds was published.",
    ),
    "asyncvmm_consumer_quarantined": (
        "gauge", "quarantined", "1 if its link is gone while its process lives and holds owners.",
    ),
    "asyncvmm_consumer_queued_messages": (
        "gauge", "queued", "Messages that its socket has not taken.",
    ),
    "asyncvmm_consumer_released_total": ("counter", "released", "Owners it released."),
    "asyncvmm_consumer_stale_total": ("counter", "stale", "Late, doubled or misnamed messages."),
}  # fmt: skip

POOL = {name: field for name, (_, field, _) in _POOL.items()}
"""The field of ``PoolStatistics`` that each metric of an exporter shows."""

CONSUMER = {name: field for name, (_, field, _) in _CONSUMER.items()}
"""The field of ``ConsumerStatistics`` that each metric of a consumer shows."""

METRICS: dict[str, tuple[Kind, str, tuple[str, ...]]] = {
    "asyncvmm_up": ("gauge", "1 if the exporter is open and its loop answers.", ("exporter",)),
    **{name: (kind, text, ("exporter",)) for name, (kind, _, text) in _POOL.items()},
    "asyncvmm_slots": ("gauge", "Slots in each state.", ("exporter", "state")),
    **{name: (kind, text, ("exporter", "consumer")) for name, (kind, _, text) in _CONSUMER.items()},
    "asyncvmm_consumer_info": (
        "gauge",
        "Always 1; which process a consumer is, and the state of its connection.",
        ("exporter", "consumer", "pid", "state"),
    ),
}
"""Every metric: its kind, what it is, and its labels."""
