"""The examples run as a user would run them, and say what they say they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.slow


def run_example(name: str, *arguments: str) -> str:
    """Run an example, a file or a package, to its end and return what it printed.

    Its processes share the output: a line is whole only if it is written at once, as by default.
    """
    program = [str(EXAMPLES / name)] if name.endswith(".py") else ["-m", f"examples.{name}"]
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=EXAMPLES.parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_every_example_is_run_here() -> None:
    """Kills the planted bug of an example that is added and never run."""
    source = Path(__file__).read_text(encoding="utf-8")
    for path in [*EXAMPLES.glob("*.py"), *(path.parent for path in EXAMPLES.glob("*/__main__.py"))]:
        assert f'run_example("{path.name}"' in source


def test_one_process() -> None:
    """Both ends in one process see the same numbers: 1000 * (0 + 1 + 2 + 3) * (1 - 2)."""
    assert run_example("one_process.py") == "sum of everything sent: -6000\n"


def test_pipeline_delivers_each_frame_to_exactly_one_worker() -> None:
    """Kills the planted bug of a frame that goes to two workers or to none."""
    output = run_example("pipeline.py", "2", "40")
    shares = [int(count) for count in re.findall(r"^worker-\d: (\d+) frames$", output, re.M)]
    assert len(shares) == 2
    assert sum(shares) == 40
    assert "source: 40 frames delivered" in output


def test_encoder_to_llm_reaches_every_rank() -> None:
    """Kills the planted bug of a rank that misses a request or sees one twice."""
    output = run_example("encoder_to_llm.py")
    tokens = sum(64 + 8 * request for request in range(24))
    for rank in range(2):
        assert f"rank {rank}: {tokens} tokens of 24 requests\n" in output


def test_scheduler_runs_every_request_in_a_plain_loop() -> None:
    """Kills the planted bug of a batch that a loop which polls never sees."""
    output = run_example("scheduler.py")
    found = re.fullmatch(r"scheduler: 12 requests done, at most ([1-4]) at once\n", output)
    assert found, output


@pytest.mark.parametrize(
    ("carrier", "ranks"),
    [
        pytest.param("stream", 2, id="streamed to two ranks"),
        pytest.param("ticket", 1, id="by ticket to one rank"),
    ],
)
def test_multimodal_answers_as_the_same_model_in_one_process_does(carrier: str, ranks: int) -> None:
    """Every rank's logits of every request are the same bits (the program compares and fails).

    Kills the planted bugs of features that are off by one bit, or in another order.
    """
    output = run_example("multimodal", "--carrier", carrier, "--ranks", str(ranks))
    assert "encoder: 4 requests on cpu\n" in output
    tokens = sum(10 + 3 * 2 + 4 + (2 * number + 8) + 12 for number in range(4))
    for rank in range(ranks):
        assert f"rank {rank}: 4 requests, the logits of {tokens} tokens are equal\n" in output
