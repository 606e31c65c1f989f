"""Whom the next batch goes to.

:class:`Ranks` is Broadcast: every rank named gets the batch, and what a rank has not seen because
it is not attached waits for it in order.  :class:`Competitors` is Compete: exactly one free
consumer gets it; free means that it has credit, and credit comes back when a batch is *taken*,
so that a consumer's death tells which batches nobody had begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from asyncvmm._core.ledger import ANYONE, BatchRecord, Peer, PeerState
from asyncvmm._errors import ArgumentError, RankError
from asyncvmm._groups import AttentionGroup
from asyncvmm._types import Group, Key, check_ranks

To: TypeAlias = Group | AttentionGroup | Iterable[int] | int | None
"""Which of a Broadcast's ranks a batch is for; None is all of them."""


class Ranks:
    """Seats of a Broadcast route."""

    __slots__ = ("_all", "_backlog", "consumer_count", "seats")

    busy = False
    """Whether something may still go to a peer that is here: its rank's share is all it gets."""

    def __init__(self, consumer_count: int) -> None:
        self.consumer_count = consumer_count
        self.seats: dict[int, Peer] = {}
        self._all = tuple(range(consumer_count))
        self._backlog: list[deque[BatchRecord]] = [deque() for _ in self._all]

    def member(self, rank: int | None, name: str | None) -> int:
        """Return the seat a newcomer asks for; refuse a taken or impossible one."""
        count = self.consumer_count
        if rank is None:
            raise RankError(
                f"this exporter broadcasts to ranks 0 to {count - 1}; connect with rank=...",
                rank=None,
                consumer_count=count,
            )
        if name is not None:
            raise RankError(
                f"this exporter's consumers have ranks, 0 to {count - 1}, and no names; connect "
                f"without member={name!r:.80}",
                rank=None,
                consumer_count=count,
            )
        if not 0 <= rank < count:
            raise RankError(
                f"rank {rank} is out of range: this exporter has consumer_count={count}, so "
                f"ranks are 0 to {count - 1}; open it with the number of ranks that attach",
                rank=rank,
                consumer_count=count,
            )
        if rank in self.seats:
            raise RankError(
                f"rank {rank} is taken by another consumer; let it leave first, or connect "
                f"with a free rank",
                rank=rank,
                consumer_count=count,
            )
        return rank

    def targets(self, to: To) -> tuple[int, ...]:
        """Return the ranks a batch is for; refuse ranks that do not exist."""
        if to is None:
            return self._all
        if isinstance(to, AttentionGroup):
            return tuple(to.ranks(self.consumer_count))
        if isinstance(to, Group):
            ranks = to.ranks
        else:
            ranks = check_ranks((to,) if isinstance(to, int) else to)
        if ranks[-1] >= self.consumer_count:
            raise RankError(
                f"to={list(ranks)} names rank {ranks[-1]}, but consumer_count="
                f"{self.consumer_count}; ranks are 0 to {self.consumer_count - 1}",
                rank=ranks[-1],
                consumer_count=self.consumer_count,
            )
        return ranks

    def reserve(self, peer: Peer) -> None:
        """Give a newcomer its seat before it is open."""
        self.seats[int(peer.member)] = peer

    def sit(self, peer: Peer) -> Iterable[BatchRecord]:
        """Return what waited for the rank of a peer that just opened, oldest first."""
        rank = int(peer.member)
        waited, self._backlog[rank] = self._backlog[rank], deque()
        return waited

    def leave(self, peer: Peer) -> None:
        """Free the seat."""
        if self.seats.get(int(peer.member)) is peer:
            del self.seats[int(peer.member)]

    def keep(self, rank: int, batch: BatchRecord) -> None:
        """Keep a batch for a rank that is not attached."""
        self._backlog[rank].append(batch)

    def give_up(self) -> list[tuple[Key, BatchRecord]]:
        """Return and forget what waits for ranks that are not attached."""
        found: list[tuple[Key, BatchRecord]] = []
        for rank, waited in enumerate(self._backlog):
            found += [(rank, batch) for batch in waited]
            waited.clear()
        return found


class Competitors:
    """Peers of a Compete route, and the batches nobody has yet."""

    __slots__ = ("_names", "peers", "pending")

    def __init__(self) -> None:
        self.peers: dict[int, Peer] = {}  # by id; order is the order of the last delivery
        self.pending: deque[BatchRecord] = deque()
        self._names = 0

    def member(self, rank: int | None, name: str | None) -> str:
        """Return the newcomer's name, making one up if it has none."""
        if rank is not None:
            raise RankError(
                f"this exporter's consumers compete and have names, not ranks; connect "
                f"without rank={rank}",
                rank=rank,
                consumer_count=None,
            )
        taken = {ANYONE, *(peer.member for peer in self.peers.values())}
        while name is None:
            self._names += 1
            if (made_up := f"consumer-{self._names}") not in taken:
                return made_up
        if name in taken:
            raise RankError(
                f"the name {name!r} is taken by another consumer; connect with a free name",
                rank=None,
                consumer_count=None,
            )
        return name

    def targets(self, to: object) -> tuple[int, ...]:
        """Return nothing: exactly one free consumer gets each batch.  Refuse ``to=``."""
        if to is not None:
            raise ArgumentError(
                f"to={to!r} cannot narrow a Compete route: exactly one free consumer gets "
                f"each batch; use Broadcast to address ranks"
            )
        return ()

    def reserve(self, peer: Peer) -> None:
        """Keep a newcomer's name before it is open."""
        self.peers[peer.id] = peer

    def sit(self, peer: Peer) -> Iterable[BatchRecord]:
        """Return nothing: what is pending is assigned by credit."""
        return ()

    def give_up(self) -> list[tuple[Key, BatchRecord]]:
        """Return and forget what no competitor has."""
        found: list[tuple[Key, BatchRecord]] = [(ANYONE, batch) for batch in self.pending]
        self.pending.clear()
        return found

    def leave(self, peer: Peer) -> None:
        """Forget a competitor."""
        self.peers.pop(peer.id, None)

    def put_back(self, batches: Iterable[BatchRecord]) -> None:
        """Take back what a consumer had not taken; the oldest goes first, as always."""
        self.pending = deque(sorted((*batches, *self.pending), key=lambda batch: batch.number))

    @property
    def busy(self) -> bool:
        """Whether something may still go to a peer that is here: pending, or not taken."""
        return bool(self.pending) or any(peer.untaken for peer in self.peers.values())

    def freest(self) -> Peer | None:
        """Return the consumer that the next batch goes to, if any may have one.

        It is the one with the fewest untaken batches; of equals, the one that has waited longest
        for its turn, which is over with this call.
        """
        freest = None
        for peer in self.peers.values():
            if (
                peer.credit > 0
                and (freest is None or len(peer.untaken) < len(freest.untaken))
                and peer.state is PeerState.OPEN
                and not peer.told
            ):
                freest = peer
        if freest is not None:
            self.peers[freest.id] = self.peers.pop(freest.id)
        return freest
