'''Tools for tests of what uses asyncvmm: fakes, a pair in one loop, processes that come to harm.

**Both ends in one loop.**  :func:`open_pair` opens an exporter and its consumers.  A
:class:`FakeDevice` stands for a GPU whose work is done when the test says so, on any machine::

    device = FakeDevice(hold_release=True)
    async with open_pair(port=FakePort(device)) as pair:
        ack = await pair.exporter.send({"x": torch.ones(3)})
        with await pair.consumer.receive() as batch:
            batch[0]["x"]
        ...                                  # the consumer let go, its "kernel" still runs
        device.finish()
        await ack

**Processes that are stopped, continued and killed at named points.**  Give :class:`Processes` your
own functions; each gets a :class:`Here`, by which it says where it is, and may wait there for the
test::

    import asyncvmm
    from asyncvmm.testing import Here, Processes, fill, mismatch
    import torch

    async def encode(here: Here, name: str, count: int) -> list[bool]:
        """The exporter: sends owners that say whose they are, returns what became of each."""
        async with asyncvmm.open_exporter(name, device="cpu", pool_bytes="1MiB") as exporter:
            acks = []
            for number in range(count):
                features = {"x": fill(torch.empty(1000), owner=number, generation=0)}
                acks.append(await exporter.send(features, key=number, require="none"))
            complete = []
            for ack in acks:
                complete.append((await ack).complete)
                here.tell("back")
            return complete

    async def decode(here: Here, name: str, count: int) -> None:
        """The consumer: looks at what it receives, and stands still before it lets go."""
        async with asyncvmm.connect(name, device="cpu", rank=0, wait=True) as consumer:
            for _ in range(count):
                with await consumer.receive() as batch:
                    for owner in batch:
                        assert not mismatch(owner["x"], owner.key, generation=0)
                    await here.reach("looked", key=batch[0].key)

    async def test_a_killed_decoder_costs_only_what_it_held(name: str = "@my-test") -> None:
        async with Processes() as processes:
            encoder, decoder = processes.start(), processes.start()
            encoding = encoder.begin(encode, name, 3)
            decoding = decoder.begin(decode, name, 2)
            assert await decoder.at("looked") == {"key": 0}
            decoder.go("looked")
            await encoder.at("back")
            assert await decoder.at("looked") == {"key": 1}
            await decoder.killed()
            assert await encoding == [True, False, False]
            assert encoder.counters().descriptors["pidfd"] == 0

The functions are found by module and name in the other process, so they must not be in
``__main__`` or inside another function.

Importing this package imports torch.
'''

from asyncvmm.testing.counters import Counters, live_events
from asyncvmm.testing.fakes import FakeDevice, FakePort, HandDrivenFence
from asyncvmm.testing.here import Here
from asyncvmm.testing.pair import Pair, open_pair
from asyncvmm.testing.patterns import fill, mismatch, pattern
from asyncvmm.testing.process import Process, ProcessEndedError, ProcessRaisedError
from asyncvmm.testing.processes import ForkServer, Processes

__all__ = [
    "Counters",
    "FakeDevice",
    "FakePort",
    "ForkServer",
    "HandDrivenFence",
    "Here",
    "Pair",
    "Process",
    "ProcessEndedError",
    "ProcessRaisedError",
    "Processes",
    "fill",
    "live_events",
    "mismatch",
    "open_pair",
    "pattern",
]
