"""One lane's turn in one round of each kind of workload, and the numbers that it gives."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.lane import Lane
from benchmarks.machine import proportional_bytes
from benchmarks.rows import latency_fields, quantile
from benchmarks.setting import MIB
from benchmarks.workloads import Workload

CONNECTIONS = 3
"""New pairs of processes per round of ``connect``; one on a GPU, where each takes seconds."""

GAP_SECONDS = 0.5
"""The part of a turn that is run once more beside a heartbeat."""

Numbers = dict[str, Any]


def flow(lane: Lane, workload: Workload, seconds: float) -> Numbers:
    """Check, measure, measure beside a heartbeat, check again."""
    depth = lane.setting.depth
    wrong = _check(lane, depth)
    lane.begin()
    report = lane.ask("stream", depth=depth, seconds=seconds)
    seen = lane.seen()
    numbers = _numbers(lane, report, seen)
    numbers |= _gaps(lane, "stream", depth=depth, seconds=seconds * GAP_SECONDS)
    numbers["wrong"] = wrong + _check(lane, depth)
    return numbers


def reuse(lane: Lane, workload: Workload, seconds: float) -> Numbers:
    """Measure from the consumer's last stamp, just before it lets go, to the producer's waiter."""
    wrong = _check(lane, 1)
    lane.begin(stamps=True)
    report = lane.ask("stream", depth=1, seconds=seconds)
    seen = lane.seen()
    numbers = _numbers(lane, report, seen)
    stamps = seen[0]["stamps"]
    waits = [woke - told for woke, told in zip(report.flow.settled, stamps, strict=False)]
    numbers |= latency_fields(waits) | {"wrong": wrong}
    return numbers | _gaps(lane, "stream", depth=1, seconds=seconds * GAP_SECONDS)


def bursts(lane: Lane, workload: Workload, seconds: float) -> Numbers:
    """Measure how a fast producer and a slow consumer get along, and in how much memory."""
    wrong = _check(lane, lane.setting.depth)
    lane.begin()
    before = peak = proportional_bytes(lane.pids)

    def watch() -> None:
        nonlocal peak
        peak = max(peak, proportional_bytes(lane.pids))

    report = lane.ask("bursts", watch, burst=workload.burst, seconds=seconds)
    numbers = _numbers(lane, report, lane.seen())
    numbers |= {
        "peak_mib": peak / MIB,
        "grown_mib": (peak - before) / MIB,
        "waits": report.flow.waits,
        "longest_wait_ms": report.flow.longest_wait * 1e3,
        "wrong": wrong,
    }
    if report.flow.device_peak:
        numbers["device_peak_mib"] = report.flow.device_peak / MIB
    return numbers | _gaps(lane, "bursts", burst=workload.burst, seconds=0.0)


def connect(new: Callable[[], Lane]) -> Numbers:
    """Open new pairs of processes, hand over once, and take the consumers' word for the time."""
    times: list[float] = []
    wrong = 0
    enough = False
    while not enough:
        with new() as lane:
            lane.start()
            lane.start_consumers(("check", {"depth": 1, "count": 1}))
            lane.connected()
            lane.done()
            wrong += sum(each["wrong"] for each in lane.seen())
            times += lane.close()
            enough = lane.setting.on_gpu or len(times) == CONNECTIONS
    per_s = len(times) / sum(times)
    return latency_fields(times) | {"per_s": per_s, "wrong": wrong, "fallbacks": 0}


TURNS: dict[str, Callable[[Lane, Workload, float], Numbers]] = {
    "flow": flow,
    "fanout": flow,
    "reuse": reuse,
    "bursts": bursts,
}


def _gaps(lane: Lane, what: str, **how: Any) -> Numbers:
    """Do it once more beside a heartbeat on each side's loop.

    A consumer that rests does so on its loop, so its gaps are its own doing and are left out.
    """
    if lane.setting.loop == "none":
        return {}
    lane.begin(beats=True)
    report = lane.ask(what, beats=True, **how)
    ours = report.gaps
    theirs = [each["gaps"] for each in lane.seen()]
    if lane.setting.work:
        theirs = []
    return {
        "gap_p99_ms": _p99_ms([ours.whole]),
        "gap_busy_p99_ms": _p99_ms([ours.busy]),
        "consumer_gap_p99_ms": _p99_ms([each.whole for each in theirs]),
        "consumer_gap_busy_p99_ms": _p99_ms([each.busy for each in theirs]),
    }


def _p99_ms(found: Sequence[array[float]]) -> float | None:
    """Return the worst p99 of several, in milliseconds."""
    return max((quantile(sorted(each), 0.99) * 1e3 for each in found if each), default=None)


def _check(lane: Lane, depth: int) -> int:
    """Hand over checked payloads; return how many arrived wrong, were lost or came twice."""
    if not lane.transport.delivers:
        return 0
    count = min(2 * depth + 2, max(4, 64 * MIB // lane.setting.payload.total))
    lane.begin()
    lane.ask("check", depth=depth, count=count)
    seen = lane.seen()
    wrong: int = sum(each["wrong"] for each in seen)
    return wrong + abs(_due(lane, count) - _taken(seen))


def _due(lane: Lane, count: int) -> int:
    return count if lane.setting.compete else count * lane.setting.consumers


def _taken(seen: list[dict[str, Any]]) -> int:
    return int(sum(each["taken"] for each in seen))


def _numbers(lane: Lane, report: Any, seen: list[dict[str, Any]]) -> Numbers:
    """Return what every stretch of hand-offs gives."""
    count, elapsed = report.flow.count, report.flow.elapsed
    producer = report.cpu / count * 1e6
    consumers = sum(each["cpu"] for each in seen) / count * 1e6
    lost = _due(lane, count) - _taken(seen) if lane.transport.delivers else 0
    return {
        "per_s": count / elapsed,
        "gbytes_per_s": count * lane.setting.payload.total / elapsed / 1e9,
        "cpu_us": producer + consumers,
        "producer_cpu_us": producer,
        "consumer_cpu_us": consumers,
        "fallbacks": report.fallbacks,
        "lost": lost,
        "handed_over": count,
        **latency_fields(report.flow.latencies),
        **{f"library_{name}": value for name, value in report.facts.items()},
    }
