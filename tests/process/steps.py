"""What other processes can be told to do.  A step takes plain data and returns plain data."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import random
import resource
import signal
import socket
import sys
import time
from typing import Any

import torch

import asyncvmm
from asyncvmm._core import wire
from asyncvmm._types import Route
from asyncvmm.cli.observing import Watch
from tests.patience import PROMPTLY
from tests.process.harness import until
from tests.process.patterns import features, note, wrong
from tests.process.ports import PausingPort, UnmappablePort
from tests.process.puppet import PR_SET_PDEATHSIG, Me
from tests.process.raw import RawConsumer
from tests.process.sessions import Plan, accept, attack_consumer, attack_exporter

PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

# -- an exporter -----------------------------------------------------------------------------


async def open_exporter(
    me: Me,
    name: str,
    ranks: int = 0,
    options: dict[str, Any] | None = None,
    points: list[str] | None = None,
) -> None:
    """Open an exporter: Broadcast to ``ranks``, or Compete for 0; stand still at ``points``."""
    route: Route = asyncvmm.Broadcast(ranks) if ranks else asyncvmm.Compete()
    settings = {"pool_bytes": "1MiB", "slots": 8, "device": "cpu", **(options or {})}
    if points:
        settings["_port"] = PausingPort(me.block, points)
    me.exporter = await me.exits.enter_async_context(
        asyncvmm.open_exporter(name, route=route, **settings)
    )


async def send(
    me: Me, owners: list[int], generation: int = 0, nbytes: int = 1000, wait: bool = False
) -> None:
    """Send owners, ``wait`` for each acknowledgement; return once they are on the socket."""
    for owner in owners:
        ack = await me.exporter.send(
            features(owner, generation, nbytes), key=owner, metadata=note(owner, generation, nbytes)
        )
        me.acks.append(ack)
        if wait:
            await ack
    await asyncio.sleep(0)  # those of one turn travel together
    await asyncio.sleep(0)


# -- a consumer ------------------------------------------------------------------------------


async def connect(
    me: Me,
    name: str,
    rank: int | None = None,
    options: dict[str, Any] | None = None,
    points: list[str] | None = None,
    unmappable: list[int] | None = None,
) -> None:
    """Connect; stand still at ``points``; fail to map the ``unmappable`` segments."""
    settings = {"device": "cpu", "wait": True, **(options or {})}
    if points:
        settings["_port"] = PausingPort(me.block, points)
    if unmappable:
        settings["_port"] = UnmappablePort(unmappable)
    me.consumer = await me.exits.enter_async_context(asyncvmm.connect(name, rank=rank, **settings))


async def take(me: Me, count: int) -> list[int]:
    """Receive that many batches, check them, keep them; return the keys."""
    keys: list[int] = []
    for _ in range(count):
        batch = await me.consumer.receive()
        for owner in batch:
            if problem := wrong(owner):
                raise AssertionError(problem)
            assert isinstance(owner.key, int)
            keys.append(owner.key)
        me.batches.append(batch)
    return keys


async def look_again(me: Me) -> None:
    """Check what is kept."""
    for batch in me.batches:
        for owner in batch:
            if not owner.released and (problem := wrong(owner)):
                raise AssertionError(problem)


async def give_back(me: Me, count: int = -1) -> None:
    """Release the oldest batches that were kept, all of them for -1; return once it is said."""
    for _ in range(len(me.batches) if count < 0 else count):
        me.batches.pop(0).release()
    for _ in range(3):  # releases of one turn travel together, and may linger for another
        await asyncio.sleep(0)


async def give_back_and_die(me: Me) -> None:
    """Release everything, each in a packet of its own, and die before anybody can answer."""
    while me.batches:
        await give_back(me, 1)
    os.kill(os.getpid(), signal.SIGKILL)


async def give_back_and_close_socket(me: Me, count: int) -> None:
    """Stand still, then release some, put that on the socket, and close it with more to read."""
    me.block("before")
    for _ in range(count):
        me.batches.pop(0).release()
        me.consumer._link.flush()
    await close_socket(me)


async def take_and_die(me: Me) -> None:
    """Receive a batch and die in the same turn of the loop, as a crash in the work on it would."""
    await me.consumer.receive()
    os.kill(os.getpid(), signal.SIGKILL)


async def receive_forever(me: Me) -> int:
    """Receive, check and release until the stream ends; return how many owners there were."""
    count = 0
    async for batch in me.consumer:
        for owner in batch:
            if problem := wrong(owner):
                raise AssertionError(problem)
            count += 1
        batch.release()
        me.tell("received", count=count)
    return count


async def leave(me: Me) -> None:
    """Leave whatever this process has opened."""
    await me.exits.aclose()


# -- ways to let go without reading -------------------------------------------------------------


async def raise_in_its_block(me: Me, count: int) -> None:
    """Enter each batch's block and raise before a view is asked for."""
    for _ in range(count):
        try:
            async with await me.consumer.receive():
                raise LookupError("before mapping")
        except LookupError:
            pass


