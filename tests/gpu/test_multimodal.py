"""The model of ``examples/multimodal`` on one GPU or several: the same bits as in one process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from examples.multimodal.__main__ import NEEDED, version_of
from tests.gpu import ends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        version_of("transformers") < NEEDED, reason=f"needs transformers {NEEDED} or newer"
    ),
]


@pytest.mark.parametrize("carrier", ["stream", "ticket"])
def test_every_ranks_logits_are_those_of_one_process(carrier: str) -> None:
    """Planted bug: features that are read before they are written, or off by one bit."""
    path = os.pathsep.join((str(ends.ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    command = ["-m", "examples.multimodal", "--device", "cuda", "--carrier", carrier]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ends.ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tokens are equal") == 2
