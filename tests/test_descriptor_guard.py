"""The guard of conftest.py is itself tested: it must fail a test that leaks."""

from __future__ import annotations

from pathlib import Path

import pytest

LEAKS = {
    "socket": "socket.socketpair()",
    "memfd": "os.memfd_create('leak')",
    "eventfd": "os.eventfd(0)",
    "pidfd": "os.pidfd_open(os.getpid())",
}


@pytest.fixture
def guarded(pytester: pytest.Pytester) -> pytest.Pytester:
    """A test directory with this project's conftest."""
    own = (Path(__file__).parent / "conftest.py").read_text(encoding="utf-8")
    pytester.makeconftest(own)
    root = Path(__file__).parent.parent
    pytester.makeini(
        f"[pytest]\nasyncio_default_fixture_loop_scope = function\npythonpath = {root}\n"
    )
    return pytester


TIDY = """
import asyncio, os, socket
import pytest

class Cycle:
    def __init__(self):
        self.me, self.sock = self, socket.socket()
    def __del__(self):
        self.sock.close()

@pytest.mark.asyncio
async def test_loop():
    await asyncio.sleep(0)

def test_collected():
    Cycle()

def test_closed():
    for sock in socket.socketpair():
        sock.close()
"""


@pytest.mark.slow
def test_guard_fails_each_kind_of_leak_and_lets_tidy_tests_pass(guarded: pytest.Pytester) -> None:
    """Kills: a guard that never looks, or that misses one kind; one that blames a test for its
    event loop or for garbage.
    """
    guarded.makepyfile(
        test_leaks="import os, socket\nkept = []\n"
        + "".join(f"def test_{kind}(): kept.append({call})\n" for kind, call in LEAKS.items()),
        test_tidy=TIDY,
    )
    result = guarded.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=len(LEAKS) + 4, errors=len(LEAKS))
    result.stdout.fnmatch_lines(["*left descriptors open: 1 x socket:*, 1 x socket:*"])
