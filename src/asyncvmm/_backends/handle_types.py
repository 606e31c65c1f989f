"""By which kind of handle a pool's memory can be shared: only a trial decides.

The device attribute says what the GPU could do, not what this process may do: without an IMEX
channel a FABRIC allocation is refused although the attribute is 1 (field report 45).
"""

from __future__ import annotations

import logging
import os
from typing import Literal, NamedTuple, TypeAlias

from asyncvmm._backends import driver
from asyncvmm._backends.contexts import Undo
from asyncvmm._backends.driver_memory import (
    Allocation,
    HandleType,
    allocation_properties,
    granularity,
)
from asyncvmm._errors import ArgumentError, BackendError
from asyncvmm._fds import OwnedFd

logger = logging.getLogger("asyncvmm.backends")

AskedType: TypeAlias = Literal["auto", "fabric", "posix"]

IMEX_CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"

_ATTRIBUTES: dict[HandleType, str] = {
    "fabric": "HANDLE_TYPE_FABRIC_SUPPORTED",
    "posix": "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
}

_REFUSALS = frozenset(
    ("CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE")
)
"""The codes with which drivers refuse a handle type, as users reported them (field report 45)."""


class Refusal(NamedTuple):
    """Why one handle type cannot be had: the call, its code, and the missing piece in words."""

    call: str
    code: str
    why: str


def choose(device: int, asked: AskedType) -> HandleType:
    """Return the handle type that works on GPU ``device``; ``auto`` tries FABRIC, then POSIX."""
    if asked not in ("auto", "fabric", "posix"):
        raise ArgumentError(f"handle_type is 'auto', 'fabric' or 'posix', got {asked!r}")
    kinds: tuple[HandleType, ...] = ("fabric", "posix") if asked == "auto" else (asked,)
    refusals: dict[HandleType, Refusal] = {}
    for kind in kinds:
        refusal = trial(device, kind)
        if refusal is None:
            _say(device, asked, kind, refusals)
            return kind
        refusals[kind] = refusal
    reasons = "; ".join(f"{kind}: {each.why}" for kind, each in refusals.items())
    last = refusals[kinds[-1]]
    raise BackendError(
        f"GPU {device} cannot share memory by {' or '.join(refusals)} handles ({reasons})",
        call=last.call,
        code=last.code,
    )


def trial(device: int, kind: HandleType) -> Refusal | None:
    """Make and export one granule so; say why it was refused, None if it works.

    A refusal leaves nothing behind: no memory, no descriptor, no sticky error (field report 44).
    """
    attribute = _ATTRIBUTES[kind]
    if not driver.device_attribute(device, attribute):
        return Refusal(
            "cuDeviceGetAttribute", "not_supported", f"the device attribute {attribute} is 0"
        )
    try:
        with Undo() as undo:  # never kept: a release that failed is tried once more
            properties = allocation_properties(device, kind)
            memory = Allocation.create(granularity(properties), properties)
            undo.add(memory.release)
            exported = memory.export(kind)
            if isinstance(exported, int):
                OwnedFd(exported).close()
            memory.release()
    except BackendError as error:
        if error.code not in _REFUSALS:
            raise
        return Refusal(error.call, error.code, f"{error}{_missing(kind)}")
    return None


def _missing(kind: HandleType) -> str:
    if kind == "posix":
        return ""
    if not os.path.exists(IMEX_CHANNEL):
        return (
            f": the IMEX channel device {IMEX_CHANNEL} is not there; start nvidia-imex, create "
            f"the channel and, in a container, mount it"
        )
    return f": the IMEX channel device {IMEX_CHANNEL} is there, but this process may not use it"


def _say(
    device: int, asked: AskedType, kind: HandleType, refusals: dict[HandleType, Refusal]
) -> None:
    reason = "asked for by name" if asked != "auto" else "the first that works"
    if "fabric" in refusals:
        reason = f"fabric was refused ({refusals['fabric'].why})"
    logger.info("GPU %d shares memory by %s handles: %s", device, kind, reason)
