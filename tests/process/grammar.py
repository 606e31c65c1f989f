"""Packets nobody should send: nearly right, half right, and rubbish.

Everything is drawn from one ``random.Random``, so a seed repeats a run and hypothesis, which has
a Random of its own, shrinks what fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from asyncvmm._core import wire
from asyncvmm._core.layout import DTYPES, chunk_bytes
from tests.process.raw import PAGE

Side: TypeAlias = Literal["consumer", "exporter"]
Draw: TypeAlias = Callable[[random.Random], Any]

NUMBERS = [
    0, 1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 255, 256, 257, 512, 1023, 1024, 1025, 4096, 8192, 65535,
    65536, 2**31, 2**32 - 1, 2**53, 2**62 - 256, 2**62 - 1, 2**62, 2**62 + 1, 2**63 - 1, 2**64 - 1,
    -1, -256, -(2**31), -(2**63),
]  # fmt: skip
TEXTS = [
    "",
    "x",
    "host",
    "cuda",
    "any",
    "uint8",
    "int64",
    "memfd",
    "*",
    "\x00",
    "x" * 1024,
    "é" * 2000,
]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Return any plain value."""
    kind = chance.randrange(9 if depth < 3 else 7)
    if kind < 3:
        return chance.choice(NUMBERS)
    if kind == 3:
        return chance.choice(TEXTS)
    if kind == 4:
        return chance.randbytes(chance.choice([0, 1, 16, 64, 65, 1025]))
    if kind == 5:
        return chance.choice([None, True, False, 1.5, float("nan"), float("inf")])
    if kind == 6:
        return msgspec.msgpack.Ext(chance.randrange(-5, 5), chance.randbytes(12))
    if kind == 7:
        return [value(chance, depth + 1) for _ in range(chance.randrange(5))]
    return {chance.choice(TEXTS): value(chance, depth + 1) for _ in range(chance.randrange(3))}


def one_of(*choices: Any) -> Draw:
    return lambda chance: chance.choice(choices)


slot = one_of(0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4)
generation = one_of(*range(1, 20))
natural = one_of(*[n for n in NUMBERS if n >= 0])


def octets(limit: int) -> Draw:
    return lambda chance: chance.randbytes(chance.choice([0, 0, 0, 1, limit, limit + 1]))


def feature(chance: random.Random) -> list[Any]:
    lengths = [0, 1, 1, 1, 2, 2, 3, 3, 5, 5, 16, 64, 100, 100, 1000, 2**62]
    shape = [chance.choice(lengths) for _ in range(chance.choice([0, 1, 1, 1, 2, 3]))]
    dtype = chance.choice(list(DTYPES)) if chance.random() < 0.97 else "float80"
    return [chance.choice("abcdefgh"), dtype, shape]


