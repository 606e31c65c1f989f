"""Opening an exporter."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial

from asyncvmm._backends.base import ExporterRegion
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.slots import HELD
from asyncvmm._errors import ArgumentError, LocalProtocolError
from asyncvmm._exporter.access import Access
from asyncvmm._exporter.closing import close, drain
from asyncvmm._exporter.connections import Connections
from asyncvmm._exporter.elastic import Elastic
from asyncvmm._exporter.exporter import Exporter
from asyncvmm._exporter.handshake import refusal
from asyncvmm._exporter.observing import Observers, snapshot
from asyncvmm._exporter.staying import stay
from asyncvmm._exporter.tracing import follow
from asyncvmm._io.busy import BUSY_POLL_SECONDS, Busy, check_busy_poll
from asyncvmm._io.listener import Listener
from asyncvmm._io.names import check, resolve
from asyncvmm._io.outbox import BATCH_MESSAGES
from asyncvmm._io.threads import in_thread, made_in_thread
from asyncvmm._io.timeline import Timeline
from asyncvmm._tensors import (
    DevicePort,
    HandleType,
    check_device,
    check_handle_type,
    open_port,
)
from asyncvmm._types import MAX_SLOTS, Broadcast, Compete, Route, check_bool, is_int, parse_bytes

logger = logging.getLogger("asyncvmm.exporter")


class open_exporter:
    """Open an exporter under a name: ``async with open_exporter("vision") as exporter``.

    ``name`` is a bare name (a socket in a private folder of this user), a path with a slash, or
    an abstract name that begins with "@".  ``device`` is where the pool lives: "cpu", "cuda:N" or
    "auto" (a GPU if there is one).  ``pool_bytes`` are there from the start; up to
    ``max_pool_bytes`` the pool grows instead of making a sender wait, and segments unused for
    ``shrink_after`` seconds are given back.  ``slots`` bounds the owners that are out at once.

    ``route`` is ``Broadcast(n)`` (default: one rank) or ``Compete()``.  ``writable=True`` lets
    consumers that ask for the same write into the pool.  ``debug=True`` poisons freed chunks,
    and refuses calls from another thread than the loop's.  Processes of the same user may connect;
    ``allow_uids`` and ``allow_gids`` widen that (under a path or an abstract name: the folder of
    bare names is this user's alone), and ``secret`` narrows it to those who know it.
    ``handle_type`` is how GPU memory is shared: "fabric", "posix", or "auto", which tries them in
    that order.  When a call has waited ``explain_after`` seconds for room, one line in the log
    says why (``math.inf`` for never): half a second, so that who stands still is named within one.
    ``busy_poll`` is the most seconds that the loop polls without waiting for an answer, and only
    while answers usually come within half of that; 0 is for never (docs/performance.md has what
    it costs).  ``trace`` names a file, or folder (see ``connect``), for each owner's timeline.

    Leaving the block takes no new owners, waits up to ``close_timeout`` seconds for those that
    are out (then warns with OwnersOutstandingWarning), and tells the consumers that the stream
    has ended.  Leaving it with an exception hangs up at once.

    Bad arguments raise ArgumentError here, at once.  Entering raises NameInUseError,
    PoolMemoryError or another BackendError, and keeps nothing.  Cancelled, it ends once the pool
    that a thread is preparing is there and given back: seconds, for some GiB of host memory.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        device: str = "auto",
        pool_bytes: int | str = "256MiB",
        max_pool_bytes: int | str | None = None,
        slots: int = 256,
        route: Route = Broadcast(1),  # noqa: B008 - frozen
        shrink_after: float = 30.0,
        writable: bool = False,
        debug: bool = False,
        allow_uids: Iterable[int] = (),
        allow_gids: Iterable[int] = (),
        secret: bytes | str = b"",
        handle_type: HandleType = "auto",
        close_timeout: float = 10.0,
        explain_after: float = 0.5,
        busy_poll: float = BUSY_POLL_SECONDS,
        trace: str | os.PathLike[str] | None = None,
        _port: DevicePort | None = None,
    ) -> None:
        check(name)
        check_device(device)
        check_handle_type(handle_type)
        self._name = name
        self._device = device
        self._pool_bytes = parse_bytes(pool_bytes, "pool_bytes")
        self._max_pool_bytes = (
            self._pool_bytes
            if max_pool_bytes is None
            else parse_bytes(max_pool_bytes, "max_pool_bytes")
        )
        _check_pool(self._pool_bytes, self._max_pool_bytes, slots, route)
        self._slots = slots
        self._route = route
        self._shrink_after = _seconds(shrink_after, "shrink_after")
        self._writable = check_bool(writable, "writable")
        self._debug = check_bool(debug, "debug")
        self._access = Access(allow_uids, allow_gids, secret)
        self._handle_type: HandleType = handle_type
        self._close_timeout = _seconds(close_timeout, "close_timeout")
        self._explain_after = _seconds(explain_after, "explain_after")
        self._busy_poll = check_busy_poll(busy_poll)
        self._timeline = None if trace is None else Timeline(trace)
        self._port = _port
        self._exporter: Exporter | None = None
        self._listener: Listener | None = None

    async def __aenter__(self) -> Exporter:
        if self._exporter is not None:
            raise LocalProtocolError("open_exporter() can be entered once; call it again")
        async with AsyncExitStack() as undo:
            if self._timeline is not None:
                claim = partial(self._timeline.prepare, f"exporter-{self._name}")
                undo.callback(self._timeline.release)
                await made_in_thread(claim, lambda _: None)
            port = self._port
            if port is None:
                port = await in_thread(open_port, self._device)
            create = partial(
                port.create,
                self._pool_bytes,
                self._max_pool_bytes,
                self._slots,
                writable=self._writable,
                handle_type=self._handle_type,
            )
            region = await made_in_thread(create, lambda region: region.close())
            undo.push_async_callback(in_thread, region.close)
            address = await in_thread(resolve, self._name)
            bind = partial(Listener.bind, address, shared=self._access.shared)
            listener = await made_in_thread(bind, Listener.close)
            undo.callback(listener.close)
            exporter = self._join(address.display, port, region)
            listener.start(asyncio.get_running_loop(), exporter._connections.accept, refusal)
            undo.pop_all()
        self._listener, self._exporter = listener, exporter
        logger.info(
            "exporter %s: pool of %d bytes (%d physical) on %s, %d slots",
            address.display,
            self._pool_bytes,
            sum(segment.nbytes for segment in region.segments()),
            port.device,
            self._slots,
        )
        return exporter

    def _join(self, name: str, port: DevicePort, region: ExporterRegion) -> Exporter:
        """Put the parts of an exporter together; each that calls another is given what to call."""
        core = ExporterCore(slots=self._slots, route=self._route)
        connections = Connections(
            core,
            region,
            access=self._access,
            pump=lambda: exporter._told(),
            gone=lambda peer, died: exporter._draining.gone(peer, died=died),
            dying=lambda peer: exporter._fencing.distrust(peer),
            open_release=lambda *event: exporter._fencing.open_release(*event),
            lost=lambda error: exporter._lose_device(error),
            observers=Observers(lambda: snapshot(exporter)),
            debug=self._debug,
            busy=Busy(asyncio.get_running_loop(), self._busy_poll, partial(_answers_soon, core)),
            consumer_count=(
                self._route.consumer_count if isinstance(self._route, Broadcast) else 0
            ),
        )
        exporter = Exporter(
            name,
            port,
            region,
            core,
            connections,
            debug=self._debug,
            explain_after=self._explain_after,
        )
        if self._timeline is not None:
            follow(exporter, self._timeline)
        if self._debug:
            stay(exporter)
        exporter._elastic = Elastic(
            core,
            region,
            connections,
            pool_bytes=self._pool_bytes,
            max_pool_bytes=self._max_pool_bytes,
            shrink_after=self._shrink_after,
            needed=lambda: exporter._room.needed,
            room_made=exporter._room.wake,
            no_room=exporter._no_room,
        )
        return exporter

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        exporter, listener = self._exporter, self._listener
        assert exporter is not None
        assert listener is not None
        if exporter._forked or exporter._closing:
            return
        try:
            if error is None:
                await drain(exporter, self._close_timeout)
        finally:
            listener.stop()
            await close(exporter, listener, self._timeline, graceful=error is None)


