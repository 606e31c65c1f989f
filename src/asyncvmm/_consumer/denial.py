"""What the refusal of a ticket means, as the error that is raised for it."""

from __future__ import annotations

from asyncvmm._core.wire import Denied
from asyncvmm._ticket import OwnerTicket
from asyncvmm._ticket_errors import (
    BorrowedTicketError,
    LostTicketError,
    RefusedTicketError,
    ReleasedTicketError,
    StaleTicketError,
    TicketError,
)


def denial(message: Denied) -> TicketError:
    """Return the error that an exporter's word stands for."""
    what = f"the owner in slot {message.slot}, generation {message.generation},"
    reason = message.reason
    if reason == "stale":
        return StaleTicketError(message.slot, message.generation)
    if reason == "released":
        return ReleasedTicketError(
            f"{what} was released for this consumer before, by itself or in its name, and no "
            f"tensor of it is left here; keep the tensor or the ticket that it was made for"
        )
    if reason == "borrowed":
        return BorrowedTicketError(
            f"{what} is held by this consumer already, as a borrowed owner; use that one"
        )
    if reason == "not_addressed":
        text = f"{what} was exported for other ranks; redeem it there, or export it with to=..."
    elif reason == "unmapped":
        text = f"{what} lies in a part of the pool that could not be mapped here; see the log"
    elif reason == "forged":
        text = f"{what} has another proof than the ticket, or never was; nobody may have it"
    else:
        text = f"the exporter refused {what} because {reason!r}"
    return RefusedTicketError(text, reason=reason)


def lost(owner: OwnerTicket) -> LostTicketError:
    """Return the error for a ticket whose exporter is gone."""
    return LostTicketError(
        f"the exporter {owner.name!r} is gone, and owner {owner.key!r} with it; connect to the "
        f"one that follows it and send the request again",
        peer="exporter",
    )
