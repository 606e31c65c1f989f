"""How long a task that never has to wait may keep the loop."""

from __future__ import annotations

MOST = 8
"""Features after which it lets the loop turn: half as many as a packet takes owners.  Who goes on
at once has its link linger, so packets are no smaller for it.  Counted and not timed: turns of
uneven length make uneven packets, which stay uneven all the way round."""


class Turn:
    """What one end has handed over since its loop was last seen to turn."""

    __slots__ = ("_features", "over")

    def __init__(self) -> None:
        self.over = False
        """Whether the loop is due."""
        self._features = 0

    def begin(self) -> None:
        """Note that the loop turns, or was seen to."""
        self._features = 0
        self.over = False

    def count(self, features: int) -> None:
        """Note that an owner of so many features was handed over."""
        self._features += features
        self.over = self._features >= MOST
