"""Steps of other processes that only the tests of the public face need."""

from __future__ import annotations

from tests.process.puppet import Me


async def write_into_a_view(me: Me) -> None:
    """Write into a view of the oldest batch that was kept, as a careless program might."""
    owner = me.batches[0][0]
    owner["words"].add_(1)
