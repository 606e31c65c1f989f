"""What every part logs with: quiet unless the program sets logging up, and once per cause.

There is one logger per part: ``asyncvmm.exporter``, ``.consumer``, ``.backends``, ``.io``,
``.timeline``, ``.tickets`` and ``.blocking``.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from time import monotonic

# Without a handler Python itself would print warnings to standard error.
logging.getLogger("asyncvmm").addHandler(logging.NullHandler())

QUIET_SECONDS = 60.0
"""A cause that was told is told again only after it was not seen for so long: what is always so
is one line and not one a minute, and what happens again next week is another."""

MOST_CAUSES = 64
"""Causes remembered; of more the one seen longest ago is forgotten."""


class Once:
    """Warns once of each cause; see QUIET_SECONDS."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: dict[Hashable, float] = {}  # cause -> when it was seen last; newest at the end

    def fresh(self, cause: Hashable) -> bool:
        """Say whether a cause is to be told, and note that it was seen."""
        now = monotonic()
        before = self._seen.pop(cause, None)
        self._seen[cause] = now
        if len(self._seen) > MOST_CAUSES:
            del self._seen[next(iter(self._seen))]
        return before is None or now - before > QUIET_SECONDS

    def warning(self, cause: Hashable, message: str, *args: object) -> None:
        """Warn of a cause; if it was told already, say it at level DEBUG."""
        level = logging.WARNING if self.fresh((message, cause)) else logging.DEBUG
        self._logger.log(level, message, *args)


def kind_of(error: Exception) -> tuple[str, ...]:
    """Return what makes two errors the same cause: their type, and a driver's call and answer."""
    return type(error).__name__, getattr(error, "call", ""), getattr(error, "code", "")
