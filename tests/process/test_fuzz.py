"""A little fuzz of both ends over live sockets; ``make fuzz`` does it for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncvmm
from asyncvmm.testing import Counters
from tests.patience import PROMPTLY
from tests.process.harness import until
from tests.process.sessions import Plan, accept, attack_consumer, attack_exporter

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
chances = st.randoms(use_true_random=False)
little = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(params=list(LOOPS))
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """A loop that outlives each example, and that no exception may reach."""
    unhandled: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        runner.get_loop().set_exception_handler(lambda _, found: unhandled.append(found))
        yield runner
    assert unhandled == []


@pytest.mark.slow
def test_no_consumer_can_harm_an_exporter(runner: asyncio.Runner, folder: Path) -> None:
    """Fuzz an exporter; after each session an honest consumer is served (field report 53)."""
    address = str(folder / "pool")
    exporting = asyncvmm.open_exporter(
        address, device="cpu", pool_bytes="64KiB", slots=4, route=asyncvmm.Broadcast(2)
    )
    exporter = runner.run(exporting.__aenter__())
    honest = runner.run(asyncvmm.connect(address, device="cpu", rank=0).__aenter__())
    data = {"x": torch.arange(10)}
    before = Counters.of().descriptors

    async def session(plan: Plan) -> None:
        await asyncio.to_thread(attack_exporter, address, plan)
        await until(lambda: len(exporter.statistics().consumers) == 1)
        ack = await exporter.send(data, to=0)
        with await honest.receive() as batch:
            assert batch[0]["x"].tolist() == list(range(10))
        del batch
        await ack
        assert exporter.statistics().slots.free == 4

    @little
    @given(chances)
    def sessions(chance: random.Random) -> None:
        runner.run(session(Plan.of(chance, "consumer")))
        # A connection that never said hello shows in no statistics, and its end may be read last.
        # Counted between the runs: uvloop has descriptors of its own while it runs.
        for _ in range(100):
            if Counters.of().descriptors == before:
                return
            runner.run(asyncio.sleep(0.01))
        assert Counters.of().descriptors == before

    try:
        sessions()
    finally:
        runner.run(honest.aclose())
        runner.run(exporting.__aexit__(None, None, None))


@pytest.mark.slow
def test_no_exporter_can_harm_a_consumer(runner: asyncio.Runner, folder: Path) -> None:
    """Fuzz a consumer: typed errors, and nothing left open or mapped (field reports 51, 53)."""
    address = str(folder / "pool")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()

        async def session(plan: Plan, chance: random.Random) -> None:
            over = threading.Event()

            def attack() -> None:
                listener.settimeout(PROMPTLY)
                attack_consumer(accept(listener, chance), plan)
                listener.settimeout(0.02)
                while not over.is_set():  # it may come back to give back what it holds
                    with contextlib.suppress(TimeoutError):
                        accept(listener, chance).close()

            attacking = asyncio.ensure_future(asyncio.to_thread(attack))
            with contextlib.suppress(asyncvmm.AsyncVMMError):
                async with asyncio.timeout(PROMPTLY), asyncvmm.connect(address, rank=0) as consumer:
                    async for batch in consumer:
                        batch.release()
            over.set()
            await attacking

        runner.run(session(Plan("attached", [], patient=True), random.Random(1)))
        before = Counters.of()

        @little
        @given(chances)
        def sessions(chance: random.Random) -> None:
            runner.run(session(Plan.of(chance, "exporter"), random.Random(chance.random())))
            after = Counters.of()
            assert after.mappings == 0
            assert after.descriptors == before.descriptors

        sessions()
    (folder / "pool").unlink()
