"""What a run of the demo is to do, decided once and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from asyncvmm._errors import ArgumentError
from asyncvmm.cli.loops import LoopChoice

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the demo."""

    name: str
    device: str
    rank_devices: tuple[str, ...]
    route: Literal["broadcast", "compete"]
    batches: int
    images: Path | None
    in_place: bool
    """The encoder writes straight into the pool (``reserve``); else it is copied (``send``)."""
    loop: LoopChoice
    pool_bytes: int = 8 * MIB
    """Holds about a dozen requests: small enough that the encoder has to wait now and then."""
    slots: int = 8
    trace: Path | None = None
    """Where the exporter writes its part of the timeline; each rank writes one beside it."""

    @property
    def ranks(self) -> int:
        """How many rank processes there are."""
        return len(self.rank_devices)

    def rank_trace(self, rank: int) -> Path | None:
        """Return where a rank writes its part of the timeline."""
        return self.trace and self.trace.with_name(f"rank-{rank}.json")

    def shard(self, rank: int) -> int:
        """Return which weights a rank has: its own, or the common ones if ranks compete."""
        return rank if self.route == "broadcast" else 0


class RankOrder(msgspec.Struct, frozen=True):
    """What a rank process is told, as JSON on its command line."""

    name: str
    device: str
    rank: int
    shard: int
    compete: bool
    loop: LoopChoice
    trace: str | None = None


class RankRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank process tells, as lines of JSON on its standard output."""

    key: str = ""
    digest: str = ""
    finished: bool = False
    error: str = ""


def resolve_devices(
    device: str, rank_devices: str | None, ranks: int
) -> tuple[str, tuple[str, ...]]:
    """Return the exporter's device and each rank's, with ``auto`` decided."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda:0" if found else "cpu"
    device = _checked(device, found, "--device")
    if rank_devices is None:
        return device, (device,) * ranks
    named = [_checked(name.strip(), found, "--rank-devices") for name in rank_devices.split(",")]
    if len(named) not in (1, ranks):
        raise ArgumentError(
            f"--rank-devices names {len(named)} devices for {ranks} ranks; "
            f"give one for all or one for each"
        )
    if (device == "cpu") != all(name == "cpu" for name in named):
        raise ArgumentError(
            f"an exporter on {device} cannot serve ranks on {', '.join(named)}; "
            f"put all on GPUs or all on cpu"
        )
    return device, tuple(named * ranks if len(named) == 1 else named)


def _checked(device: str, found: int, option: str) -> str:
    if device == "cpu":
        return device
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isdecimal() or device == "cuda"):
        raise ArgumentError(f"{option} {device}: a device is auto, cpu or cuda:N")
    if int(index or 0) >= found:
        raise ArgumentError(
            f"{option} {device}: torch sees {found} CUDA devices here; take a smaller N or cpu"
        )
    return f"cuda:{index or 0}"
