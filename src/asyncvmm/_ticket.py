"""Tickets: small plain references to exported owners, to be carried by any channel.

A ticket is data and nothing else.  Unpickling one makes a plain object; what it says is believed
by nobody: the exporter checks each name and proof, the consumer each index and shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from asyncvmm._errors import ArgumentError
from asyncvmm._groups import AttentionGroup
from asyncvmm._ticket_errors import PackedReleaseError, RefusedTicketError

PROOF_BYTES = 16
"""Bytes of a proof: too many to guess."""

Natural = Annotated[int, Meta(ge=0, le=2**62)]
Text = Annotated[str, Meta(max_length=4096)]
Proof = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class OwnerTicket(msgspec.Struct, array_like=True, frozen=True, weakref=True):
    """A reference to one exported owner, shared by the tickets of all its features."""

    exporter: Proof
    """The exporter's identity; another one after a restart."""
    name: Text
    """Where it listens: what to ``connect`` to."""
    slot: Natural
    generation: Natural
    proof: Proof
    """Known to who was given the ticket; without it nothing can be redeemed or released."""
    key: Text | int
    nbytes: Natural
    members: Natural
    """How many features are packed in it."""

    def __repr__(self) -> str:
        # Without the proof: a log is no place for it.
        return (
            f"<OwnerTicket {self.key!r} of {self.name!r}, slot {self.slot}, generation "
            f"{self.generation}, {self.members} features>"
        )


class Ticket(msgspec.Struct, array_like=True, frozen=True, weakref=True):
    """A reference to one feature of an exported owner; plain data, picklable, MessagePack-able."""

    owner: OwnerTicket
    index: Natural
    """Which feature of its owner it is."""
    feature: Text
    """The feature's name."""
    dtype: Text
    """Without ``torch.``."""
    shape: tuple[Natural, ...]

    @property
    def packed(self) -> bool:
        """Whether its owner has other features too."""
        return self.owner.members > 1

    def acknowledge(
        self,
        consumer: Acknowledger | None = None,
        *,
        count: int = 1,
        group: AttentionGroup | None = None,
    ) -> None:
        """Release the owner unread in the name of ``consumer``; see ``Consumer.acknowledge``.

        Raises PackedReleaseError (a RuntimeError) for one feature of several, always.
        """
        if self.packed:
            raise PackedReleaseError
        if consumer is None:
            raise ArgumentError(
                "a ticket is plain data and knows no connection: give the consumer that "
                "releases, as in ticket.acknowledge(consumer)"
            )
        consumer.acknowledge(self, count=count, group=group)

    def __repr__(self) -> str:
        return f"<Ticket {self.feature!r} {self.dtype} {list(self.shape)} of {self.owner!r}>"


class Acknowledger(Protocol):
    """Who can release the owner of a ticket: a consumer."""

    def acknowledge(
        self, ticket: Ticket | OwnerTicket, *, count: int = 1, group: AttentionGroup | None = None
    ) -> None:
        """Release an owner unread."""


AckT = TypeVar("AckT", covariant=True)


class Tickets(Mapping[str, Ticket], Generic[AckT]):
    """What an export returns: one ticket per feature by name, and the acknowledgement.

    Pickled, it is a plain dict of its tickets.
    """

    __slots__ = ("_tickets", "acknowledgement")

    def __init__(self, tickets: dict[str, Ticket], acknowledgement: AckT) -> None:
        self._tickets = tickets
        self.acknowledgement = acknowledgement

    @property
    def owner(self) -> OwnerTicket:
        """The reference to the owner that all of them share."""
        return next(iter(self._tickets.values())).owner

    def __getitem__(self, name: str) -> Ticket:
        return self._tickets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def __reduce__(self) -> tuple[type[dict[str, Ticket]], tuple[dict[str, Ticket]]]:
        return dict, (self._tickets,)

    def __repr__(self) -> str:
        return f"<Tickets {list(self)} of {self.owner!r}>"


_encoder = msgspec.msgpack.Encoder()
_ticket = msgspec.msgpack.Decoder(Ticket)
_owner_ticket = msgspec.msgpack.Decoder(OwnerTicket)


def check_owner(ticket: Ticket | OwnerTicket) -> OwnerTicket:
    """Return the reference to the owner; refuse what is no ticket, whatever its class says.

    Raises RefusedTicketError: an object of the right class may hold anything after unpickling.
    """
    try:
        data = _encoder.encode(ticket)
        if isinstance(ticket, Ticket):
            _ticket.decode(data)
            return ticket.owner
        if isinstance(ticket, OwnerTicket):
            _owner_ticket.decode(data)
            return ticket
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RefusedTicketError(f"this is no ticket: {error}", reason="malformed") from None
    raise ArgumentError(f"a ticket is asked for, got a {type(ticket).__name__}")
