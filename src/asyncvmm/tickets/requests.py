"""The shape of requests, and where in them tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncvmm._errors import ArgumentError
from asyncvmm._ticket import Ticket

PACKED_MODALITIES = frozenset(("image", "video", "audio"))
"""Features of these travel together, if a request has several."""

FEATURE, EMBEDDINGS = "feature", "precomputed_embeddings"
FIELDS = (FEATURE, EMBEDDINGS)
"""The fields of an item that may hold a tensor."""


@dataclass(slots=True)
class FeatureItem:
    """One item of a request.  Any object with these attributes serves as well.

    The two fields hold a tensor or None, and a :class:`Ticket` while they are under way.
    """

    modality: Any
    """"image", "video", "audio" or another word; or an enum whose value or name is one."""
    feature: Any = None
    precomputed_embeddings: Any = None


@dataclass(slots=True)
class FeatureRequest:
    """One request: its items.  Any object with an attribute ``items`` serves as well."""

    items: list[Any] = field(default_factory=list)
    key: str | int | None = None
    """The key of its owners, as statistics and traces show it."""


class Place:
    """One field of one item."""

    __slots__ = ("field", "item")

    def __init__(self, item: Any, name: str) -> None:
        self.item = item
        self.field = name

    def get(self) -> Any:
        """Return what the field holds."""
        return getattr(self.item, self.field)

    def set(self, value: object) -> None:
        """Have the field hold something else."""
        setattr(self.item, self.field, value)


def modality(item: Any) -> str:
    """Return an item's modality as a lower-case word."""
    found = item.modality
    for word in (found, getattr(found, "value", None), getattr(found, "name", None)):
        if isinstance(word, str):
            return word.lower()
    raise ArgumentError(f"an item's modality is a word, as 'image', or an enum of such; {found!r}")


def each(requests: Iterable[Any]) -> Iterable[Any]:
    """Return the requests of a batch; refuse what is none, such as one request by itself."""
    if not isinstance(requests, Iterable):
        raise ArgumentError(
            f"a batch of requests is asked for, got a {type(requests).__name__}; give one request "
            f"as [request]"
        )
    return requests


def places(request: Any) -> Iterator[Place]:
    """Return every field of a request that holds something."""
    for item in items(request):
        for name in FIELDS:
            if getattr(item, name, None) is not None:
                yield Place(item, name)


def items(request: Any) -> Iterable[Any]:
    """Return a request's items; refuse what has none."""
    found = getattr(request, "items", None)
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise ArgumentError(
            f"a request has its items in .items, as asyncvmm.tickets.FeatureRequest has; got a "
            f"{type(request).__name__}"
        )
    return found


def parcels(request: Any, seen: set[tuple[int, str]]) -> list[list[Place]]:
    """Return what is to be exported: each list of places is one owner.

    Image, video and audio features of a request travel together, so two or more are one owner;
    everything else travels alone.  ``seen`` has the fields that are in a parcel already.  Raises
    TypeError for a field that holds a list or tuple.
    """
    together: list[Place] = []
    alone: list[list[Place]] = []
    for place in places(request):
        value = place.get()
        known = (id(place.item), place.field)
        if isinstance(value, Ticket) or known in seen:
            continue  # prepared before, or the same item a second time
        seen.add(known)
        if isinstance(value, list | tuple):
            raise TypeError(
                f"{place.field} of an item ({modality(place.item)}) holds a "
                f"{type(value).__name__}; it takes one tensor: concatenate them, or make an item "
                f"of each"
            )
        if place.field == FEATURE and modality(place.item) in PACKED_MODALITIES:
            together.append(place)
        else:
            alone.append([place])
    return [together, *alone] if together else alone


def owners(requests: Iterable[Any]) -> dict[tuple[bytes, int, int], Ticket]:
    """Return one ticket of each owner that the requests' fields refer to."""
    found: dict[tuple[bytes, int, int], Ticket] = {}
    for request in each(requests):
        for place in places(request):
            ticket = place.get()
            if isinstance(ticket, Ticket):
                owner = ticket.owner
                found.setdefault((owner.exporter, owner.slot, owner.generation), ticket)
    return found
