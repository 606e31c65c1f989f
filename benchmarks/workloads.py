"""What the transports are asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.setting import KIB, MIB, Payload

Kind = Literal["flow", "fanout", "bursts", "reuse", "connect", "allocator"]

DEPTH = 64
"""Hand-offs in flight when pipelined."""


@dataclass(frozen=True)
class Workload:
    """One way to use a transport."""

    name: str
    kind: Kind
    payload: Payload
    about: str
    depth: int = 1
    consumers: int = 1
    compete: bool = False
    work: float = 0.0
    burst: int = 0
    live: int = 0


def _sizes() -> list[tuple[str, Payload]]:
    single = [("16KiB", 16 * KIB), ("64KiB", 64 * KIB), ("2MiB", 2 * MIB), ("36MiB", 36 * MIB)]
    return [(name, Payload(1, size)) for name, size in single] + [("20x1MiB", Payload(20, MIB))]


def _all() -> list[Workload]:
    found = []
    for label, payload in _sizes():
        about = "one in flight: copied, announced, seen, acknowledged"
        found.append(Workload(f"closed_{label}", "flow", payload, about))
    for label, payload in _sizes():
        about = f"{DEPTH} in flight"
        found.append(Workload(f"pipelined_{label}", "flow", payload, about, DEPTH))
    small = Payload(1, 16 * KIB)
    for count in (1, 2, 4, 8):
        about = f"each hand-off to all of {count} consumers, {DEPTH} in flight"
        name = f"fanout_{count}_broadcast"
        found.append(Workload(name, "fanout", small, about, DEPTH, count))
    for count in (1, 2, 4, 8):
        about = f"each hand-off to one of {count} consumers that rest 1 ms over it"
        name = f"fanout_{count}_compete"
        found.append(Workload(name, "fanout", small, about, DEPTH, count, compete=True, work=1e-3))
    about = "bursts of 192 without looking, to a consumer that rests 1 ms over each"
    mib = Payload(1, MIB)
    found.append(Workload("slow_consumer", "bursts", mib, about, DEPTH, work=1e-3, burst=192))
    about = "from the consumer's last word to the producer's waiter running"
    found.append(Workload("reuse", "reuse", small, about))
    about = "new processes: from connecting to the first hand-off seen"
    found.append(Workload("connect", "connect", small, about))
    for live in (10, 1_000, 100_000):
        about = f"one allocate and free beside {live:,} live chunks, no processes"
        name = f"allocator_{live}"
        found.append(Workload(name, "allocator", small, about, live=live))
    return found


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _all()}
"""All of them, by the names under which results are compared over time."""
