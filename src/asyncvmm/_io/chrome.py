"""Timelines as files, in the JSON trace format that Perfetto and Chrome's viewer open.

Each slot is a track.  On it an owner's life is a slice, and its phases are slices inside that one.
Those who waited for room have tracks of their own.

Each process writes its own part.  Times are CLOCK_MONOTONIC, which all processes of a host share,
and the arrows between parts have ids that both ends compute alike, so :func:`join` has nothing to
match: it renumbers the tracks and puts the parts together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from time import monotonic_ns
from typing import Any, TypeAlias

import msgspec

from asyncvmm._errors import ArgumentError
from asyncvmm._io.timeline import Life, Timeline

logger = logging.getLogger("asyncvmm.timeline")

WAITING = 5000
"""Tracks from here on are of those who wait; slots are below, for there are at most 1,024."""

TRACKS = 10_000
"""How far apart a joined trace puts the tracks of two processes."""

Event: TypeAlias = dict[str, Any]


def write(timeline: Timeline) -> None:
    """Write a timeline to its file, all or nothing; blocks, so call it in a thread.

    A disk that is full must not hide how the program ended: it is logged, not raised.  A forked
    child writes nothing: the file is its parent's.
    """
    if timeline.made_in != os.getpid():
        return
    try:
        _replace(timeline.path, _events(timeline), [_about(timeline)])
    except OSError as error:
        logger.error("the trace %s could not be written: %s", timeline.path, error)
    finally:
        timeline.release()


def _replace(path: Path, events: Iterable[Event], about: list[Event]) -> int:
    """Write a file, all or nothing; what is no regular file (a pipe, a device) is written into."""
    if path.exists() and not path.is_file():
        return _put(path, events, about)
    path = path.resolve()  # a link stays a link
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        count = _put(part, events, about)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def _put(path: Path, events: Iterable[Event], about: list[Event]) -> int:
    """Write event by event: neither all of it in memory, nor the interpreter held long."""
    count = 0
    with open(path, "wb") as file:
        file.write(b'{"displayTimeUnit":"ns","otherData":')
        file.write(msgspec.json.encode({"asyncvmm": about}))
        file.write(b',"traceEvents":[')
        for event in events:
            file.write(b",\n" if count else b"\n")
            file.write(msgspec.json.encode(event))
            count += 1
        file.write(b"\n]}\n")
    return count


def _events(timeline: Timeline) -> Iterator[Event]:
    process = timeline.made_in
    now = monotonic_ns()
    slots = set[int]()
    yield _name("process_name", process, 0, f"{timeline.title}, pid {process}")
    for life in (*timeline.lives, *timeline.open.values()):
        slots.add(life.slot)
        yield from _slices(life, process, now)
        for arrow in life.arrows:
            yield _arrow(life, process, timeline.identity, arrow)
    for slot in sorted(slots):
        yield _name("thread_name", process, slot, f"slot {slot}")
    lanes = _lanes(timeline.waits)
    for (began, ended, nbytes), lane in zip(timeline.waits, lanes, strict=True):
        yield _slice("wait", process, WAITING + lane, began, ended, {"bytes": nbytes})
    for lane in sorted(set(lanes)):
        yield _name("thread_name", process, WAITING + lane, f"waits for room {lane}")


def _about(timeline: Timeline) -> Event:
    return {
        "title": timeline.title,
        "pid": timeline.made_in,
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        "lives": timeline.ended,
        "unfinished": len(timeline.open),
        "dropped_lives": timeline.ended - len(timeline.lives),
        "waits": timeline.waited,
        "dropped_waits": timeline.waited - len(timeline.waits),
    }


def _name(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _slice(name: str, process: int, track: int, began: int, over: int, facts: Event) -> Event:
    """Return a slice; the format counts in microseconds, and takes fractions."""
    return {
        "ph": "X",
        "name": name,
        "cat": "asyncvmm",
        "pid": process,
        "tid": track,
        "ts": began / 1000,
        "dur": (over - began) / 1000,
        "args": facts,
    }


def _slices(life: Life, process: int, now: int) -> list[Event]:
    over = life.over or now
    facts: Event = {"generation": life.generation, **life.facts}
    if not life.over:
        facts["unfinished"] = True
    whole = _slice(life.name or "unfinished", process, life.slot, life.phases[0][0], over, facts)
    ends = [*(at for at, _ in life.phases[1:]), over]
    return [
        whole,
        *(
            _slice(phase, process, life.slot, at, until, {})
            for (at, phase), until in zip(life.phases, ends, strict=True)
        ),
    ]


def _arrow(life: Life, process: int, identity: bytes, arrow: tuple[str, int, str]) -> Event:
    way, at, words = arrow
    name = f"{life.slot}/{life.generation}/{words}".encode()
    digest = blake2b(identity + name, digest_size=8).digest()
    event: Event = {
        "ph": "s" if way == "leaves" else "f",
        "name": "hand-off",
        "cat": "asyncvmm",
        "id": int.from_bytes(digest) >> 11,  # 53 bits: viewers in JavaScript read it as it is
        "pid": process,
        "tid": life.slot,
        "ts": at / 1000,
    }
    if way == "arrives":
        event["bp"] = "e"  # in the slice that is there, not in the next one to begin
    return event


def _lanes(waits: Iterable[tuple[int, int, int]]) -> list[int]:
    """Put waits that overlap on different tracks: the first that is free."""
    busy: list[int] = []  # until when, by lane
    found = {}
    for index, (began, ended, _) in sorted(enumerate(waits), key=lambda each: each[1]):
        lane = next((n for n, until in enumerate(busy) if until <= began), len(busy))
        busy[lane : lane + 1] = [ended]
        found[index] = lane
    return [found[index] for index in range(len(found))]


def join(parts: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> int:
    """Join the parts that the processes of one host wrote; return how many events there are.

    Raises ArgumentError that names a part which cannot be read, is no trace of this library, or
    is of another host or another start of it, where clocks differ; or says why ``out`` cannot be
    written.
    """
    events: list[Event] = []
    about: list[Event] = []
    numbers: dict[tuple[int, int], int] = {}  # (part, pid) -> pid in the joined trace
    for index, path in enumerate(parts):
        part = _read(Path(path))
        about += part["otherData"]["asyncvmm"]
        for event in part["traceEvents"]:
            number = numbers.setdefault((index, event["pid"]), len(numbers) + 1)
            track = number * TRACKS + event["tid"] % TRACKS
            events.append({**event, "pid": number, "tid": track})
    if len({each["boot"] for each in about}) > 1:
        raise ArgumentError(
            "the parts were written on different hosts, or before and after a restart; their "
            "clocks have nothing to do with each other, so look at them one by one"
        )
    try:
        return _replace(Path(out), events, about)
    except OSError as error:
        raise ArgumentError(
            f"the trace {str(out)!r} cannot be written: {error.strerror}; give another file"
        ) from None


def _read(path: Path) -> Event:
    try:
        part: Event = msgspec.json.decode(path.read_bytes())
        part["otherData"]["asyncvmm"], part["traceEvents"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"{str(path)!r} is no trace written by this library: {type(error).__name__}: {error}"
        ) from None
    return part
