"""What other processes are told to do with the facade."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from asyncvmm import ForkError, blocking
from tests.blocking.ends import number_of
from tests.process.puppet import Me

PR_SET_SECCOMP, SECCOMP_MODE_STRICT = 22, 1


async def poll_strictly(me: Me, name: str, polls: int, polite: bool) -> str:
    """Poll in a thread that may make no system call; return what it said in the end.

    In the kernel's strict mode any call but read, write and exit is the end of the thread that
    makes it.  One that is not ``polite`` makes one, to see that.
    """
    libc = ctypes.PyDLL(None)  # lets nobody else have the interpreter meanwhile
    reader, writer = os.pipe()

    def poll() -> None:
        found = 0
        answers = b"found nothing".ljust(1 << 20), b"found something".ljust(1 << 20)
        for _ in range(2):  # the first may ask the loop's thread; from then on it was asked
            consumer.poll()
        _until_alone()
        if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0):
            os.write(writer, b"the kernel has no strict mode")
            return
        for _ in range(polls):
            found += consumer.poll() is not None
        if not polite:
            os.getpid()
        # More than the pipe takes, so this thread never comes back from here: it could not even
        # wait for the interpreter.
        os.write(writer, answers[bool(found)])

    with (
        blocking.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter,
        blocking.connect(name, device="cpu", rank=0) as consumer,
    ):
        exporter.wait_attached(1)
        said = asyncio.Event()
        asyncio.get_running_loop().add_reader(reader, said.set)
        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        me.tell("polling", tid=thread.native_id)
        await said.wait()
        return os.read(reader, 100).decode().strip()


def _until_alone() -> None:
    """Return once every other thread sleeps in the kernel: to wait for one is a system call."""
    me, looks = threading.get_native_id(), 0
    while looks < 50:  # each of which would let a thread go on that waits for the interpreter
        others = set(os.listdir("/proc/self/task")) - {str(me)}
        states = [Path(f"/proc/self/task/{tid}/stat").read_text().split()[2] for tid in others]
        looks = looks + 1 if set(states) == {"S"} else 0
    sys.setswitchinterval(1000)


def scheduler(consumer: blocking.Consumer, count: int) -> list[int]:
    """Poll in every step until so many batches came, as a scheduler's loop does."""
    found: list[int] = []
    while len(found) < count:
        batch = consumer.poll()
        if batch is not None:
            found.append(number_of(batch))
    return found


async def open_and_leave_open(me: Me, name: str, *kinds: str) -> None:
    """Open ends and leave them open, with somebody waiting or not, for the process to end so."""
    kept: list[Any] = me.kept.setdefault("kept", [])
    for kind in kinds:
        if kind == "exporter":
            kept.append(blocking.open_exporter(name, device="cpu", pool_bytes="64KiB"))
            await asyncio.to_thread(kept[-1].__enter__)
        elif kind == "consumer":
            kept.append(blocking.connect(name, device="cpu", rank=0, wait=True))
            consumer = me.kept["consumer"] = await asyncio.to_thread(kept[-1].__enter__)
            assert isinstance(consumer, blocking.Consumer)
        elif kind == "held":
            kept.append(await asyncio.to_thread(me.kept["consumer"].receive))
            kept.append(kept[-1][0]["x"])
        elif kind in ("waiting", "polling"):
            # What it raises when the process ends would be printed.
            consumer = me.kept["consumer"]
            work = consumer.receive if kind == "waiting" else partial(_poll, consumer)
            threading.Thread(target=work, daemon=True).start()


def _poll(consumer: blocking.Consumer) -> None:
    while True:
        consumer.poll()
        time.sleep(0)  # others have to run, too


async def go_on_after_main(me: Me, name: str, count: int) -> None:
    """Have a thread, which the interpreter waits for, use both ends when main has ended."""
    main = threading.main_thread()
    opening = blocking.connect(name, device="cpu", rank=0, wait=True)
    consumer = await asyncio.to_thread(opening.__enter__)
    own = blocking.open_exporter(f"{name}-own", device="cpu", pool_bytes="64KiB")
    await asyncio.to_thread(own.__enter__)

    def work() -> None:
        main.join()
        assert scheduler(consumer, count) == list(range(count))
        own.__exit__(None, None, None)
        opening.__exit__(None, None, None)

    threading.Thread(target=work).start()


async def fork_with_all_open(me: Me, name: str) -> dict[str, str]:
    """Fork with everything open; return what every use of it raised in the child."""
    return await asyncio.to_thread(_fork, name)


def _fork(name: str) -> dict[str, str]:
    import warnings

    import msgspec

    from asyncvmm import TensorSpec
    from tests.blocking.ends import SECONDS, open_both, send

    reader, writer = os.pipe()
    with open_both(name) as (exporter, (consumer,)):
        first = send(exporter, 0)
        batch = consumer.receive(SECONDS)
        for _ in range(2):
            consumer.poll()
        reservation = exporter.reserve({"x": TensorSpec((4,), "float32")}, key=1)
        owner = reservation.__enter__()
        uses: dict[str, Any] = {
            "poll": consumer.poll,
            "receive": consumer.receive,
            "iterate": lambda: next(consumer),
            "statistics": consumer.statistics,
            "send": lambda: send(exporter, 1),
            "reserve": lambda: exporter.reserve({"x": TensorSpec((4,), "float32")}),
            "publish": owner.publish,
            "result": first.result,
            "drain": exporter.drain,
            "attached": lambda: exporter.wait_attached(1),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
            pid = os.fork()
        if pid == 0:
            said = {use: _raised(call) for use, call in uses.items()}
            consumer.close()
            exporter.close()
            reservation.__exit__(None, None, None)
            said["anew"] = _raised(lambda: _anew(f"{name}-anew"))
            os.write(writer, msgspec.msgpack.encode(said))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        found: dict[str, str] = msgspec.msgpack.decode(os.read(reader, 10_000))
        # The parent goes on as if nothing had been.
        owner["x"].fill_(1.0)
        owner.publish()
        reservation.__exit__(None, None, None)
        assert number_of(batch) == 0
        assert first.result(SECONDS).complete
        assert number_of(consumer.receive(SECONDS)) == 1
        exporter.drain(SECONDS)
        assert exporter.statistics().slots.free == 8
    return {**found, "status": str(status)}


def _raised(call: Any) -> str:
    try:
        return repr(call())
    except ForkError as error:
        right = (error.used_in, error.made_in) == (os.getpid(), os.getppid())
        return "ForkError" if right and "spawn" in str(error) else repr(error)
    except Exception as error:
        return repr(error)


def _anew(name: str) -> int:
    from tests.blocking.ends import SECONDS, open_both, send

    with open_both(name) as (exporter, (consumer,)):
        send(exporter, 5)
        return number_of(consumer.receive(SECONDS))
