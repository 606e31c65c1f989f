"""What the numbers were taken on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch", "cuda-bindings", "uvloop", "msgspec", "anyio", "numpy", "pyzmq", "iceoryx2",
    "ucxx-cu13", "nixl-cu13",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Return date, commit, processor, kernel, versions, GPUs and driver."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("ASYNCVMM_COMMIT") or _said("git", "rev-parse", "HEAD"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_meminfo("MemTotal") / (1 << 20), 1),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "gpus": [line for line in _gpus().splitlines() if line],
    }


def available_bytes() -> int:
    """Return how much memory could be used now."""
    return _meminfo("MemAvailable") << 10


def proportional_bytes(pids: list[int]) -> int:
    """Return what processes use, each shared page divided among those that map it."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it ended
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> str:
    return _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
