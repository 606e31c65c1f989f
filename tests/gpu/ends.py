"""The consumer processes of the GPU tests: ``python -m tests.gpu.ends ROLE NAME DEVICE RANK``.

Each prints one JSON object as its last line.  Controls are asked for by ``break=...`` in the
environment variable ``ASYNCVMM_TEST_BREAK``: what is taken out is named there, and the test that
asks for it must see wrong data.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

import asyncvmm
from asyncvmm._backends import driver, driver_memory, events
from asyncvmm._backends.cuda import CudaConsumerRegion
from asyncvmm.tickets import restore_features

ROOT = Path(__file__).parent.parent.parent
LONG = 1_500_000
"""Clock cycles of the kernel that keeps a stream busy: about 1 ms on an H200."""

LONGER = 15_000_000
"""The same for readers: two processes on one GPU take turns of some milliseconds, and a shorter
kernel would be over, with the read behind it, before the other process could write."""


def start(
    role: str, name: str, device: str, rank: int, broken: str = "", **environment: str
) -> subprocess.Popen[str]:
    """Start a consumer."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.ends", role, name, device, str(rank)],
        env={**os.environ, "PYTHONPATH": path, "ASYNCVMM_TEST_BREAK": broken, **environment},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def run_code(code: str, *args: str) -> subprocess.Popen[str]:
    """Start a process from source text."""
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> dict[str, int]:
    """Return what a consumer printed last."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    found: dict[str, int] = json.loads(output.strip().splitlines()[-1])
    return found


def say(found: dict[str, int]) -> None:
    """Tell the test something."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


