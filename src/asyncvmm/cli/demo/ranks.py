"""The rank processes as the exporter's side sees them: started, listened to, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

import msgspec

from asyncvmm._errors import PeerLostError
from asyncvmm.cli.demo.plan import Plan, RankOrder, RankRecord


class RankProcess:
    """One rank process and what it has told so far."""

    def __init__(self, rank: int, process: Process) -> None:
        self.rank = rank
        self.process = process
        self.results: list[tuple[str, str]] = []
        """Key and digest of each request, in the order in which they were done."""

    @classmethod
    async def start(cls, plan: Plan, rank: int) -> RankProcess:
        """Start the process with its order."""
        trace = plan.rank_trace(rank)
        order = RankOrder(
            name=plan.name,
            device=plan.rank_devices[rank],
            rank=rank,
            shard=plan.shard(rank),
            compete=plan.route == "compete",
            loop=plan.loop,
            trace=None if trace is None else str(trace),
        )
        command = [sys.executable, "-m", "asyncvmm.cli.demo.rank_side"]
        process = await asyncio.create_subprocess_exec(
            *command, msgspec.json.encode(order), stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        return cls(rank, process)

    async def watch(self) -> None:
        """Take in what the rank tells until it ends; raise if it did not end in order."""
        stdout, stderr = self.process.stdout, self.process.stderr
        if stdout is None or stderr is None:
            return
        async with asyncio.TaskGroup() as tasks:
            complaint = tasks.create_task(stderr.read())
            error, finished = "", False
            async for line in stdout:
                record = msgspec.json.decode(line, type=RankRecord)
                error, finished = error or record.error, finished or record.finished
                if record.digest:
                    self.results.append((record.key, record.digest))
            status = await self.process.wait()
        if finished and status == 0:
            return
        last = (complaint.result().decode(errors="replace").strip().splitlines() or [""])[-1]
        raise PeerLostError(
            f"rank {self.rank} ended with status {status} after {len(self.results)} requests"
            + (f": {error or last}" if error or last else ""),
            peer=f"rank {self.rank}",
        )

    async def end(self) -> None:
        """End the process if it still runs."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended this moment
                self.process.kill()
        await self.process.wait()


@contextlib.asynccontextmanager
async def no_rank_left_behind() -> AsyncIterator[list[RankProcess]]:
    """Yield a list for rank processes; whatever happens, those in it have ended afterwards."""
    ranks: list[RankProcess] = []
    try:
        yield ranks
    finally:
        for rank in ranks:
            await rank.end()
