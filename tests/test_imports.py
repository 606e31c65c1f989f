"""Importing the package starts nothing, and the import contracts hold."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "cuda", "multiprocessing", "uvloop", "typer", "rich")

PROBE = """
import json, logging, os, sys, threading
before = set(os.listdir("/proc/self/fd"))
environment = dict(os.environ)
import asyncvmm
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "threads": threading.active_count(),
    "tasks": len(os.listdir("/proc/self/task")),
    "descriptors": len(set(os.listdir("/proc/self/fd")) - before),
    "environment": dict(os.environ) == environment,
    "loggers": [type(each).__name__ for each in logging.getLogger("asyncvmm").handlers],
}))
"""


@pytest.mark.slow
def test_import_starts_nothing() -> None:
    """Kills the planted bug of a module-level ``import torch`` anywhere below the package."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=100
    )
    seen = json.loads(done.stdout)
    assert [name for name in HEAVY if name in seen["modules"]] == []
    assert seen["threads"] == 1
    assert seen["tasks"] == 1
    assert seen["descriptors"] == 0
    assert seen["environment"] is True
    assert seen["loggers"] == ["NullHandler"]  # else Python prints what nobody asked for
    assert done.stderr == ""


PRELOAD = """
import json, sys
import asyncvmm
from asyncvmm._tensors import open_port, preload
asyncvmm.connect
preload("cpu")
before = set(sys.modules)
open_port("cpu")
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.slow
def test_no_exporter_waits_for_a_consumers_imports() -> None:
    """Kills the planted bug of a port that is imported during the handshake."""
    done = subprocess.run(
        [sys.executable, "-c", PRELOAD], capture_output=True, text=True, check=True, timeout=100
    )
    assert json.loads(done.stdout) == []
