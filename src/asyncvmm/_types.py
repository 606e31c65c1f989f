"""Frozen plain data that crosses layers.  No behaviour beyond checks and names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias, TypeGuard

import msgspec

from asyncvmm._errors import ArgumentError

Key: TypeAlias = str | int
"""The name a producer gives an owner: a request id, say."""

ALIGNMENT = 256
"""Bytes.  Chunks are multiples of it and features start on it: the strictest alignment that
CUDA's vector loads and torch's own allocator ask for."""

MAX_SLOTS = 1024
"""Most slots an exporter may have.  A process can hold 4,096 interprocess events (measured on an
H200, driver 580): one ready event per slot plus one release event per slot and consumer must fit
for two consumers on the exporter's side with room to spare."""


class SegmentInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One physical allocation of a pool."""

    index: int
    start: int
    """Offset of its first byte in the pool's address range."""
    nbytes: int
    """Physical size: a multiple of the backend's granule."""


class RegionInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a consumer must know of a pool before it maps anything."""

    kind: Literal["host", "cuda"]
    max_nbytes: int
    """Size of the address range to reserve, physical (a multiple of ``granule``)."""
    granule: int
    slots: int
    writable: bool = False
    handle_type: Literal["memfd", "posix", "fabric"] = "memfd"
    device: str = ""
    """UUID of the GPU that holds the memory, as ``GPU-...``; empty for host memory."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Route: each of ``consumer_count`` ranks gets every batch (or those that ``to`` names)."""

    consumer_count: int

    def __post_init__(self) -> None:
        if not is_int(self.consumer_count):
            raise ArgumentError(
                f"Broadcast takes the number of ranks as an int, got {self.consumer_count!r}"
            )
        if self.consumer_count < 1:
            raise ArgumentError(
                f"Broadcast needs at least 1 consumer, got {self.consumer_count}; "
                f"give the number of ranks that will attach"
            )


@dataclass(frozen=True, slots=True)
class Compete:
    """Route: exactly one free consumer gets each batch."""


Route: TypeAlias = Broadcast | Compete


@dataclass(frozen=True, slots=True, init=False)
class Group:
    """Narrow one batch to some of a Broadcast's ranks: ``send(..., to=Group(0, 1))``."""

    ranks: tuple[int, ...]

    def __init__(self, *ranks: int) -> None:
        object.__setattr__(self, "ranks", check_ranks(ranks))


def is_int(value: object) -> TypeGuard[int]:
    """Say whether a value is an int and no bool; arguments are checked at run time too."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Return text or a number as nothing but that: a message cannot hold numpy's text, say.

    A member of an enumeration is left as it is: it is written as its value.
    """
    if type(value) is str or isinstance(value, bool | Enum):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    return int.__int__(value) if isinstance(value, int) else value


def check_bool(value: object, what: str) -> bool:
    """Return a flag; refuse what is merely true or false, as the text "no" is true."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{what}={value!r} must be True or False")
    return value


def check_ranks(ranks: Iterable[object]) -> tuple[int, ...]:
    """Return the ranks sorted and once each; refuse an empty set and what is no rank."""
    found = set[int]()
    for rank in ranks:
        if not is_int(rank) or rank < 0:
            raise ArgumentError(f"a rank is an int of 0 or more, got {rank!r}")
        found.add(rank)
    if not found:
        raise ArgumentError("a group needs at least one rank; got none")
    return tuple(sorted(found))


def check_ids(ids: Iterable[int], what: str) -> tuple[int, ...]:
    """Return numbers of users or groups; refuse what is none."""
    found = tuple(ids) if isinstance(ids, Iterable) else (ids,)
    if isinstance(ids, str | bytes) or not all(is_int(each) and each >= 0 for each in found):
        raise ArgumentError(
            f"{what}={ids!r} must be numbers of users or groups; pwd and grp know them by name"
        )
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """Who let go of an owner, and how.  Consumers are ranks, or names under Compete."""

    released: tuple[Key, ...] = ()
    """Let go in order, all reads over on the device."""
    refused: tuple[tuple[Key, str], ...] = ()
    """Never used it, with the reason given: could not map, cancelled, dropped unread."""
    lost: tuple[Key, ...] = ()
    """Their process is gone."""

    @property
    def complete(self) -> bool:
        """True if every consumer that was to see the owner released it."""
        return not self.refused and not self.lost


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a feature that :meth:`asyncvmm.Exporter.reserve` makes room for.

    ``dtype`` is a ``torch.dtype`` or its name, as ``torch.bfloat16`` or ``"bfloat16"``.
    """

    shape: tuple[int, ...]
    dtype: object

    def __post_init__(self) -> None:
        shape = tuple(self.shape) if isinstance(self.shape, Iterable) else (None,)
        if not all(is_int(n) and n >= 0 for n in shape):
            raise ArgumentError(
                f"a shape is a tuple of ints of 0 or more, got {self.shape!r} for a TensorSpec"
            )
        object.__setattr__(self, "shape", shape)

    @property
    def dtype_name(self) -> str:
        """The dtype's name without ``torch.``."""
        return str(self.dtype).removeprefix("torch.")


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}iB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power


def parse_bytes(size: int | str, what: str) -> int:
    """Return a number of bytes given as an int or as text like ``"1.5GiB"`` or ``"200 MB"``."""
    if isinstance(size, str):
        number = size.strip().rstrip("BKMGTi")
        unit = size.strip()[len(number) :]
        try:
            nbytes = int(float(number) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            raise ArgumentError(
                f"{what}={size!r} is no size; give an int of bytes or text like '64MiB', '1.5GiB'"
            ) from None
    elif is_int(size):
        nbytes = size
    else:
        raise ArgumentError(f"{what}={size!r} is no size; give an int of bytes or text like '1GiB'")
    if nbytes < 1:
        raise ArgumentError(f"{what}={size!r} must be at least 1 byte")
    return nbytes