async def raise_without_a_block(me: Me, count: int) -> None:
    """Have a function fail that holds the batch and has looked at nothing of it."""

    async def work() -> None:
        batch = await me.consumer.receive()
        raise LookupError(len(batch))

    for _ in range(count):
        with contextlib.suppress(LookupError):
            await work()


async def drop(me: Me, count: int) -> None:
    """Receive and forget."""
    for _ in range(count):
        await me.consumer.receive()
    await asyncio.sleep(0)


async def be_cancelled(me: Me, count: int) -> None:
    """Be cancelled between the receipt of each batch and the first look at it."""

    async def work() -> None:
        batch = await me.consumer.receive()
        await asyncio.sleep(60)
        batch[0]["bytes"]

    for _ in range(count):
        await until(lambda: me.consumer.statistics().held == 0)
        task = asyncio.create_task(work())
        await until(lambda: me.consumer.statistics().held == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        del task
    await asyncio.sleep(0)


async def leave_early(me: Me, count: int) -> None:
    """Leave once so many batches are there, with none of them received."""
    await until(lambda: me.consumer.statistics().unread == count)
    await me.exits.aclose()


# -- traffic while others are killed -----------------------------------------------------------


async def produce(
    me: Me, generation: int, seed: int, largest: int, ranks: int, wild: bool = False
) -> None:
    """Send owners of random sizes until told to stop; tell of every tenth.

    ``wild`` also cancels, reserves, gives up, does not wait, and sends to some of the ``ranks``.
    """
    stop = me.kept["stop"] = asyncio.Event()
    stopped = me.kept["stopped"] = asyncio.Event()
    chance = random.Random(seed)
    sent = 0
    while not stop.is_set():
        nbytes = chance.randrange(largest)
        if wild and chance.random() < 0.3:
            ways = [*WILD, send_to_some] if ranks else WILD
            await chance.choice(ways)(me, sent, generation, nbytes, chance)
        else:
            await send(me, [sent], generation, nbytes)
        me.acks = [ack for ack in me.acks if not ack.done()]
        sent += 1
        if sent % 10 == 0:
            me.tell("progress")
    stopped.set()


async def cancel_a_send(
    me: Me, owner: int, generation: int, nbytes: int, chance: random.Random
) -> None:
    """Begin to send and think better of it, too late or not."""
    task = asyncio.create_task(send(me, [owner], generation, nbytes))
    for _ in range(chance.randrange(6)):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def reserve_and_publish(
    me: Me, owner: int, generation: int, nbytes: int, chance: random.Random
) -> None:
    """Write in place; abandon it now and then."""
    data = features(owner, generation, nbytes)
    specs = {name: asyncvmm.TensorSpec(tuple(t.shape), t.dtype) for name, t in data.items()}
    terms: Any = {"key": owner, "metadata": note(owner, generation, nbytes)}
    async with me.exporter.reserve(specs, **terms) as chunk:
        for name in chunk:
            chunk[name].copy_(data[name])
        await asyncio.sleep(0)
        if chance.random() < 0.7:
            me.acks.append(chunk.publish())


async def send_without_waiting(
    me: Me, owner: int, generation: int, nbytes: int, chance: random.Random
) -> None:
    """Send if there is room."""
    data = features(owner, generation, nbytes)
    with contextlib.suppress(asyncvmm.WouldBlock):
        me.acks.append(
            await me.exporter.send_nowait(data, key=owner, metadata=note(owner, generation, nbytes))
        )


async def send_to_some(
    me: Me, owner: int, generation: int, nbytes: int, chance: random.Random
) -> None:
    """Narrow the route: to one rank, or to a group."""
    to: Any = chance.choice([0, 1, asyncvmm.Group(0, 1), asyncvmm.Group(1)])
    data = features(owner, generation, nbytes)
    me.acks.append(
        await me.exporter.send(data, key=owner, metadata=note(owner, generation, nbytes), to=to)
    )


async def send_several(
    me: Me, owner: int, generation: int, nbytes: int, chance: random.Random
) -> None:
    """Send a batch of owners of all sizes, and think better of it now and then."""
    # Each consumer may keep one batch while it waits for the next.
    count = chance.randrange(me.exporter.statistics().slots.total // 3) + 1
    sizes = [nbytes // chance.randrange(count, 99) for _ in range(count)]
    several = asyncio.create_task(
        me.exporter.send_all(
            [features(owner, generation, size) for size in sizes],
            keys=[owner] * count,
            metadata=[note(owner, generation, size) for size in sizes],
        )
    )
    if chance.random() < 0.3:
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        several.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        me.acks += await several


WILD = [cancel_a_send, reserve_and_publish, send_without_waiting, send_several]


async def finish(me: Me, shrinks: bool = False) -> dict[str, int]:
    """Stop producing, wait until everything is back; return what is free, and what it did.

    A pool that ``shrinks`` is waited for until it is as small as in the beginning.
    """
    me.kept["stop"].set()
    await me.kept["stopped"].wait()
    await me.exporter.drain()
    if shrinks:
        await until(lambda: (s := me.exporter.statistics()).segments == 1 and s.grown == s.shrunk)
    found = me.exporter.statistics()
    return {
        "slots": found.slots.total,
        "free slots": found.slots.free,
        "bytes": found.pool_bytes,
        "free bytes": found.free_bytes,
        "owners": found.published,
        "refused": found.refused,
        "lost": found.lost,
        "waits": found.waits,
        "grown": found.grown,
        "shrunk": found.shrunk,
    }


async def consume(me: Me, generation: int, seed: int) -> str:
    """Receive, check, keep a few at random, until the stream ends; return how it ended."""
    chance = random.Random(seed)
    count = 0
    try:
        while True:
            batch = await me.consumer.receive()
            for owner in batch:
                note: Any = owner.metadata
                if note["generation"] != generation:
                    raise AssertionError(f"{owner!r} is of generation {note['generation']}")
                if problem := wrong(owner):
                    raise AssertionError(problem)
            if chance.random() < 0.2:
                chance.choice(batch.owners).release()  # and the rest of it later
            me.batches.append(batch)
            del batch, owner
            while me.batches and chance.random() < 0.7:
                me.batches.pop(chance.randrange(len(me.batches))).release()
            if len(me.batches) > me.kept.get("most", 1):
                me.batches.pop(0).release()
            count += 1
            if count % 10 == 0:
                me.tell("progress")
    except asyncvmm.EndOfStream:
        ended = "end"
    except asyncvmm.PeerLostError:
        ended = "lost"
    except asyncvmm.ClosedError:
        me.batches.clear()
        return "left"
    await look_again(me)
    await give_back(me)
    await me.exits.aclose()
    return ended


async def consume_on(me: Me, seed: int) -> str:
    """Do as :func:`consume` with one exporter after another; tell of each that is lost."""
    chance = random.Random(seed)
    newest = gone = 0
    while True:
        try:
            batch = await me.consumer.receive()
        except asyncvmm.PeerLostError:
            await look_again(me)
            gone = newest
            me.tell("lost")
            continue
        except asyncvmm.ClosedError:
            me.batches.clear()
            return "left"
        for owner in batch:
            note: Any = owner.metadata
            if note["generation"] < newest or note["generation"] == gone:
                raise AssertionError(f"{owner!r} is of generation {note['generation']}")
            newest = note["generation"]
            if problem := wrong(owner):
                raise AssertionError(problem)
        me.batches.append(batch)
        del batch, owner
        while len(me.batches) > me.kept.get("most", 1) or (me.batches and chance.random() < 0.5):
            me.batches.pop(0).release()


async def has_come(me: Me, pid: int) -> None:
    """Return once a process has attached to this exporter."""
    await until(
        lambda: any(c.pid == pid and c.state == "open" for c in me.exporter.statistics().consumers)
    )


async def keep_at_most(me: Me, count: int) -> None:
    """Have :func:`consume` keep so many batches from now on, and give back what is kept."""
    me.kept["most"] = count
    await give_back(me)


async def free_of(me: Me, pid: int) -> float:
    """Return how long it took until that process owes nothing."""
    began = time.monotonic()
    await until(lambda: all(c.pid != pid for c in me.exporter.statistics().consumers))
    return time.monotonic() - began


# -- children of children ----------------------------------------------------------------------


async def fork(me: Me, hooks: bool) -> int:
    """Leave a child behind that does nothing; without hooks it keeps every socket of ours."""
    libc = ctypes.CDLL(None)
    pid = os.fork() if hooks else int(libc.fork())
    if pid == 0:
        libc.alarm(30)
        while True:
            libc.pause()
    return pid


# -- limits and users --------------------------------------------------------------------------


async def use_up_descriptors(me: Me, left: int) -> int:
    """Open files until ``left`` more may be opened; return the limit."""
    limit = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    files: list[int] = []
    me.kept["files"] = files
    while True:
        try:
            files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    for _ in range(left):
        os.close(files.pop())
    return limit


async def give_descriptors_back(me: Me) -> None:
    """Undo :func:`use_up_descriptors`."""
    for number in me.kept.pop("files"):
        os.close(number)


async def become_effectively(me: Me, uid: int) -> None:
    """Run as another user, as a program that changes users for its work does."""
    os.seteuid(uid)


async def become(me: Me, uid: int, gid: int) -> None:
    """Be another user from now on."""
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


async def eavesdrop(me: Me, address: str) -> None:
    """Listen under a name as an exporter would, and answer nobody."""
    ear = me.kept["ear"] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ear.bind(address)
    if not address.startswith("\0"):
        os.chmod(address, 0o666)
    ear.listen()


async def heard(me: Me, callers: int) -> list[bytes]:
    """Return the first word of each of so many that came and hung up; empty for none."""
    words = []
    for _ in range(callers):
        caller = me.kept["ear"].accept()[0]
        with caller:
            words.append(caller.recv(1 << 16))
    me.kept["ear"].close()
    return words


async def set_umask(me: Me, mask: int) -> None:
    """Have files made with fewer rights."""
    os.umask(mask)


async def confine(me: Me, uid: int, gid: int) -> None:
    """Be another user without a capability, whom nobody may trace."""
    await become(me, uid, gid)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # becoming another user cleared it


async def consumers(me: Me) -> list[list[Any]]:
    """Return member, pid and state of the exporter's consumers."""
    return [[c.member, c.pid, c.state] for c in me.exporter.statistics().consumers]


async def close_socket(me: Me) -> None:
    """Close the consumer's socket behind its back, as a careless library might."""
    os.close(me.consumer._link._fd)


async def break_link(me: Me) -> None:
    """Have the consumer's connection end, as a fault of the kernel's or of ours might end it."""
    me.consumer._link._sock.shutdown(socket.SHUT_RDWR)
    await until(lambda: me.consumer.statistics().losses == 1)


async def break_link_of_current(me: Me) -> None:
    """Do the same to a consumer that reconnects, and have it told of the loss."""
    consumer: Any = me.consumer
    consumer._current._link._sock.shutdown(socket.SHUT_RDWR)
    await until(lambda: me.consumer.statistics().losses == 1)
    with contextlib.suppress(asyncvmm.PeerLostError):
        consumer.receive_nowait()


async def identity(me: Me) -> bytes:
    """Return what the exporter's consumers know it by."""
    return me.exporter._connections.handshake.identity


async def claim(me: Me, address: str, identity: bytes, peer: int, secret: str = "") -> str:
    """Claim to be a consumer whose link broke; return why that is not believed."""
    with RawConsumer.to(address) as raw:
        await raw.send(wire.encode_greeting(wire.Resume(identity, peer, secret.encode())))
        packet = await raw.packet()
        assert packet is not None
        answer = wire.decode_greeting(packet)
        return answer.reason if isinstance(answer, wire.Rejected) else ""


async def statistics(me: Me) -> dict[str, int]:
    """Return the numbers of this process's consumer."""
    state = me.consumer.statistics()
    return {"held": state.held, "viewed": state.viewed, "unread": state.unread}


# -- fuzz --------------------------------------------------------------------------------------


async def feed(me: Me, rank: int) -> int:
    """Send to one rank, one owner at a time, until told to stop; return how many."""
    stop = me.kept.setdefault("stop", asyncio.Event())
    sent = 0
    while not stop.is_set():
        nbytes = 100 + sent % 1000
        data = features(sent, rank, nbytes)
        ack = await me.exporter.send(
            data, key=sent, metadata=note(sent, rank, nbytes), to=rank, require="none"
        )
        waiting = asyncio.ensure_future(_settled(ack))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        stopping.cancel()
        sent += 1
    return sent


async def _settled(ack: asyncvmm.Acknowledgement) -> None:
    await ack


async def stop(me: Me) -> None:
    """Have :func:`feed` and :func:`produce` end."""
    me.kept["stop"].set()


async def serve(me: Me) -> int:
    """Receive, check and release until the stream ends; return how many owners there were."""
    count = 0
    async for batch in me.consumer:
        with batch:
            for owner in batch:
                if problem := wrong(owner):
                    raise AssertionError(problem)
                count += 1
    return count


async def attack(me: Me, address: str, seed: int, connections: int) -> int:
    """Come as a consumer so many times; return the packets sent."""
    chance = random.Random(seed)
    plans = (Plan.of(chance, "consumer") for _ in range(connections))
    return sum(attack_exporter(address, plan) for plan in plans)


async def pose(me: Me, address: str, seed: int, connections: int) -> int:
    """Be the exporter of so many consumers; return the packets sent."""
    chance = random.Random(seed)
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(PROMPTLY)
        listener.bind(address)
        listener.listen()
        for _ in range(connections):
            sent += attack_consumer(accept(listener, chance), Plan.of(chance, "exporter"))
        listener.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            accept(listener, chance).close()  # the last ones may come back, too
    os.unlink(address)
    return sent


async def suffer(me: Me, address: str, connections: int) -> dict[str, int]:
    """Connect so many times, read all that comes; return how often it ended in which way."""
    ends: dict[str, int] = {"owners": 0}
    for _ in range(connections):
        try:
            async with (
                asyncio.timeout(PROMPTLY),
                asyncvmm.connect(address, rank=0, wait=True) as consumer,
            ):
                async for batch in consumer:
                    with batch:
                        for owner in batch:
                            owner.clone()  # every byte that was let through is there
                            ends["owners"] += 1
        except asyncvmm.AsyncVMMError as error:
            end = type(error).__name__
        else:
            end = "end"
        ends[end] = ends.get(end, 0) + 1
    return ends


# -- a long steady stream ----------------------------------------------------------------------

SMALL = 64
"""How many different small owners there are; their patterns are made once."""


def _small() -> list[dict[str, Any]]:
    return [features(owner, 0, 200) for owner in range(SMALL)]


async def stream(me: Me, count: int) -> list[float]:
    """Send so many small owners, many in flight; return how long some of them took, in seconds."""
    data = me.kept.setdefault("data", _small())
    number: int = me.kept.get("number", 0)
    took: list[float] = []

    async def timed(ack: asyncvmm.Acknowledgement, began: float) -> None:
        await ack
        took.append(time.perf_counter() - began)

    timing: set[asyncio.Task[None]] = set()
    for at in range(number, number + count):
        began = time.perf_counter()
        ack = await me.exporter.send(data[at % SMALL], key=at)
        if at % 97 == 0:
            task = asyncio.create_task(timed(ack, began))
            timing.add(task)
            task.add_done_callback(timing.discard)
    me.kept["number"] = number + count
    await me.exporter.drain()
    await asyncio.gather(*timing)
    return took


async def stream_alone(me: Me, count: int) -> list[float]:
    """Send so many, each once the one before is back; return how long each took, in seconds."""
    data = me.kept.setdefault("data", _small())
    number: int = me.kept.get("number", 0)
    took: list[float] = []
    for at in range(number, number + count):
        began = time.perf_counter()
        await (await me.exporter.send(data[at % SMALL], key=at))
        took.append(time.perf_counter() - began)
    me.kept["number"] = number + count
    return took


async def blocks(me: Me) -> int:
    """Return how many blocks of memory the interpreter has in use, garbage not counted."""
    gc.collect()
    return sys.getallocatedblocks()


async def read_stream(me: Me) -> int:
    """Receive what :func:`stream` sends, in order, and look into some; return how many."""
    data = _small()
    at = 0
    async for batch in me.consumer:
        for owner in batch:
            if owner.key != at:
                raise AssertionError(f"{owner!r} came where {at} was to come")
            if at % 31 == 0 and not torch.equal(owner["words"], data[at % SMALL]["words"]):
                raise AssertionError(f"{owner!r} has wrong bytes")
            at += 1
        batch.release()
    return at


# -- observers ---------------------------------------------------------------------------------


async def observe(me: Me, name: str, stay: bool = False) -> str:
    """Look at an exporter; return its name, or why it refuses; ``stay`` connected if told so."""
    watch = Watch([name])
    try:
        (observer,) = watch.look(PROMPTLY)
    except asyncvmm.HandshakeError as error:
        return error.reason
    if stay:
        me.kept["watch"] = watch
    else:
        watch.close()
    assert observer.now is not None
    return observer.now.name
