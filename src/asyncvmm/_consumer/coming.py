"""Coming in to whichever exporter has a name: what passes is tried again, less and less often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from asyncvmm._consumer.consumer import Consumer
from asyncvmm._errors import HandshakeError, PeerLostError, RankError

logger = logging.getLogger("asyncvmm.consumer")

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two tries to come in where an exporter is there and does not let us.  For one
that is not there, ``connect(wait=True)`` has pauses of its own."""

PASSING = frozenset({"descriptor_limit", "share"})
"""Why an exporter that is there may not let us in now, and let us in later."""

SEAT_SECONDS = 5.0
"""How long a rank or name may be taken before that is an error: an exporter that we lost may not
have seen yet that we are gone."""


class ComingIn:
    """The tries of one consumer; ``come_in`` is one of them, and waits for an exporter."""

    def __init__(self, come_in: Callable[[], Awaitable[Consumer]]) -> None:
        self._come_in = come_in
        self._pause = 0.0

    async def next(self, seat_seconds: float = SEAT_SECONDS) -> Consumer:
        """Return a consumer of the next exporter that lets us in; raise what does not pass."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seat_seconds
        while True:
            if self._pause:
                await asyncio.sleep(self._pause)
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            try:
                consumer = await self._come_in()
            except PeerLostError as error:
                logger.info("an exporter went before it had let us in: %s", error)
            except RankError as error:
                if not _taken(error) or loop.time() >= deadline:
                    raise
            except HandshakeError as error:
                if error.reason not in PASSING:
                    raise
                logger.info("an exporter is asked again: %s", error)
            else:
                self._pause = 0.0
                return consumer


def _taken(error: RankError) -> bool:
    """Say whether the seat exists and somebody else has it."""
    rank, count = error.rank, error.consumer_count
    if rank is None or count is None:
        return rank is count  # a name has neither
    return rank < count
