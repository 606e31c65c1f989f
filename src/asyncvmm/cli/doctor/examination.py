"""All checks in their order, each on its own: one that fails stops no other."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial

from asyncvmm._backends.driver_memory import HandleType
from asyncvmm._errors import ArgumentError
from asyncvmm.cli.doctor import gpu, host
from asyncvmm.cli.doctor.line import GPU, Device, Line, Report, tried, verdict

WITHOUT_GPU = (
    "virtual memory", "POSIX descriptors", "FABRIC handles", "interprocess events",
    "read-only import", "peer access", "MPS",
)  # fmt: skip
AS_DRIVER = "see the line of the driver"
NEEDED = ("virtual memory", "interprocess events")


def examine(device: str = "auto") -> Report:
    """Check everything; say whether ``device`` can work ("auto" is what exporters take)."""
    kind, _, number = device.partition(":")
    if device not in ("auto", "cpu") and not (kind == "cuda" and number.isdecimal()):
        raise ArgumentError(f"--device {device}: a device is auto, cpu or cuda:N")
    if device == "auto":
        device = _default()
    lines = [*_gpu_lines(int(number or 0)), *_host_lines()]
    return verdict(device, lines)


def _default() -> str:
    """Return what ``device="auto"`` takes."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "cpu"
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _host_lines() -> Iterator[Line]:
    for name, check, needed in host.CHECKS:
        yield tried(name, check, needed)


def _gpu_lines(device: int) -> Iterator[Line]:
    yield tried("cuda-bindings", gpu.bindings, GPU)
    found = tried("driver", gpu.driver_version, GPU)
    yield found
    if found.state == "missing":
        for name in WITHOUT_GPU:
            yield Line(name, "missing", "there is no GPU to try it on", AS_DRIVER, _needed(name))
        return
    yield tried("virtual memory", partial(gpu.virtual_memory, device), GPU)
    handles = [
        tried("POSIX descriptors", partial(gpu.posix_handles, device)),
        tried("FABRIC handles", partial(gpu.fabric_handles, device)),
    ]
    if all(line.state == "missing" for line in handles):
        handles = [Line(h.name, h.state, h.figure, h.advice, GPU) for h in handles]
    yield from handles
    kind: HandleType = "posix" if handles[0].state == "ok" else "fabric"
    two = gpu.TwoProcesses(device, kind)
    checks: dict[str, Callable[[], Line]] = {
        "interprocess events": two.events,
        "read-only import": two.read_only,
        "peer access": gpu.peer_access,
        "MPS": two.mps,
    }
    for name, check in checks.items():
        yield tried(name, check, _needed(name))


def _needed(name: str) -> tuple[Device, ...]:
    return GPU if name in NEEDED else ()
