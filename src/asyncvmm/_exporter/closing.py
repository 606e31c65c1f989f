"""Closing an exporter: in order as long as consumers answer, and completely in any case."""

from __future__ import annotations

import asyncio
import math
import warnings
from functools import partial

from asyncvmm._errors import DeviceLostError, OwnersOutstandingWarning
from asyncvmm._exporter.exporter import Exporter
from asyncvmm._io.chrome import write
from asyncvmm._io.listener import Listener
from asyncvmm._io.threads import in_thread
from asyncvmm._io.timeline import Timeline


async def drain(exporter: Exporter, limit: float) -> None:
    """Take no new owners; wait for what is out, up to the limit, then say what is left."""
    exporter._begin_closing()
    if not exporter._device_lost:  # else nobody is to take it for an end in order
        exporter._core.say_goodbye()
    exporter._pump()
    try:
        async with asyncio.timeout(None if limit == math.inf else limit):
            await exporter._until_idle()
    except TimeoutError:
        left = [owner for owner in exporter.statistics().owners if owner.state != "filling"]
        if not left:
            return  # the last of them came back while the time ran out
        exporter._core.give_up_waiting()
        exporter._pump()
        whom = sorted({str(m) for owner in left for m in owner.held_by + owner.waiting_for})
        warnings.warn(
            f"exporter {exporter.name!r} closed after {limit} s with {len(left)} owners still "
            f"out, held by or waiting for consumers {', '.join(whom)}; the oldest is "
            f"{max(o.age for o in left):.1f} s old",
            OwnersOutstandingWarning,
            stacklevel=3,
        )


async def close(
    exporter: Exporter, listener: Listener, timeline: Timeline | None, *, graceful: bool
) -> None:
    """Undo everything, whatever happens to the caller, or to the work, meanwhile."""
    exporter._begin_closing()
    undo = partial(_undo, exporter, listener, timeline)
    work = asyncio.ensure_future(undo(graceful=graceful))
    cancelled: asyncio.CancelledError | None = None
    while not work.done() or work.cancelled():
        if work.cancelled():  # by who cancels every task of the loop, as asyncio.run does
            work = asyncio.ensure_future(undo(graceful=False))
        try:
            await asyncio.wait((work,))  # which leaves the work alone when cancelled
        except asyncio.CancelledError as error:
            cancelled = error
            exporter._connections.abort()
    work.result()
    if cancelled is not None:
        raise cancelled


async def _undo(
    exporter: Exporter, listener: Listener, timeline: Timeline | None, *, graceful: bool
) -> None:
    # Each step may be begun again: what was done does nothing.
    await in_thread(listener.close)
    await exporter._elastic.close()
    if graceful:
        await exporter._connections.finish()
    exporter._connections.abort()
    exporter._hang_up()
    await exporter._copier.close()
    await exporter._draining.close()
    exporter._ended = True
    try:
        await in_thread(exporter._region.close)
    except DeviceLostError:
        if not exporter._device_lost:
            raise  # else that was told, and what is not given back went with the context
    finally:
        if timeline is not None:
            await in_thread(write, timeline)
