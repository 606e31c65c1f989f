"""Owners and batches, as a consumer's user sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from asyncvmm._consumer.lease import Lease
from asyncvmm._errors import ReleasedError, RemoteProtocolError
from asyncvmm._fds import Single
from asyncvmm._types import Key

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor


class Owner(Single):
    """A chunk with its features: the unit of release.

    ``owner["name"]`` is a read-only zero-copy ``torch.Tensor``, ordered after the producer's work
    on the stream that is current when it is asked for.  It keeps the owner's memory, also when
    the owner was released: the slot goes back when the owner is released *and* its last view (a
    slice, a DLPack import, a tensor in a global) is gone.  Writing into a view ends the writer:
    docs/writing-into-views.md says how, and the ways out.

    An owner that is dropped unread is refused; ``with owner:`` releases it, on an error too.
    """

    __slots__ = ("_lease",)

    _instead = "owner.clone() makes tensors that can be"

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def key(self) -> Key:
        """The name its producer gave it."""
        return self._lease.frame.key

    @property
    def metadata(self) -> object:
        """The plain data that its producer sent along; None if there was none."""
        data = self._lease.frame.metadata
        if not data:
            return None
        try:
            return msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(
                f"the metadata of owner {self.key!r} cannot be read: {error}"
            ) from None

    @property
    def nbytes(self) -> int:
        """Size of its chunk in bytes."""
        return self._lease.frame.nbytes

    @property
    def slot(self) -> int:
        """The exporter's slot that it uses."""
        return self._lease.frame.slot

    @property
    def generation(self) -> int:
        """Which use of that slot it is."""
        return self._lease.frame.generation

    @property
    def released(self) -> bool:
        """True once it was released; a view may still keep its memory."""
        return self._lease.said

    def __getitem__(self, name: str) -> Tensor:
        """Return one feature; no payload byte is copied.  Raises KeyError, ReleasedError."""
        lease = self._lease
        if lease.said:
            raise ReleasedError(
                f"owner {self.key!r} was released; take views or owner.clone() before that"
            )
        for index, feature in enumerate(lease.frame.features):
            if feature.name == name:
                return lease.keeper.view(lease, index)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(feature.name == name for feature in self._lease.frame.features)

    def __iter__(self) -> Iterator[str]:
        return iter([feature.name for feature in self._lease.frame.features])

    def __len__(self) -> int:
        return len(self._lease.frame.features)

    def keys(self) -> list[str]:
        """Return the names of its features, in the order they were packed."""
        return list(self)

    def items(self) -> list[tuple[str, Tensor]]:
        """Return names and views of all features."""
        return [(name, self[name]) for name in self]

    def clone(self) -> dict[str, Tensor]:
        """Copy the whole owner into memory of this process with one copy; keeps nothing held.

        Host memory is copied at once, GPU memory on the current stream.  The tensors are
        ordinary: writable, and theirs is the only copy.  The owner still is to be released.
        """
        if self._lease.said:
            raise ReleasedError(f"owner {self.key!r} was released; clone it before that")
        return self._lease.keeper.clone(self._lease)

    def record_stream(self, stream: object) -> None:
        """Say that ``stream`` reads this owner too; its release then waits for that work."""
        self._lease.keeper.record_stream(self._lease, stream)

    def release(self, *, stream: object = None, force: bool = False) -> None:
        """Say "I am done".  Not async; does no I/O that could fail; again is a no-op.

        The memory goes back after the work queued on the streams that read the owner (those
        current when views were taken, ``record_stream``, and ``stream``), once its views are
        gone.  ``force=True`` does not wait for views: they then show bytes of other owners, so
        that is for those who know that nobody reads them.  A stream that reads an owner must not
        be destroyed before the release: then nothing can be put behind its work.
        """
        lease = self._lease
        if force:
            lease.keeper.force(lease)
        elif not lease.said:
            lease.keeper.say_done(lease, stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        # May run anywhere, in any thread: only note it.  An owner half made has no lease.
        lease = getattr(self, "_lease", None)
        if lease is not None and not lease.said:
            lease.keeper.drop(lease)

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<Owner {self.key!r} {list(self)} {self.nbytes} bytes, {state}>"


class Batch:
    """One delivery: owners that were published together.

    Iterate over it, or use ``with batch:`` / ``async with batch:``, which release what is left.
    """

    __slots__ = ("owners",)

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.owners = (*map(Owner, leases),)

    @property
    def metadata(self) -> object:
        """The metadata of its first owner."""
        return self.owners[0].metadata

    def __iter__(self) -> Iterator[Owner]:
        return iter(self.owners)

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: int) -> Owner:
        return self.owners[index]

    def release(self, *, stream: object = None) -> None:
        """Release every owner that is left; see :meth:`Owner.release`.

        Those that were read on the same streams share one event, which costs less than one each.
        """
        leases = [owner._lease for owner in self.owners if not owner._lease.said]
        if leases:
            leases[0].keeper.say_all_done(leases, stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Batch {list(self.owners)}>"
