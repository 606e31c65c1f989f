"""Redeeming tickets, for code that is not async."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from asyncvmm._consumer.consumer import Consumer as AsyncConsumer
from asyncvmm._consumer.owner import Owner
from asyncvmm._consumer.reconnecting import ReconnectingConsumer
from asyncvmm._groups import AttentionGroup
from asyncvmm._tensors import DevicePort
from asyncvmm._ticket import OwnerTicket, Ticket
from asyncvmm.blocking._facade import Facade

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor

AnyConsumer: TypeAlias = AsyncConsumer | ReconnectingConsumer


class Redeeming(Facade):
    """The part of a blocking consumer that redeems tickets."""

    _consumer: AnyConsumer
    _port: DevicePort

    def reconstruct(
        self,
        ticket: Ticket,
        *,
        count: int = 1,
        group: AttentionGroup | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Return the ticket's feature as a tensor in this process's own memory.

        It is what :meth:`asyncvmm.Consumer.reconstruct` returns and raises.  GPU memory is copied
        on ``stream``, by default the one that is current in the calling thread.
        """
        self._check()
        reconstruct = partial(
            self._consumer.reconstruct,
            ticket,
            count=count,
            group=group,
            stream=self._port.stream_of(stream),
        )
        return self._run(reconstruct, timeout, "the ticket's owner")

    def borrow(self, ticket: Ticket | OwnerTicket, *, timeout: float | None = None) -> Owner:
        """Redeem the ticket's owner without copying it; see :meth:`asyncvmm.Consumer.borrow`.

        An owner that comes in the very moment of an interruption counts as dropped unread.
        """
        return self._run(partial(self._consumer.borrow, ticket), timeout, "the ticket's owner")

    def acknowledge(
        self, ticket: Ticket | OwnerTicket, *, count: int = 1, group: AttentionGroup | None = None
    ) -> None:
        """Release the ticket's owner unread; see :meth:`asyncvmm.Consumer.acknowledge`."""

        async def acknowledge() -> None:
            self._consumer.acknowledge(ticket, count=count, group=group)

        self._run(acknowledge)
