"""How long the message about owners can be, before the slots are known that it names."""

from __future__ import annotations

from asyncvmm._core import wire

OWNER_BYTES = 1 + 4 * 9 + 3
"""An owner's array header, four numbers and the header of its metadata, at most."""

NUMBER_BYTES = 9
"""A key that is a number, at most; owners to whom none was given are counted."""

BATCH_BYTES = 5
"""What is around the owners of one message, at most."""


def features_bytes(features: list[wire.Feature]) -> int:
    """Return the bytes that an owner's features take in a message; refuse what none can hold.

    With these features, a number for a key and no metadata an owner always fits one.
    """
    nbytes = len(wire.encode(features))
    check_owners(nbytes + OWNER_BYTES + NUMBER_BYTES)
    return nbytes


def check_owners(nbytes: int) -> None:
    """Refuse owners that take so many bytes, all together, if no message can hold them."""
    if nbytes + BATCH_BYTES > wire.MESSAGE_LIMIT:
        raise wire.too_long(nbytes + BATCH_BYTES)
