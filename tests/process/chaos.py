"""An exporter and two consumers under load, to one of which something happens again and again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

from asyncvmm.testing import Process
from tests.process import steps
from tests.process.harness import Peers, until

KILLS = ["kill_exporter", "kill_consumer", "kill_consumer", "kill_both"]
MISHAPS = [*KILLS, "kill_consumer", "stop_consumer", "leave_and_return", "start_again"]

OURS = ("socket", "pidfd", "eventfd")
"""What connections are made of; memfds come and go with the size of a pool."""


FOREVER = 1e6
"""Seconds that they go on: until they are told to stop."""


def ours(peer: Process) -> Counter[str]:
    """Count the descriptors of a process's connections."""
    found = peer.counters().descriptors
    return Counter({kind: found[kind] for kind in OURS})


class Chaos:
    """What happens to them, and what must hold after each.

    Every slot comes back within a second, what is received is right and of this generation,
    survivors print one line about a death and nothing else, successors work under the same name,
    and nobody has more descriptors than before.
    """

    def __init__(
        self,
        peers: Peers,
        ranks: int,
        chance: random.Random,
        *,
        name: str = "pool",
        options: dict[str, Any] | None = None,
        wild: bool = False,
    ) -> None:
        self.peers = peers
        self.ranks = ranks
        self.chance = chance
        self.name = name
        self.options = options
        self.wild = wild
        self.generation = 0
        self.last = ""
        """What happened last."""
        self.pools = Counter[str]()
        """What the exporters did that ended in order, added up."""
        self.slowest = 0.0
        """The longest that it took until everything of a dead one was back, in seconds."""
        self.exporter: Process
        self.producing: asyncio.Future[None]
        self.consumers: list[Process]
        self.tasks: list[asyncio.Future[str]]

    async def happen(self, what: str) -> None:
        """Have one thing happen at a random moment."""
        self.last = what
        try:
            await self.some_progress()
            await getattr(self, what)()
        except Exception as error:
            error.add_note(f"{type(self).__name__} for {self.ranks} ranks, at {what}")
            for peer in (self.exporter, *self.consumers):
                error.add_note(f"process {peer.pid} printed: {peer.printed[-5:]}")
            raise

    async def open(self, first: Process | None = None, second: Process | None = None) -> None:
        """Start an exporter, and two consumers of it, unless they have survived the last one."""
        self.generation += 1
        self.exporter = self.peers.start()
        # On a busy machine a send may wait so long that the exporter would explain it in the log.
        options = {"explain_after": FOREVER, **(self.options or {})}
        await self.exporter.call(steps.open_exporter, self.name, self.ranks, options)
        seed = self.chance.randrange(1 << 30)
        self.producing = self.exporter.begin_long(
            FOREVER, steps.produce, self.generation, seed, 100_000, self.ranks, self.wild
        )
        self.consumers = [each or self.peers.start() for each in (first, second)]
        self.tasks = [await self.attach(number) for number in range(2)]

    async def attach(self, number: int) -> asyncio.Future[str]:
        """Have a consumer connect, and begin to consume."""
        consumer = self.consumers[number]
        await consumer.call(steps.connect, self.name, number if self.ranks else None)
        seed = self.chance.randrange(1 << 30)
        return consumer.begin_long(FOREVER, steps.consume, self.generation, seed)

    async def some_progress(self) -> None:
        """Wait for a random number of words of progress: a random moment."""
        for _ in range(self.chance.randrange(1, 8)):
            if self.producing.done():
                await self.producing
            await self.exporter.at("progress")

    async def lost(self, number: int) -> None:
        """See that a consumer is told that its exporter is gone, and let go of everything."""
        consumer = self.consumers[number]
        assert await self.tasks[number] == "lost"
        assert consumer.printed == []
        assert consumer.counters().mappings == 0

    async def settle(self) -> None:
        """Stop the producer, and see that everything is back."""
        for consumer in self.consumers:
            await consumer.call(steps.keep_at_most, 0)
        shrinks = "shrink_after" in (self.options or {})
        found = await self.exporter.call(steps.finish, shrinks)
        assert found.pop("free slots") == found.pop("slots")
        assert found.pop("free bytes") == found.pop("bytes")
        self.pools += Counter(found)

    async def finish(self) -> None:
        """End in order."""
        await self.settle()
        await self.exporter.call(steps.leave)
        assert [await task for task in self.tasks] == ["end", "end"]
        for consumer in self.consumers:
            assert consumer.printed == []
        await self.forget(self.exporter, *self.consumers)

    async def forget(self, *peers: Process) -> None:
        """Keep nothing of processes that are over."""
        for peer in peers:
            await self.peers.end(peer)

    async def has(self, peer: Process, descriptors: Counter[str]) -> None:
        """See that a process has the descriptors that it had, once all has settled."""
        with suppress(TimeoutError):
            await until(lambda: ours(peer) == descriptors)
        assert ours(peer) == descriptors, f"{ours(peer)} and not {descriptors}"

    # -- what happens ------------------------------------------------------------------------

    async def kill_consumer(self) -> None:
        """Kill one; the exporter says so once at most, and gets everything back."""
        number = self.chance.randrange(2)
        victim = self.consumers[number]
        lines, before = len(self.exporter.printed), ours(self.exporter)
        await victim.killed()
        took = await self.exporter.call(steps.free_of, victim.pid)
        self.slowest = max(self.slowest, took)
        assert len(self.exporter.printed) <= lines + 1, self.exporter.printed
        await self.forget(victim)
        self.consumers[number] = self.peers.start()
        self.tasks[number] = await self.attach(number)
        await self.has(self.exporter, before)

    async def kill_exporter(self) -> None:
        """Kill it; both consumers are told, let go of what they look at, and come again."""
        before = [ours(consumer) for consumer in self.consumers]
        await self.exporter.killed()
        for number in range(2):
            await self.lost(number)
        await self.forget(self.exporter)
        await self.open(*self.consumers)
        for consumer, descriptors in zip(self.consumers, before, strict=True):
            await self.has(consumer, descriptors)

    async def kill_both(self) -> None:
        """Kill one of each at once."""
        number = self.chance.randrange(2)
        self.consumers[number].kill()
        self.exporter.kill()
        await self.consumers[number].died()
        await self.exporter.died()
        await self.lost(1 - number)
        await self.forget(self.exporter, self.consumers[number])
        survivors: list[Process | None] = [*self.consumers]
        survivors[number] = None
        await self.open(*survivors)

    async def stop_consumer(self) -> None:
        """Stop one for a moment, and let it go on."""
        victim = self.chance.choice(self.consumers)
        victim.stop()
        await asyncio.sleep(self.chance.random() / 20)
        victim.resume()

    async def leave_and_return(self) -> None:
        """Have one leave, with whatever it keeps, and connect again from the same process."""
        number, before = self.chance.randrange(2), ours(self.exporter)
        await self.consumers[number].call(steps.leave)
        assert await self.tasks[number] == "left"
        self.tasks[number] = await self.attach(number)
        await self.has(self.exporter, before)

    async def start_again(self) -> None:
        """End in order and begin anew, as another generation."""
        await self.finish()
        await self.open()


