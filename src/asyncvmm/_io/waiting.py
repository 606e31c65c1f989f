"""Waiting, with others, to be woken, and waking them all."""

from __future__ import annotations

import asyncio


async def woken(waiters: list[asyncio.Future[None]]) -> None:
    """Wait in the list until whoever keeps it calls :func:`wake`.

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


def wake(waiters: list[asyncio.Future[None]]) -> None:
    """Wake everybody in the list, which is empty then."""
    for future in waiters:
        if not future.done():
            future.set_result(None)
    waiters.clear()
