"""Owners in several threads, and copies queued on a stream that is not the loop's own."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm._consumer.lease import Lease
from asyncvmm._io.busy import Busy
from asyncvmm._tensors.host import OFFLOAD_BYTES, HostPort
from asyncvmm._tensors.plan import Plan
from asyncvmm.testing import FakeDevice, FakePort, open_pair
from tests.api.books import check_all_back, passes, until
from tests.patience import PROMPTLY


async def test_two_threads_take_the_first_view_of_an_owner_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thread's view keeps the slot (inv. 14).

    Kills the planted bug of the later thread's holder in place of the earlier's: the slot would
    go back with the later view, while the earlier one is read.
    """
    both = threading.Barrier(2, timeout=PROMPTLY)
    holder, opened = HostPort.holder, Lease.open
    views: list[torch.Tensor] = []  # the view of the thread that came later is the last

    def met(self: HostPort, *args: Any) -> object:
        found = holder(self, *args)
        both.wait()
        return found

    def in_turn(self: Lease, found: object, stream: int | None) -> object:
        with order:
            return opened(self, found, stream)

    def look() -> None:
        found = owner["x"]
        with order:
            views.append(found)

    order = threading.RLock()
    monkeypatch.setattr(HostPort, "holder", met)
    monkeypatch.setattr(Lease, "open", in_turn)
    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": torch.arange(5)})
        (owner,) = await pair.consumer.receive()
        await asyncio.gather(asyncio.to_thread(look), asyncio.to_thread(look))
        owner.release()
        while views:
            await passes(3)
            assert pair.consumer.statistics().viewed == 1
            assert not ack.done()
            assert views[-1].sum() == 10
            del views[-1]
            gc.collect()
        await ack
        check_all_back(pair.exporter)


async def test_a_release_overtakes_a_first_view_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills the planted bug of a view that is made after its owner was given back (inv. 14)."""
    begun, go = threading.Event(), threading.Event()
    holder = HostPort.holder

    def slow(self: HostPort, *args: Any) -> object:
        begun.set()
        assert go.wait(PROMPTLY)
        return holder(self, *args)

    monkeypatch.setattr(HostPort, "holder", slow)
    async with open_pair() as pair:
        ack = await pair.exporter.send({"x": torch.arange(5)})
        (owner,) = await pair.consumer.receive()
        viewing = asyncio.create_task(asyncio.to_thread(owner.__getitem__, "x"))
        await asyncio.to_thread(begun.wait, 10)
        owner.release()
        await ack
        go.set()
        with pytest.raises(asyncvmm.ReleasedError):
            await viewing
        check_all_back(pair.exporter)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_copy_is_queued_on_the_stream_that_is_named(waits: bool) -> None:
    """Or on the one that was current at the call, also if the send had to wait for room.

    Kills the planted bugs of an option that nobody reads, and of a stream that is looked up when
    room comes.
    """
    device = FakeDevice()
    async with open_pair(port=FakePort(device), slots=1) as pair:

        async def sent(**options: Any) -> int:
            first = await pair.exporter.send({"x": torch.ones(3)}, stream=1) if waits else None
            sending = asyncio.create_task(pair.exporter.send({"x": torch.ones(3)}, **options))
            await until(lambda: sending.done() or pair.exporter.statistics().waiting == 1)
            assert sending.done() != waits
            device.stream = 99
            if first is not None:
                (await pair.consumer.receive()).release()
                await first
            ack = await sending
            (await pair.consumer.receive()).release()
            await ack
            return [fence for fence in device.fences if fence.kind == "ready"][-1].streams[0]

        device.stream = 5
        assert await sent() == 5
        assert await sent(stream=6) == 6
        with pytest.raises(asyncvmm.ArgumentError):
            await pair.exporter.send({"x": torch.ones(3)}, stream="six")
        with pytest.raises(asyncvmm.ArgumentError):
            await pair.exporter.send_nowait({"x": torch.ones(3)}, stream="six")
        check_all_back(pair.exporter)


async def test_large_copies_into_host_memory_are_made_by_one_thread_beside_the_loop() -> None:
    """Torch shares each of them among the cores, by a team of threads for each caller.

    Kills: a second thread that copies, whose team spins on the cores that the first one's needs.
    """
    copying: list[int] = []

    class Noting(HostPort):
        def copy_in(self, address: int, plan: Plan, stream: int) -> None:
            copying.append(threading.get_ident())
            if len(copying) == 1:
                assert queued.wait(PROMPTLY)
            super().copy_in(address, plan, stream)

    large = torch.zeros(OFFLOAD_BYTES, dtype=torch.uint8)
    queued = threading.Event()
    async with open_pair(port=Noting(), pool_bytes=4 * OFFLOAD_BYTES) as pair:
        sends = [asyncio.ensure_future(pair.exporter.send({"x": large})) for _ in range(3)]
        await until(lambda: len(pair.exporter._draining.copying) == 3)
        queued.set()
        await asyncio.gather(*sends)
        assert len(copying) == 3
        assert len({*copying, threading.get_ident()}) == 2


class Turning(Busy):
    """Counts those that the loop was to turn for."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop(), 0)
        self.begun = 0

    def __enter__(self) -> None:
        self.begun += 1


async def test_in_debug_mode_another_thread_is_refused_and_loses_nothing() -> None:
    """Kills: a way in that is not looked at; a refusal that takes a slot, or comes after the loop
    was told to turn; a look that everybody pays for."""
    async with open_pair(debug=True, slots=2) as pair:
        exporter, one = pair.exporter, {"x": torch.ones(3)}
        spec = {"x": asyncvmm.TensorSpec((3,), torch.float32)}
        calls: list[Callable[[], object]] = [
            lambda: asyncio.run(exporter.send(one)),
            lambda: asyncio.run(exporter.send_nowait(one)),
            lambda: asyncio.run(exporter.send_all([one, one])),
            lambda: asyncio.run(exporter.reserve(spec).__aenter__()),
            lambda: asyncio.run(exporter.reserve_nowait(spec).__aenter__()),
        ]
        home, other = threading.current_thread().name, r"thread '(asyncio|uvloop)_\d+'"
        for call in calls:
            with pytest.raises(asyncvmm.LocalProtocolError, match=f"{home!r}.*{other}"):
                await asyncio.to_thread(call)
        assert exporter.statistics().slots.free == 2
        sends = [asyncio.create_task(exporter.send(one)) for _ in range(3)]
        await until(lambda: exporter.statistics().waiting == 1)
        busy, turning = exporter._connections.busy, Turning()
        exporter._connections.busy = turning
        for call in (calls[0], calls[2], calls[3]):  # they would have had to wait
            with pytest.raises(asyncvmm.LocalProtocolError, match=other):
                await asyncio.to_thread(call)
        assert turning.begun == 0
        exporter._connections.busy = busy
        for send in sends:
            (await pair.consumer.receive()).release()
            await (await send)
        async with exporter.reserve(spec) as owner:
            with pytest.raises(asyncvmm.LocalProtocolError, match=other):
                await asyncio.to_thread(owner.publish)
            ack = owner.publish()
        (await pair.consumer.receive()).release()
        assert (await ack).complete
        async with exporter.reserve(spec) as owner:
            with pytest.raises(asyncvmm.LocalProtocolError, match=other):
                await asyncio.to_thread(owner.publish)
        check_all_back(exporter)
    async with open_pair() as pair:
        assert "_publish" not in vars(pair.exporter)
        assert "reserve" not in vars(pair.exporter._core)
