"""Giving a consumer whose link broke another one, for what it still has to say.

Its process lives, so what it held is quarantined until it lets go.  Whoever asks for the new link
must be that very process: the kernel's word is compared with what it said of the first link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncvmm._core import wire
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._errors import HandshakeError
from asyncvmm._exporter.connection import Connection
from asyncvmm._io.liveness import same_process


def resume(
    conn: Connection,
    message: wire.Resume,
    identity: bytes,
    *,
    core: ExporterCore,
    known: Mapping[int, Connection],
    ended: Callable[[Connection, Exception | None], None],
) -> wire.Resumed:
    """Put a connection in the place of the broken one that it names, and return the answer to it.

    ``known`` are the connections by peer, and ``ended`` is told of the end of a link.  Raises
    HandshakeError if nothing is owed by that process under that name, which may also mean that
    it is not that process.
    """
    old = known.get(message.peer) if message.exporter == identity else None
    if old is not None and old.peer is not None and same_process(old.identity, conn.identity):
        if not old.link.closed:
            old.link.read_pending()  # its end was not seen here yet, and last words count
        old.link.abort()
        ended(old, None)
        if old.peer.absent:
            old.close()
            conn.peer = old.peer
            return wire.Resumed(core.found_again(old.peer))
    raise HandshakeError(
        "nothing is owed here by this process under that name: it was settled, or another "
        "exporter has the name now",
        reason="nothing_owed",
    )
