"""How long a task that never has to wait may keep the loop."""

from __future__ import annotations

MOST = 16
"""Features after which it lets the loop turn: as many owners of one feature as a packet takes.
Fewer make more packets, and each costs both ends more than a hand-off; more gain nothing."""

SECONDS = 0.5e-3
"""How long before it does so with fewer, where a hand-off takes its time.  With one more hand-off,
and the releases of a packet that are freed in the same turn, a turn stays below 1 ms: on an H200
the loop gap beside a stream was 0.81 to 0.88 ms (p99), and 1.08 to 1.16 ms with 0.7 ms here."""

LEAST = 4
"""Features before which it does not, however long ago the turn began: who waits for other things
in between shows no turn here."""


class Turn:
    """What one end has handed over since its loop was last seen to turn.

    It looks at no clock: whoever counts has looked already.
    """

    __slots__ = ("_features", "_since", "over")

    def __init__(self) -> None:
        self.over = False
        """Whether the loop is due."""
        self._features = 0
        self._since = 0.0

    def begin(self) -> None:
        """Note that the loop turns, or was seen to."""
        self._features = 0
        self.over = False

    def count(self, features: int, now: float) -> None:
        """Note that an owner of so many features was handed over at ``now`` (seconds)."""
        if not self._features:
            self._since = now
        self._features += features
        self.over = self._features >= MOST or (
            self._features >= LEAST and now - self._since >= SECONDS
        )
