"""A process holds at most 4,096 interprocess events: whoever lacks one is told, nothing is lost.

Both ends are in one process here, so what they have together counts.
"""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

import asyncvmm
from asyncvmm._backends import events
from tests.patience import PROMPTLY
from tests.process.harness import until
from tests.standin import Standin
from tests.standin.stack.cases_failing import go_on
from tests.standin.stack.conftest import connecting, exporting


@pytest.mark.parametrize(
    ("left", "who"),
    [(0, "send"), (1, "view"), (2, "release"), (3, "open")],
)
async def test_whoever_lacks_an_event_is_told(
    driver: Standin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    left: int,
    who: str,
) -> None:
    """Planted bugs: the slot is lost; the link ends; the driver's "out of memory" is the word."""
    caplog.set_level(logging.WARNING, "asyncvmm")
    async with exporting(slots=1) as exporter, connecting() as consumer:
        monkeypatch.setattr(events, "MAX_EVENTS", left)
        if who == "send":
            copies = list[int]()
            monkeypatch.setattr(exporter, "_copy_in", lambda *copy: copies.append(1))
            with pytest.raises(asyncvmm.BackendError, match="fewer slots") as caught:
                await exporter.send({"x": torch.ones(4)})
            assert not copies, "written before there was an event to stand behind it"
            assert caught.value.code == "too_many_events"
            assert exporter.statistics().slots.free == 1
        else:
            ack = await exporter.send({"x": torch.ones(4)})
            batch = await consumer.receive()
            if who == "view":
                with pytest.raises(asyncvmm.BackendError, match="fewer slots"):
                    batch[0]["x"]
            else:
                batch[0]["x"]
                batch.release()
                await until(lambda: "fewer slots" in caplog.text)
                assert not ack.done()
        monkeypatch.undo()
        if who != "send":
            batch.release()
            del batch
            async with asyncio.timeout(PROMPTLY):
                assert (await ack).complete
        await go_on(exporter, consumer)


async def test_as_many_slots_as_there_may_be(driver: Standin) -> None:
    """1,024 slots are four events each where both ends are in one process: all 4,096."""
    x = torch.ones(1)
    async with (
        exporting(slots=1024, route=asyncvmm.Broadcast(1), pool_bytes="2MiB") as exporter,
        connecting() as consumer,
    ):
        acks = [await exporter.send({"x": x}) for _ in range(1024)]
        assert events.budget.live <= events.MAX_EVENTS
        for _ in acks:
            with await consumer.receive() as batch:
                batch[0]["x"]
        del batch
        for ack in acks:
            assert (await ack).complete
        assert events.budget.live == 4096
        assert exporter.statistics().slots.free == 1024
