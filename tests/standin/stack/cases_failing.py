"""Every driver call of the whole library fails once: it is told, nothing is lost, and it goes on.

Both ends are in one process, so the k-th call is that of whichever end makes it.  After each
failure the same two ends hand another owner over, every slot is free, and both close with nothing
left in the ledger (which the fixture looks at too).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

import asyncvmm
from asyncvmm._backends import events
from tests.patience import PROMPTLY
from tests.process.harness import until
from tests.standin import Ledger, Standin
from tests.standin.peer import join_unmapping
from tests.standin.stack.conftest import connecting, exporting

UNKNOWN = 999


class Failing:
    """Fails the k-th call for every k, and sees that somebody was told."""

    def __init__(self, driver: Standin, caplog: pytest.LogCaptureFixture) -> None:
        self.driver = driver
        self.caplog = caplog
        self.names: list[str] = []
        self.error: Exception | None = None
        self._k = 0
        self._missed = 0

    def again(self) -> bool:
        """Say whether there is another call to fail."""
        join_unmapping()
        # A pop that failed leaves its thread with a context: each round has fresh threads.
        self.driver.reset_thread()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
        assert self.driver.ledger() == Ledger(), f"call {self._k}, {self.names[-1:]}"
        assert events.budget.live == 0
        if self._missed > 2:  # the watcher's calls come when they come, so one miss is no end
            return False
        self._k += 1
        return True

    @asynccontextmanager
    async def armed(self) -> AsyncIterator[None]:
        """Fail a call inside; what is raised must name it, or the log must."""
        self.caplog.clear()
        self.error = None
        self.driver.fail(self._k, UNKNOWN)
        try:
            yield
        except asyncvmm.AsyncVMMError as error:
            self.error = error.with_traceback(None)  # which would keep views
        failed = self.driver.failed()
        self.driver.fail(0, 0)
        if not failed:
            assert self.error is None
            self._missed += 1
            return
        self._missed = 0
        self.driver.reset_thread()
        self.names.append(failed)
        if isinstance(self.error, asyncvmm.HandshakeError):  # the exporter's word
            assert self.error.reason == "share"
            assert failed in str(self.error)
        elif isinstance(self.error, asyncvmm.BackendError):
            assert self.error.call == failed, f"call {self._k} was {failed}: {self.error}"
        elif failed != "cuEventQuery":  # that is just asked again
            assert isinstance(self.error, asyncvmm.PeerLostError | None)
            assert failed in self.caplog.text, f"call {self._k}, {failed}, failed in silence"


@pytest.fixture
def failing(driver: Standin, caplog: pytest.LogCaptureFixture) -> Failing:
    caplog.set_level(logging.WARNING, "asyncvmm")
    return Failing(driver, caplog)


async def hand_over(exporter: asyncvmm.Exporter, consumer: asyncvmm.Consumer) -> None:
    ack = await exporter.send({"x": torch.full((4,), 3.0)})
    with await consumer.receive() as batch:
        assert batch[0]["x"].tolist() == [3.0] * 4
    del batch
    assert (await ack).complete


async def go_on(exporter: asyncvmm.Exporter, consumer: asyncvmm.Consumer) -> None:
    """Use every slot, then see every slot free."""
    async with asyncio.timeout(PROMPTLY):
        for _ in range(exporter.statistics().slots.total + 1):
            await hand_over(exporter, consumer)
        await until(lambda: exporter.statistics().slots.free == exporter.statistics().slots.total)


async def test_opening(failing: Failing) -> None:
    while failing.again():
        async with AsyncExitStack() as stack, failing.armed():
            await stack.enter_async_context(exporting())
    assert {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAddressReserve"} <= set(
        failing.names
    )


async def test_connecting(failing: Failing) -> None:
    while failing.again():
        async with exporting() as exporter:
            async with AsyncExitStack() as stack, failing.armed():
                await stack.enter_async_context(connecting())
            async with connecting() as consumer:
                await go_on(exporter, consumer)
    # Both ends work at once, in threads, so which call is the k-th differs from round to round.
    assert len(failing.names) >= 20, failing.names


async def test_connecting_to_a_pool_that_has_grown(failing: Failing) -> None:
    """Whichever segment it is whose call fails, the consumer is told which call that was."""
    while failing.again():
        async with exporting(max_pool_bytes="4MiB") as exporter:
            exporter._elastic._add(exporter._region.grow(2 << 20))
            async with AsyncExitStack() as stack, failing.armed():
                await stack.enter_async_context(connecting())
            assert not isinstance(failing.error, asyncvmm.PeerLostError), failing.names[-1]
            async with connecting() as consumer:
                await hand_over(exporter, consumer)
    assert len(failing.names) >= 30, failing.names


@pytest.mark.parametrize("used", [False, True])
async def test_sending(failing: Failing, used: bool) -> None:
    while failing.again():
        async with exporting(slots=2) as exporter, connecting() as consumer:
            if used:
                await go_on(exporter, consumer)
            async with failing.armed():
                await exporter.send({"x": torch.ones(4)})
            if failing.error is None:
                (await consumer.receive()).release()
            await go_on(exporter, consumer)
    assert "cuEventRecord" in failing.names


@pytest.mark.parametrize("used", [False, True])
async def test_reserving(failing: Failing, used: bool) -> None:
    """An owner that is given up: its slot is free once the device has stopped writing."""
    specs = {"x": asyncvmm.TensorSpec((4,), torch.float32)}
    while failing.again():
        async with exporting(slots=2) as exporter, connecting() as consumer:
            if used:
                await go_on(exporter, consumer)
            async with failing.armed():
                async with exporter.reserve(specs) as owner:
                    owner["x"].fill_(1)
                    del owner
                await until(lambda: exporter.statistics().slots.free == 2)
            await go_on(exporter, consumer)


@pytest.mark.parametrize("used", [False, True])
async def test_viewing(failing: Failing, used: bool) -> None:
    while failing.again():
        async with exporting(slots=2) as exporter, connecting() as consumer:
            if used:
                await go_on(exporter, consumer)
            ack = await exporter.send({"x": torch.ones(4)})
            async with failing.armed():
                batch = await consumer.receive()
                batch[0]["x"]
            batch.release()
            del batch
            await ack
            await go_on(exporter, consumer)
    assert "cuStreamWaitEvent" in failing.names


@pytest.mark.parametrize("used", [False, True])
async def test_releasing(failing: Failing, used: bool) -> None:
    while failing.again():
        async with exporting(slots=2) as exporter, connecting() as consumer:
            if used:
                await go_on(exporter, consumer)
            ack = await exporter.send({"x": torch.ones(4)})
            batch = await consumer.receive()
            batch[0]["x"]
            async with failing.armed():
                batch.release()
                del batch
                async with asyncio.timeout(PROMPTLY):
                    await ack
            await go_on(exporter, consumer)
    assert "cuEventRecord" in failing.names


async def test_leaving(failing: Failing) -> None:
    while failing.again():
        async with exporting(slots=2) as exporter:
            async with AsyncExitStack() as stack:
                consumer = await stack.enter_async_context(connecting())
                await go_on(exporter, consumer)
                async with failing.armed():
                    await stack.aclose()
                    await until(lambda: not exporter.statistics().consumers)
            async with connecting() as consumer:
                await go_on(exporter, consumer)


async def test_closing(failing: Failing) -> None:
    while failing.again():
        async with AsyncExitStack() as stack:
            exporter = await stack.enter_async_context(exporting(slots=2))
            async with connecting() as consumer:
                await go_on(exporter, consumer)
            async with failing.armed():
                await stack.aclose()
