"""Waiting, with others, to be woken."""

from __future__ import annotations

import asyncio


async def woken(waiters: list[asyncio.Future[None]]) -> None:
    """Wait in the list until whoever keeps it wakes everybody in it.

    Who is cancelled leaves it: what is waited for may be long in coming, and be asked for often.
    """
    future = asyncio.get_running_loop().create_future()
    waiters.append(future)
    try:
        await future
    except BaseException:
        if future in waiters:
            waiters.remove(future)
        raise
