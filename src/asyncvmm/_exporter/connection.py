"""One consumer's socket, as the exporter sees it."""

from __future__ import annotations

import asyncio
import logging

from asyncvmm._core.ledger import Peer, PeerState
from asyncvmm._io.link import Link
from asyncvmm._io.liveness import DeathWatch, PeerIdentity

logger = logging.getLogger("asyncvmm.exporter")


class Connection:
    """One consumer's socket."""

    __slots__ = (
        "attaching",
        "deadline",
        "identity",
        "link",
        "peer",
        "rejected",
        "segments",
        "watch",
    )

    def __init__(self, identity: PeerIdentity) -> None:
        self.identity = identity
        self.link: Link
        self.peer: Peer | None = None
        self.watch: DeathWatch | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.attaching = False
        self.rejected = False
        self.segments: set[int] = set()  # those it was sent

    def __repr__(self) -> str:
        return f"Connection(pid={self.identity.pid}, {self.peer!r})"

    @property
    def who(self) -> str:
        """Name the consumer and its process, for messages."""
        member = self.peer.member if self.peer else None
        return f"consumer {member!r:.80} (pid {self.identity.pid})"

    @property
    def opened(self) -> bool:
        """True while its consumer is open."""
        return self.peer is not None and self.peer.state is PeerState.OPEN

    @property
    def coming(self) -> bool:
        """True while it was promised segments and has not said that it has them."""
        peer = self.peer
        return peer is not None and peer.state is PeerState.CONNECTING and not self.attaching

    def tell_absent(self) -> None:
        """Say that its socket is gone while its process lives."""
        assert self.peer is not None
        logger.warning(
            "%s lost its connection but lives; %d owners that it holds, or has not redeemed, are "
            "quarantined until it releases them or ends",
            self.who,
            len(self.peer.holds) + len(self.peer.expected),
        )

    def stop_deadline(self) -> None:
        """It said what it had to say in time."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def close(self) -> None:
        """Close everything but the link."""
        self.stop_deadline()
        if self.watch is not None:
            self.watch.close()
        if self.identity.pidfd is not None:
            self.identity.pidfd.close()