def _answers_soon(core: ExporterCore) -> bool:
    """Say whether turning for the next packet may gain anything.

    With more out than one packet takes, answers share a sleep; and with nothing in a consumer's
    hands none comes: what is waited for then is a fence.
    """
    states = core.slots.states
    if len(core.records) <= BATCH_MESSAGES:
        for slot in core.records:
            if states[slot] is HELD:
                return True
    return False


def _check_pool(pool_bytes: int, max_pool_bytes: int, slots: object, route: object) -> None:
    if max_pool_bytes < pool_bytes:
        raise ArgumentError(
            f"max_pool_bytes={max_pool_bytes:,} is less than pool_bytes={pool_bytes:,}; leave it "
            f"out for a pool of one size"
        )
    if not is_int(slots) or not 1 <= slots <= MAX_SLOTS:
        raise ArgumentError(
            f"slots={slots!r} must be an int from 1 to {MAX_SLOTS:,}: each is an event that "
            f"every consumer opens, and a process may hold 4,096 of them"
        )
    if not isinstance(route, Broadcast | Compete):
        raise ArgumentError(
            f"route={route!r} is unknown; give asyncvmm.Broadcast(consumer_count) or "
            f"asyncvmm.Compete()"
        )


def _seconds(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ArgumentError(
            f"{what}={value!r} is no time; give seconds of 0 or more, math.inf for no limit"
        )
    return value
