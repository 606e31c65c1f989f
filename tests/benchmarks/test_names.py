"""Names that results are compared by over time do not change."""

from __future__ import annotations

from benchmarks.transports import MODULES
from benchmarks.workloads import WORKLOADS


def test_transports_keep_their_names() -> None:
    assert {
        "asyncvmm", "asyncvmm_reserve", "torch_mp", "pickle_uds", "zmq", "iceoryx2", "ucxx",
        "nixl", "floor",
    } <= set(MODULES)  # fmt: skip


def test_workloads_keep_their_names() -> None:
    sizes = ("16KiB", "64KiB", "2MiB", "36MiB", "20x1MiB")
    expected = {f"{way}_{size}" for way in ("closed", "pipelined") for size in sizes}
    expected |= {f"fanout_{n}_{r}" for n in (1, 2, 4, 8) for r in ("broadcast", "compete")}
    expected |= {"slow_consumer", "reuse", "connect"}
    expected |= {f"allocator_{live}" for live in (10, 1_000, 100_000)}
    assert set(WORKLOADS) == expected
