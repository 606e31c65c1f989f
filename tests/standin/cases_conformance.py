"""The conformance suite of all backends, on the stand-in driver."""

from __future__ import annotations

import ctypes

import pytest

from asyncvmm._backends.base import ConsumerRegion, ExporterRegion
from asyncvmm._backends.cuda import CudaConsumerRegion, CudaExporterRegion
from asyncvmm._backends.handle_types import AskedType
from asyncvmm._types import RegionInfo
from tests.backends import test_conformance
from tests.backends.test_conformance import *  # noqa: F403 - the suite's tests are run from here
from tests.backends.test_conformance import Case
from tests.standin import Standin


class CudaCase:
    """GPU memory, shared by descriptors or by FABRIC handles."""

    granule = 2 << 20

    def __init__(self, handle_type: AskedType) -> None:
        self._handle_type = handle_type

    def create(self, pool_bytes: int, max_pool_bytes: int, slots: int) -> ExporterRegion:
        return CudaExporterRegion.create(
            0, pool_bytes, max_pool_bytes, slots, handle_type=self._handle_type
        )

    def attach(self, info: RegionInfo) -> ConsumerRegion:
        return CudaConsumerRegion(info, 0)

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))


@pytest.fixture(params=["posix", "fabric"])  # type: ignore[no-redef]  # replaces the suite's
def case(request: pytest.FixtureRequest) -> Case:
    if request.node.name == "test_closed_regions_say_so_and_close_again[fabric]":
        pytest.skip("it counts the descriptors of handles, and FABRIC handles are bytes")
    return CudaCase(request.param)


@pytest.fixture(autouse=True)
def _without_the_stand_ins_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    all_descriptors, driver = test_conformance.descriptors, Standin()
    monkeypatch.setattr(
        test_conformance, "descriptors", lambda: all_descriptors() - driver.ledger().descriptors
    )
