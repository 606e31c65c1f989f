"""Both cores against a model of who holds what, after every step."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.machine import BroadcastMachine, CompeteMachine, Machine

EXAMPLES = int(os.environ.get("ASYNCVMM_MODEL_EXAMPLES", "200"))
"""Runs of each machine; set the variable to some ten thousand before a release."""


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES > 1000 else 300)  # a failure takes a while to shrink
@pytest.mark.parametrize("machine", [BroadcastMachine, CompeteMachine])
def test_cores_agree_with_the_model(machine: type[Machine]) -> None:
    """Kills every planted bug of test_mutants.py (field reports 11, 19, 27, 28)."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=60,
            derandomize=EXAMPLES <= 1000,  # a release is tried with other runs than a commit
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
