"""What a lane is to do, as both of its sides are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KIB, MIB = 1 << 10, 1 << 20

Loop = Literal["uvloop", "asyncio", "none"]


@dataclass(frozen=True)
class Payload:
    """One hand-off: ``count`` features of ``nbytes`` bytes each."""

    count: int
    nbytes: int

    @property
    def total(self) -> int:
        """Return the bytes of all features."""
        return self.count * self.nbytes


@dataclass(frozen=True)
class Setting:
    """Everything that both sides of a lane must agree on."""

    folder: Path
    """A private folder for sockets; it is removed with what is left in it."""
    payload: Payload
    depth: int
    """Most hand-offs in flight: slots, ring entries or credits."""
    consumers: int = 1
    compete: bool = False
    """True if each hand-off goes to one consumer, False if it goes to all."""
    loop: Loop = "uvloop"
    device: str = "cpu"
    consumer_device: str = "cpu"
    work: float = 0.0
    """Seconds that a consumer sleeps over each hand-off."""
    cores: tuple[frozenset[int], ...] = ()
    """The processors that the producer and each consumer may use, in turn; none: all of them."""

    @property
    def on_gpu(self) -> bool:
        """Say whether payloads live on a GPU."""
        return self.device.startswith("cuda")
