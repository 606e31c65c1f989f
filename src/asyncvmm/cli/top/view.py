"""What ``asyncvmm top --json`` prints of one exporter: plain data, times in seconds."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncvmm.cli.observing import Observer, latencies, process_state, rate

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def view(observer: Observer) -> dict[str, Any]:
    """Return everything that is known of one exporter, under the names of ``statistics()``."""
    now = observer.now
    if now is None:
        process = process_state(observer.pid)
        return {"name": observer.label, "pid": observer.pid, "process": process, "answers": False}
    pool: dict[str, Any] = {
        name: getattr(now.pool, name)
        for name in now.pool.__struct_fields__
        if name not in ("slots", "handoff", "release", "wait")
    }
    return {
        "name": now.name,
        "pid": now.pid,
        "process": process_state(now.pid),
        "answers": not observer.waits,
        "route": now.route,
        "uptime": now.uptime,
        **pool,
        "slots": _fields(now.pool.slots),
        "published_per_second": rate(observer),
        **{name: _latency(observer, name) for name in ("handoff", "release", "wait")},
        "explanation": now.explanation,
        "owners_out": now.owners_out,
        "owners": [_fields(owner) for owner in now.owners],
        "consumers_known": now.consumers_known,
        "consumers": [
            {**_fields(each), "process": process_state(each.pid)} for each in now.consumers
        ],
    }


def _fields(line: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(line, name) for name in line.__struct_fields__}


def _latency(observer: Observer, field: str) -> dict[str, float | int]:
    found = latencies(observer, field)
    quantiles = {name: round(found.quantile(share), 9) for name, share in SHARES.items()}
    return {"count": found.count, "mean": round(found.mean, 9), **quantiles}