class ReconnectingChaos(Chaos):
    """The same with consumers that go on with the next exporter by themselves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attached = set[int]()
        """The processes of those that have connected."""

    async def attach(self, number: int) -> asyncio.Future[str]:
        """Have a consumer connect, once, or wait until it has found the exporter by itself."""
        consumer = self.consumers[number]
        if consumer.pid in self.attached:
            await self.exporter.call(steps.has_come, consumer.pid)
            await consumer.call(steps.keep_at_most, 1)
            return self.tasks[number]
        self.attached.add(consumer.pid)
        rank = number if self.ranks else None
        await consumer.call(steps.connect, self.name, rank, {"reconnect": True})
        seed = self.chance.randrange(1 << 30)
        return consumer.begin_long(FOREVER, steps.consume_on, seed)

    async def lost(self, number: int) -> None:
        """See that a consumer is told, once, that its exporter is gone."""
        await self.consumers[number].at("lost")
        assert self.consumers[number].reached("lost") == 0

    async def leave_and_return(self) -> None:
        """Have one leave, and connect again from the same process."""
        self.attached.clear()
        await super().leave_and_return()
        self.attached = {consumer.pid for consumer in self.consumers}

    async def finish(self) -> None:
        """End in order, the consumers on their own account: they would wait for another."""
        await self.settle()
        await self.exporter.call(steps.leave)
        for consumer, task in zip(self.consumers, self.tasks, strict=True):
            await consumer.call(steps.leave)
            assert await task == "left"
            assert consumer.printed == []
            assert consumer.reached("lost") == 0
            assert consumer.counters().mappings == 0
        await self.forget(self.exporter, *self.consumers)

    async def start_again(self) -> None:
        """End an exporter in order; the consumers find the next one, and are told nothing."""
        await self.settle()
        await self.exporter.call(steps.leave)
        await self.forget(self.exporter)
        await self.open(*self.consumers)