def owner(chance: random.Random) -> list[Any]:
    features = [feature(chance) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
    sizes = []
    for _, dtype, shape in features:
        size = DTYPES.get(dtype, 1)
        for length in shape:
            size *= length
        sizes.append(size)
    nbytes = chunk_bytes(sizes) if chance.random() < 0.9 else chance.choice(NUMBERS)
    start = chance.choice([0, 0, 256, 512, 1024, 3 * PAGE, 3 * PAGE, PAGE - 256, PAGE, 2 * PAGE])
    if nbytes >= 2**64:
        nbytes = 256
    key = chance.choice(["k", 1])
    return [slot(chance), generation(chance), start, nbytes, key, features, octets(40)(chance)]


def segment(chance: random.Random) -> list[Any]:
    return [chance.randrange(4), PAGE * chance.randrange(-1, 5), PAGE * chance.randrange(-1, 3)]


def region(chance: random.Random) -> list[Any]:
    kind, handle = chance.choice([("host", "memfd"), ("cuda", "posix"), ("cuda", "fabric")])
    return [kind, PAGE * chance.choice([0, 1, 4, 1 << 40]), PAGE, slot(chance), False, handle, ""]


def owners(chance: random.Random) -> list[Any]:
    return [owner(chance) for _ in range(chance.choice([0, 1, 1, 1, 2]))]


def held(chance: random.Random) -> list[Any]:
    count = chance.choice([0, 1, 2, 4, 4, 1025 if chance.random() < 0.1 else 5])
    return [[slot(chance), generation(chance)] for _ in range(count)]


MESSAGES: dict[Side, dict[int, list[Draw]]] = {
    "consumer": {
        1: [one_of(0, 1, 1, 1, 2, None), one_of(None, "x"), one_of("host", "any", "cuda"),
            one_of(False, True), one_of(1, 2, 65536, 0), octets(1024)],
        8: [slot, generation],
        9: [slot, generation, octets(64), one_of(0, 0, 1, 65535, 65536)],
        10: [slot, generation, one_of(*TEXTS)],
        11: [natural, one_of(*TEXTS)],
        12: [],
        13: [slot, generation, octets(16)],
        14: [slot, generation, octets(16), natural, natural],
        15: [slot, generation],
        22: [octets(16), one_of(0, 1, 2, 3, 1 << 62), octets(1024)],
        20: [octets(1024)],
    },
    "exporter": {
        2: [octets(16), natural, one_of(0, 1, 2), region, one_of(0, 1, 2, 1 << 62), one_of(False)],
        3: [one_of("rank", "version", "x"), one_of(*TEXTS), lambda c: [value(c) for _ in range(3)]],
        4: [segment, octets(64)],
        5: [one_of(0, 1, 2)],
        6: [slot, octets(64)],
        7: [owners],
        11: [natural, one_of(*TEXTS)],
        16: [slot, generation, one_of(*TEXTS)],
        17: [owner],
        23: [held],
        21: [octets(16), one_of(*TEXTS), natural, natural, one_of(*TEXTS), value, one_of(*TEXTS),
             value, natural, value, natural],
    },
}  # fmt: skip


USUAL: dict[Side, list[int]] = {"consumer": [8, 9, 9, 9, 10], "exporter": [5, 6, 7, 7, 7, 7]}


def message(chance: random.Random, side: Side) -> list[Any]:
    """Return one message, each field of which is wrong now and then."""
    tag = chance.choice(USUAL[side] if chance.random() < 0.9 else list(MESSAGES[side]))
    fields = [draw(chance) for draw in MESSAGES[side][tag]]
    for at in range(len(fields)):
        if chance.random() < 0.02:
            fields[at] = value(chance)
    if chance.random() < 0.03:
        fields = fields[: chance.randrange(len(fields) + 1)]
    return [tag, *fields]


def packet(chance: random.Random, side: Side) -> bytes:
    """Return one packet."""
    kind = chance.random()
    if kind < 0.03:
        return chance.randbytes(chance.choice([1, 2, 10, 300])) or b"\0"
    count = chance.choice([1, 1, 1, 1, 2, 3, 16])
    messages = [message(chance, side) for _ in range(count)]
    greeting = chance.random() < 0.03
    data = msgspec.msgpack.encode(messages[0] if greeting else messages)
    if greeting:
        version = wire.VERSION if chance.random() < 0.8 else chance.randrange(65536)
        data = wire._HEADER.pack(wire.MAGIC, version) + data
    return mutated(chance, data) if kind > 0.95 else data[:200_000]


def answer(chance: random.Random) -> list[tuple[bytes, int]]:
    """Return packets, each with its number of descriptors, to a consumer that comes back."""
    kind = chance.random()
    tag = 23 if kind < 0.7 else 3 if kind < 0.9 else chance.choice(list(MESSAGES["exporter"]))
    first = [tag, *(draw(chance) for draw in MESSAGES["exporter"][tag])]
    data = wire._HEADER.pack(wire.MAGIC, wire.VERSION) + msgspec.msgpack.encode(first)
    others = [(packet(chance, "exporter"), chance.choice([0, 0, 0, 1])) for _ in range(3)]
    return [(mutated(chance, data) if kind < 0.1 else data, 0), *others[: chance.randrange(4)]]


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Return a packet with one thing done to its bytes."""
    at = chance.randrange(len(data))
    change = chance.randrange(5)
    if change == 0:
        return data[:at] or b"\0"
    if change == 1:
        return data[:at] + chance.randbytes(1) + data[at + 1 :]
    if change == 2:
        return data + data[at:]
    if change == 3:
        lengths = [b"\xdd", b"\xdf", b"\xdb", b"\xc6"]
        return data[:at] + chance.choice(lengths) + b"\xff\xff\xff\xff" + data[at:]
    return data[:at] + b"\x91" * chance.choice([10, 1000]) + data[at:]
