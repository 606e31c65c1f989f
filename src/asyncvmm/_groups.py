"""Attention groups: which ranks one rank stands for.

With data-parallel attention each group of an LLM's ranks sees requests of its own.  A group is the
contiguous range of ranks ``[cp_rank * tp_size, cp_rank * tp_size + tp_size)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncvmm._errors import ArgumentError, AttentionGroupError
from asyncvmm._types import is_int


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """The ranks that share one request, as seen by one of them.

    ``cp_rank`` is the rank's attention context-parallel rank, ``tp_size`` the size of its
    attention tensor-parallel group and ``tp_rank`` its place in that group.  The same object
    addresses a batch (``send(..., to=group)``; ``tp_rank`` does not matter there) and says for
    whom a consumer acknowledges (``count=group.tp_size``).
    """

    cp_rank: int
    tp_size: int
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for name, least in (("cp_rank", 0), ("tp_size", 1), ("tp_rank", 0)):
            value = getattr(self, name)
            if not is_int(value) or value < least:
                raise ArgumentError(f"{name}={value!r} must be an int of {least} or more")
        if self.tp_rank >= self.tp_size:
            raise ArgumentError(
                f"tp_rank={self.tp_rank} is not in a group of tp_size={self.tp_size}; "
                f"it is from 0 to {self.tp_size - 1}"
            )

    @property
    def start(self) -> int:
        """The group's first rank."""
        return self.cp_rank * self.tp_size

    @property
    def end(self) -> int:
        """One past the group's last rank."""
        return self.start + self.tp_size

    @property
    def slot(self) -> int:
        """This rank's own place among all: the ``rank`` to connect with."""
        return self.start + self.tp_rank

    def ranks(self, consumer_count: int) -> range:
        """Return the group's ranks.

        Raises AttentionGroupError (a ValueError) if ``consumer_count`` ranks do not hold them all.
        """
        if self.end > consumer_count:
            raise AttentionGroupError(self.start, self.end, consumer_count)
        return range(self.start, self.end)


def acknowledged_ranks(
    count: int, *, rank: int, consumer_count: int, group: AttentionGroup | None = None
) -> range:
    """Return the ranks that an acknowledgement of ``count`` by ``rank`` stands for.

    ``count`` is 1 (the rank itself), ``group.tp_size`` (its group), or ``consumer_count`` (all).
    Raises ArgumentError (a ValueError) for any other, and AttentionGroupError for a group that
    reaches past ``consumer_count``.
    """
    if not is_int(count) or count < 1:
        raise ArgumentError(f"an acknowledgement stands for at least 1 rank, got count={count!r}")
    if group is not None:
        if not isinstance(group, AttentionGroup):
            raise ArgumentError(
                f"group={group!r:.80} is no group; give asyncvmm.AttentionGroup(...)"
            )
        members = group.ranks(consumer_count)
        if group.slot != rank:
            raise ArgumentError(
                f"{group} is that of rank {group.slot}, but this consumer is attached as rank "
                f"{rank}; connect with rank=group.slot"
            )
        if count == group.tp_size:
            return members
    if count == 1:
        return range(rank, rank + 1)
    if count == consumer_count:
        return range(consumer_count)
    size = "no group was given" if group is None else str(group.tp_size)
    raise ArgumentError(
        f"count={count} is none of the three allowed: 1 (this rank), the size of its attention "
        f"group ({size}), or consumer_count ({consumer_count}, all ranks)"
    )
