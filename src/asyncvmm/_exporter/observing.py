"""Those who only look: ``asyncvmm top`` and the like.

An observer passes the same checks as a consumer, asks, and is told; it has no seat, is sent
nothing that it did not ask for, and an answer is worked out only then.  It is heard again a moment
after its answer, so one that asks all the time costs little, and one that does not read is dropped
instead of being queued for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import msgspec

from asyncvmm._core import observation as obs
from asyncvmm._core import wire
from asyncvmm._core.routing import Ranks
from asyncvmm._errors import HandshakeError, RemoteProtocolError
from asyncvmm._exporter.connection import Connection
from asyncvmm._exporter.explaining import explain
from asyncvmm._exporter.reporting import report

if TYPE_CHECKING:
    from asyncvmm._exporter.lending import Lending as Exporter

Line = TypeVar("Line", obs.ConsumerLine, obs.OwnerLine)

MOST_OBSERVERS = 16
"""At once; more are refused."""

PAUSE_SECONDS = 0.1
"""Between an answer and the next question that is heard."""


class Observers:
    """The observers of one exporter; ``snapshot`` works out an answer."""

    def __init__(self, snapshot: Callable[[], obs.Snapshot]) -> None:
        self._snapshot = snapshot
        self._known: set[Connection] = set()

    def __contains__(self, conn: Connection) -> bool:
        return conn in self._known

    def answer(self, conn: Connection) -> None:
        """Tell an observer how things stand, and hear nothing of it for a moment."""
        if conn not in self._known and len(self._known) >= MOST_OBSERVERS:
            raise HandshakeError(
                f"{MOST_OBSERVERS} observers look at this exporter already; end one of them",
                reason="observers",
            )
        self._known.add(conn)
        link = conn.link
        if link.queued:
            raise RemoteProtocolError("an observer asked again before it had read its answer")
        link.post(wire.encode_greeting(self._snapshot()))
        link.flush()
        conn.stop_deadline()
        if not link.closed:
            link.pause()
            conn.deadline = asyncio.get_running_loop().call_later(PAUSE_SECONDS, link.start)

    def forget(self, conn: Connection) -> None:
        """Note that one has gone."""
        self._known.discard(conn)

    def close(self) -> None:
        """Hang up on all of them: no last word is waited for."""
        for conn in self._known:
            conn.link.abort()
            conn.close()
        self._known.clear()


def snapshot(exporter: Exporter) -> obs.Snapshot:
    """Return how things stand, cut to what fits a packet."""
    statistics = report(exporter, obs.MOST_OWNERS)
    consumers = [_line(obs.ConsumerLine, c) for c in statistics.consumers[: obs.MOST_CONSUMERS]]
    owners = [_line(obs.OwnerLine, each) for each in statistics.owners]
    return obs.Snapshot(
        exporter._connections.handshake.identity,
        wire.clip(exporter.name),
        os.getpid(),
        monotonic() - exporter._counters.opened,
        _route(exporter),
        msgspec.convert(statistics, obs.PoolLine, from_attributes=True),
        wire.printable(str(explain(exporter)))[: obs.MOST_WORDS],
        owners,
        len(exporter._core.records),
        consumers,
        len(statistics.consumers),
    )


def _route(exporter: Exporter) -> str:
    route = exporter._core.route
    return f"broadcast to {route.consumer_count}" if isinstance(route, Ranks) else "compete"


def _line(kind: type[Line], source: object) -> Line:
    """Take over the fields of the same names, long texts cut to what a name may be."""
    fields = [getattr(source, name) for name in kind.__struct_fields__]
    cut = [
        wire.printable(each)[: obs.MOST_NAME] if isinstance(each, str) else each for each in fields
    ]
    return msgspec.convert(cut, kind)
