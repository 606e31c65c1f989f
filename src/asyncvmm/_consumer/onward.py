"""What the user of a reconnecting consumer does with tickets: each is of one exporter."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from asyncvmm._consumer.consumer import Consumer
from asyncvmm._consumer.owner import Owner
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import ArgumentError
from asyncvmm._groups import AttentionGroup
from asyncvmm._ticket import OwnerTicket, Ticket, check_owner
from asyncvmm._ticket_errors import PackedReleaseError

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor

logger = logging.getLogger("asyncvmm.consumer")

MOST_UNSAID = 1024
"""Acknowledgements kept for an exporter that is being come in to: an exporter has no more slots."""


class Onward:
    """The part of a reconnecting consumer that redeems tickets.

    An exporter that is gone is left for the next one by the first ticket that is shown, so who
    has tickets only need not receive.
    """

    _current: Consumer | None
    _look: Callable[[], Consumer | None]
    _until_come: Callable[[], Awaitable[None]]
    _pass_over: Callable[[Consumer], None]

    def __init__(self, first: Consumer) -> None:
        super().__init__()
        self._last = first  # the exporter that is there, or was last
        self._unsaid: deque[tuple[OwnerTicket, int, AttentionGroup | None]] = deque(
            maxlen=MOST_UNSAID
        )

    async def reconstruct(
        self,
        ticket: Ticket,
        *,
        count: int = 1,
        group: AttentionGroup | None = None,
        stream: object = None,
    ) -> Tensor:
        """Do as ``Consumer.reconstruct``, with the exporter that is there, or the next.

        Tickets of one that is gone raise LostTicketError until the next is there, and
        ForeignTicketError then; what was copied before is found all the same.  Any other ticket
        waits for the next exporter, as ``receive`` does.
        """
        consumer = await self._exporter_of(ticket)
        return await consumer.reconstruct(ticket, count=count, group=group, stream=stream)

    async def borrow(self, ticket: Ticket | OwnerTicket) -> Owner:
        """Do as ``Consumer.borrow``; see :meth:`reconstruct`."""
        return await (await self._exporter_of(ticket)).borrow(ticket)

    def acknowledge(
        self, ticket: Ticket | OwnerTicket, *, count: int = 1, group: AttentionGroup | None = None
    ) -> None:
        """Do as ``Consumer.acknowledge``.

        Where no exporter is there, it is said to the next one if the ticket is of that.
        """
        owner = check_owner(ticket)
        if isinstance(ticket, Ticket) and ticket.packed:
            raise PackedReleaseError
        consumer = self._there(owner)
        if consumer is not None:
            consumer.acknowledge(owner, count=count, group=group)
        else:
            self._unsaid.append((owner, count, group))

    async def _to_device(self, value: object, stream: object) -> object:
        return await self._last._to_device(value, stream)

    async def _exporter_of(self, ticket: Ticket | OwnerTicket) -> Consumer:
        owner = check_owner(ticket)
        while (consumer := self._there(owner)) is None:
            await self._until_come()
        return consumer

    def _there(self, owner: OwnerTicket) -> Consumer | None:
        """Return who is to be shown a ticket, or None while the next exporter is looked for."""
        consumer = self._look()
        if consumer is not None and _gone(consumer):
            self._pass_over(consumer)
            consumer = self._look()
        if consumer is None and owner.exporter == self._last._core.exporter:
            return self._last  # it has what was copied, and says what is lost
        return consumer

    def _come_to(self, consumer: Consumer) -> None:
        """Go on with the next exporter's consumer: what was copied and said before is its own."""
        consumer._copies, consumer._kept = self._last._copies, self._last._kept
        self._last = self._current = consumer
        for owner, count, group in self._unsaid:
            if owner.exporter == consumer._core.exporter:
                try:
                    consumer.acknowledge(owner, count=count, group=group)
                except ArgumentError as error:
                    logger.warning("%r was not acknowledged: %s", owner, error)
        self._unsaid.clear()


def _gone(consumer: Consumer) -> bool:
    """Say whether nothing comes any more; what came before its end is received first."""
    return consumer._core.state is PeerState.CLOSED and not consumer._core.inbox
