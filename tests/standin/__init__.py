"""A stand-in for the CUDA driver, so that the CUDA path runs where there is no GPU.

``libcuda.c`` beside this file is built once per session; child processes that get
:func:`environment` load it through the real bindings.  Inside such a process :class:`Standin`
steers it and reads its ledger.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1")
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-o", "python_files=cases_*.py")


@functools.cache
def _build() -> tuple[tempfile.TemporaryDirectory[str], Path] | None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    folder = tempfile.TemporaryDirectory(prefix="asyncvmm-standin-")
    library = Path(folder.name) / "libcuda.so.1"
    libraries = ("-lpthread", "-ldl")
    subprocess.run(
        [compiler, *FLAGS, "-o", str(library), str(HERE / "libcuda.c"), *libraries], check=True
    )
    return folder, library.parent


def build() -> Path:
    """Return the folder with the stand-in ``libcuda.so.1``; skip the test without a compiler."""
    built = _build()
    if built is None:
        pytest.skip("needs a C compiler (gcc) for the stand-in driver, and there is none")
    return built[1]


def environment(state: Path, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child process that has the stand-in for its driver.

    ``state`` is a file that all processes of one test share; ``settings`` are the ``STANDIN_...``
    variables that ``libcuda.c`` lists.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("STANDIN_")}
    paths = (str(ROOT / "src"), str(ROOT), inherited.get("PYTHONPATH", ""))
    return {
        **inherited,
        "LD_LIBRARY_PATH": os.pathsep.join((str(build()), inherited.get("LD_LIBRARY_PATH", ""))),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "STANDIN_STATE": str(state),
        **(settings or {}),
    }


def run_pytest(cases: str, state: Path, settings: Mapping[str, str] | None = None) -> None:
    """Run a file or folder of cases beside this one in a child process that has the stand-in."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, str(HERE / cases)],
        env=environment(state, settings),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        pytest.fail(f"{cases} failed on the stand-in driver:\n{found.stdout}", pytrace=False)


class Ledger(NamedTuple):
    """What this process has not given back, and the bytes in use on all devices by anyone.

    ``descriptors`` are the stand-in's own, where a driver would have none.
    """

    handles: int = 0
    mappings: int = 0
    ranges: int = 0
    events: int = 0
    opened: int = 0
    contexts: int = 0
    streams: int = 0
    memory: int = 0
    descriptors: int = 0


class Standin:
    """The controls of the stand-in driver of this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("standin_failed", "standin_journal"):
            getattr(library, name).restype = ctypes.c_char_p
        library.standin_calls.restype = ctypes.c_uint64
        library.standin_calls.argtypes = (ctypes.c_char_p,)
        library.standin_fail.argtypes = (ctypes.c_uint64, ctypes.c_int)
        library.standin_hold_queries.argtypes = (ctypes.c_int64,)
        library.standin_devices.argtypes = (ctypes.c_char_p,)
        self._library = library

    def ledger(self) -> Ledger:
        """Return what is held."""
        row = (ctypes.c_int64 * 9)()
        self._library.standin_ledger(row)
        return Ledger(*row)

    def fail(self, k: int, code: int) -> None:
        """Fail the k-th call from now with this code, once; 0 for none."""
        self._library.standin_fail(k, code)

    def break_device(self, code: int) -> None:
        """Have every call fail with this code from now on, as after a fault; 0 for no more."""
        self._library.standin_break(code)

    def failed(self) -> str:
        """Return the name of the call that was failed, as the bindings call it; maybe empty."""
        name: bytes = self._library.standin_failed()
        return name.decode().removesuffix("_v2")

    def calls(self, name: str | None = None) -> int:
        """Return how often a call was made; without a name, how many calls."""
        return int(self._library.standin_calls(name.encode() if name else None))

    def journal(self) -> list[str]:
        """Return the names of the calls since the last time this was asked."""
        names: bytes = self._library.standin_journal()
        return names.decode().split()

    def hold(self, on: bool = True) -> None:
        """From now on, what this process records stays pending until :meth:`finish`."""
        self._library.standin_hold(int(on))

    def finish(self) -> None:
        """Let everything be done that this process recorded."""
        self._library.standin_finish()

    def hold_queries(self, queries: int) -> None:
        """From now on, a recorded event is done after so many queries."""
        self._library.standin_hold_queries(queries)

    def slow_queries(self, microseconds: int) -> None:
        """Have each query take so long."""
        self._library.standin_slow_queries(microseconds)

    def pulled(self) -> int:
        """Return how many events were destroyed while they were being asked."""
        return int(self._library.standin_pulled())

    def capture(self, on: bool) -> None:
        """Have a graph captured in another thread."""
        self._library.standin_capture(int(on))

    def broken_captures(self) -> int:
        """Return how many calls would have broken the capture."""
        return int(self._library.standin_broken_captures())

    def strict_streams(self, on: bool) -> None:
        """Have calls on real streams need a current context too."""
        self._library.standin_strict_streams(int(on))

    def devices(self, numbers: str) -> None:
        """Make these physical devices visible, in this order."""
        self._library.standin_devices(numbers.encode())

    def contexts(self, device: int) -> int:
        """Return how often the primary context of a device is retained."""
        return int(self._library.standin_contexts(device))

    def forked_calls(self) -> int:
        """Return how many calls a forked child made on its parent's driver."""
        return int(self._library.standin_forked_calls())

    def depth(self) -> int:
        """Return how many contexts are pushed on this thread."""
        return int(self._library.standin_depth())

    def reset_thread(self) -> None:
        """Forget the contexts and the capture mode of this thread."""
        self._library.standin_reset_thread()

    def reset(self) -> None:
        """Take back everything that was asked for above."""
        self.fail(0, 0)
        self.break_device(0)
        self.hold(False)
        self.hold_queries(0)
        self.slow_queries(0)
        self.capture(False)
        self.strict_streams(False)
        self.devices(os.environ.get("STANDIN_DEVICES", "0"))
        self.reset_thread()
        self.journal()
