"""The CUDA backend on a stand-in driver, in child processes; and what it says without a driver.

The cases are in ``tests/standin/cases_*.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncvmm._backends import driver
from asyncvmm._backends.cuda import CudaExporterRegion
from asyncvmm._errors import BackendError
from tests import standin

SETTINGS = {
    "cases_conformance.py": {"STANDIN_FABRIC": "0"},
    "cases_devices.py": {"STANDIN_DEVICES": "0,1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("cases", sorted(each.name for each in standin.HERE.glob("cases_*.py")))
def test_on_the_standin_driver(cases: str, tmp_path: Path) -> None:
    standin.run_pytest(cases, tmp_path / "state", SETTINGS.get(cases))


def test_without_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_loaded", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(BackendError, match="install cuda-bindings") as caught:
        CudaExporterRegion.create(0, 1, 1, 1)
    assert caught.value.code == "no_bindings"


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the bindings' RuntimeError comes through."""

    def cuInit(flags: int) -> object:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(driver, "_loaded", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimpleNamespace(cuInit=cuInit))
    with pytest.raises(BackendError, match="no CUDA driver here") as caught:
        CudaExporterRegion.create(0, 1, 1, 1)
    assert (caught.value.call, caught.value.code) == ("cuInit", "no_driver")
