"""The whole library on the stand-in driver, in child processes; the cases are in ``stack``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import standin


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_stack_on_the_standin_driver(tmp_path: Path) -> None:
    standin.run_pytest("stack", tmp_path / "state")
