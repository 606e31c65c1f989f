"""The errors about tickets: a branch of the tree in :mod:`asyncvmm._errors`."""

from __future__ import annotations

from asyncvmm._errors import AsyncVMMError, PeerLostError, ReleasedError


class TicketError(AsyncVMMError):
    """A ticket cannot be redeemed, released or cancelled; the children say why."""


class ForeignTicketError(TicketError):
    """Another exporter made the ticket.

    ``made_by`` is that exporter's name, ``attached_to`` the one that was asked.
    """

    def __init__(self, made_by: str, attached_to: str) -> None:
        super().__init__(
            f"the ticket was made by an exporter named {made_by!r} that is not the one asked, "
            f"{attached_to!r}; redeem it with a consumer of its own exporter (one that was "
            f"restarted is another: its tickets are void, send the request again)"
        )
        self.made_by = made_by
        self.attached_to = attached_to


class StaleTicketError(TicketError):
    """The ticket's owner is over: cancelled, or settled by everybody it was for."""

    def __init__(self, slot: int, generation: int) -> None:
        super().__init__(
            f"the owner of this ticket (slot {slot}, generation {generation}) is over: it was "
            f"cancelled, or everybody it was for has let go of it; send the request again"
        )
        self.slot = slot
        self.generation = generation


class RefusedTicketError(TicketError):
    """The ticket is no ticket of this exporter, or not one for this consumer.

    ``reason`` is a stable word: "malformed", "forged", "not_addressed" or "unmapped".
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BorrowedTicketError(TicketError):
    """This consumer holds the ticket's owner already, as a borrowed one."""


class ReleasedTicketError(TicketError, ReleasedError):
    """This consumer's share of the ticket's owner was released, and no tensor of it is left."""


class LostTicketError(TicketError, PeerLostError):
    """The ticket's exporter is gone, and the owner with it."""


class PackedReleaseError(TicketError, RuntimeError):
    """One feature of several in an owner cannot be released by itself."""

    def __init__(self) -> None:
        super().__init__("Packed CUDA VMM features must be reconstructed before release")
