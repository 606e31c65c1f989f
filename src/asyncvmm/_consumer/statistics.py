"""What a consumer says about itself: frozen numbers, taken in one moment."""

from __future__ import annotations

from dataclasses import dataclass

from asyncvmm._types import Key


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """What one consumer has, at one moment."""

    member: Key | None
    device: str
    state: str
    """open, closing or closed."""
    unread: int
    """Batches that were delivered and not yet received by the program."""
    held: int
    """Owners received and not yet given back."""
    viewed: int
    """Of those: released, but a view of them is still alive."""
    delivered: int
    released: int
    refused: int
    waiting: int
    """Calls of ``receive`` that wait."""
    pinned: tuple[Key, ...]
    """Keys of the owners that are released and still viewed."""