async def late_reader(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Read each owner behind a long kernel on a side stream; release it at once."""
    side = torch.cuda.Stream(device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    rounds = 0
    async for batch in consumer:
        for owner in batch:
            with torch.cuda.stream(side):
                torch.cuda._sleep(LONGER)
                view = owner["x"]
                wrong += torch.ne(view, int(owner.key) % 251).sum()
            owner.release(stream=side)
            del view
            rounds += 1
    return {"rounds": rounds, "wrong": int(wrong)}


async def prompt_reader(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Read each owner at once, on the current stream."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    rounds = 0
    async for batch in consumer:
        for owner in batch:
            view = owner["x"]
            wrong += torch.ne(view, int(owner.key) % 251).sum()
            owner.release()
            del view
            rounds += 1
    return {"rounds": rounds, "wrong": int(wrong)}


async def batch_reader(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Read each batch behind a long kernel on a side stream; release it as a whole at once.

    With ``ASYNCVMM_TEST_PROMPT`` on the current stream and behind nothing.
    """
    prompt = bool(os.environ.get("ASYNCVMM_TEST_PROMPT"))
    side = torch.cuda.current_stream(device) if prompt else torch.cuda.Stream(device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    rounds = batches = 0
    async for batch in consumer:
        with torch.cuda.stream(side):
            if not prompt:
                torch.cuda._sleep(LONGER)
            for owner in batch:
                wrong += torch.ne(owner["x"], int(owner.key) % 251).sum()
                rounds += 1
        batch.release(stream=side)
        batches += 1
    torch.cuda.synchronize(device)
    return {"rounds": rounds, "batches": batches, "wrong": int(wrong)}


async def comparer(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Compare every feature with what its metadata says, bit by bit, as views and as a clone."""
    wrong = right = 0
    async for batch in consumer:
        for owner in batch:
            clone = owner.clone()
            for name, view in owner.items():
                expected = bytes(owner.metadata[name])  # type: ignore[index]  # a mapping
                flat = view.contiguous().reshape(-1).view(torch.uint8).cpu()
                copy = clone[name].contiguous().reshape(-1).view(torch.uint8).cpu()
                same = bytes(flat.tolist()) == expected == bytes(copy.tolist())
                good = same and view.device == device == clone[name].device
                right, wrong = right + good, wrong + (not good)
                del view, flat
            owner.release()
    return {"right": right, "wrong": wrong}


async def holder(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Release the first owner at once, and all others behind some six seconds of kernels.

    The first is there because loading a kernel waits for those that run: nothing may be done for
    the first time behind them.  They are long ones, because a launch waits where about a thousand
    are pending.
    """
    side = torch.cuda.Stream(device)
    first = True
    async for batch in consumer:
        for owner in batch:
            with torch.cuda.stream(side):
                owner["x"].sum()
            owner.release(stream=side)
        if first:
            first = False
            with torch.cuda.stream(side):
                for _ in range(700):
                    torch.cuda._sleep(LONGER)
    return {"done": 1}


async def keeper(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Say that one owner is here, and keep it until killed or until the exporter is gone."""
    owner = (await consumer.receive())[0]
    before = int(owner["x"].sum())
    say({"holding": 1})
    try:
        await consumer.receive()
    except asyncvmm.PeerLostError:
        after = int(owner["x"].sum())
        owner.release()
        free = torch.cuda.mem_get_info(device)[0]
        return {"same": int(before == after), "free": free}
    return {"same": 0, "free": 0}


def count_calls(patch: Callable[[object, str, object], object]) -> Counter[str]:
    """Count, from now on, the driver calls that make, map or import memory."""
    calls, call = Counter[str](), driver.call

    def counted(name: str, *args: object) -> object:
        calls[name] += 1
        return call(name, *args)

    patch(driver_memory, "call", counted)
    return calls


async def counter(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Count the driver calls for memory, and the events, that come after the tenth batch."""
    calls = count_calls(setattr)
    rounds, live, made = 0, 0, 0
    async for batch in consumer:
        for owner in batch:
            owner["x"].sum()
            owner.release()
            rounds += 1
        if rounds == 10:
            live, made = events.budget.live, calls.total()
    return {"rounds": rounds, "calls": calls.total() - made, "events": events.budget.live - live}


async def writer(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Write into a read-only view: this context must end, and nobody else's."""
    owner = (await consumer.receive())[0]
    try:
        owner["x"].fill_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        say({"faulted": 1})
        os._exit(0)
    return {"faulted": 0}


async def redeemer(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Reconstruct the tickets that streamed owners bring, each behind a long kernel."""
    side = torch.cuda.Stream(device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    rounds = buffers = 0
    async for batch in consumer:
        for carrier in batch:
            tickets = [pickle.loads(data) for data in carrier.metadata]  # type: ignore[attr-defined]  # a list
            turn = int(carrier.key) % 251
            carrier.release()
            with torch.cuda.stream(side):
                torch.cuda._sleep(LONGER)
            found = [await consumer.reconstruct(ticket, stream=side) for ticket in tickets]
            with torch.cuda.stream(side):
                for tensor in found:
                    wrong += torch.ne(tensor, turn).sum() + (tensor.device != device)
            rounds += 1
            buffers += len({tensor.untyped_storage().data_ptr() for tensor in found})
            del found
    torch.cuda.synchronize(device)
    return {"rounds": rounds, "wrong": int(wrong), "buffers": buffers}


async def restorer(consumer: asyncvmm.Consumer, device: torch.device) -> dict[str, int]:
    """Restore the requests that streamed owners bring; count tensors on this device."""
    right = 0
    async for batch in consumer:
        for carrier in batch:
            requests = pickle.loads(carrier.metadata)  # type: ignore[arg-type]  # bytes
            carrier.release()
            await restore_features(consumer, requests)
            for number, request in enumerate(requests):
                tensor = request.items[0].feature
                right += tensor.device == device and bool((tensor == number).all())
    return {"right": right}


ROLES: dict[str, Callable[[asyncvmm.Consumer, torch.device], Awaitable[dict[str, int]]]] = {
    role.__name__: role
    for role in (
        late_reader,
        prompt_reader,
        batch_reader,
        comparer,
        counter,
        holder,
        keeper,
        writer,
        redeemer,
        restorer,
    )
}


async def main(role: str, name: str, device: str, rank: int) -> None:
    """Run one role."""
    chosen = torch.device(device)
    torch.cuda.set_device(chosen)
    async with asyncvmm.connect(name, rank=rank, device=device, wait=True) as consumer:
        say(await ROLES[role](consumer, chosen))


if __name__ == "__main__":
    if os.environ.get("ASYNCVMM_TEST_BREAK") == "wait_ready":
        CudaConsumerRegion.wait_ready = lambda self, slot, stream: None  # type: ignore[method-assign]  # the control
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
