"""Writing straight into the pool: an owner whose features the caller fills in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncvmm._core.ledger import Record
from asyncvmm._errors import LocalProtocolError, ReleasedError
from asyncvmm._exporter.acknowledgement import Acknowledgement
from asyncvmm._exporter.terms import Terms, pack_metadata

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Layout, Plan, Tensor


class Lender(Protocol):
    """What a reservation needs of its exporter."""

    async def _acquire(self, nbytes: int) -> Record: ...

    def _acquire_nowait(self, nbytes: int) -> Record: ...

    def _prepare(self, record: Record) -> None: ...

    def _writable(self, record: Record) -> object: ...

    def _view(self, holder: object, layout: Layout, number: int) -> Tensor: ...

    def _publish(
        self, record: Record, layout: Layout, terms: Terms, stream: int
    ) -> Acknowledgement: ...

    def _abandon(self, record: Record, stream: int) -> None: ...

    def _stream(self, stream: object) -> int: ...


class WritableOwner:
    """An owner being filled: ``owner["name"]`` is a writable tensor in the pool.

    ``publish()`` hands it over; leaving the ``async with`` without that gives the memory back,
    once the device has stopped writing (inv. 3).  The tensors must not be written after either:
    the bytes then belong to readers, or to another owner.
    """

    __slots__ = ("_exporter", "_holder", "_plan", "_record", "_terms")

    def __init__(self, exporter: Lender, record: Record, plan: Plan, terms: Terms) -> None:
        self._exporter = exporter
        self._record: Record | None = record
        self._plan = plan
        self._terms = terms
        exporter._prepare(record)
        self._holder: object = exporter._writable(record)

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes."""
        return self._plan.nbytes

    @property
    def slot(self) -> int:
        """The slot that it uses, as its consumers will see it."""
        return self._loan().slot

    @property
    def generation(self) -> int:
        """Which use of that slot it is."""
        return self._loan().generation

    def _loan(self) -> Record:
        if self._record is None:
            raise ReleasedError("this owner was published or given back; its memory is not yours")
        return self._record

    def __getitem__(self, name: str) -> Tensor:
        """Return the feature as a writable tensor; no payload byte is copied."""
        self._loan()
        number = self._plan.layout.numbers[name]
        return self._exporter._view(self._holder, self._plan.layout, number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.layout.numbers)

    def __len__(self) -> int:
        return len(self._plan.layout.numbers)

    def publish(self, *, metadata: object = None, stream: object = None) -> Acknowledgement:
        """Hand the owner over, after the work queued on ``stream`` (default: the current one).

        Raises ReleasedError the second time; any other error leaves the loan as it was.
        """
        if self._record is None:
            raise ReleasedError("this owner was published or given back already")
        terms = self._terms
        if metadata is not None:
            terms = msgspec.structs.replace(terms, metadata=pack_metadata(metadata))
        number = self._exporter._stream(stream)
        ack = self._exporter._publish(self._record, self._plan.layout, terms, number)
        self._record = self._holder = None
        return ack

    def _give_back(self, stream: object = None) -> None:
        """End a loan that was not published, after what ``stream`` (or the current one) writes."""
        if self._record is not None:
            record, self._record, self._holder = self._record, None, None
            self._exporter._abandon(record, self._exporter._stream(stream))


class Reservation:
    """The ``async with`` of :meth:`asyncvmm.Exporter.reserve`; usable once."""

    __slots__ = ("_exporter", "_owner", "_plan", "_terms", "_wait")

    def __init__(self, exporter: Lender, plan: Plan, terms: Terms, *, wait: bool) -> None:
        self._exporter = exporter
        self._plan = plan
        self._terms = terms
        self._wait = wait
        self._owner: WritableOwner | None = None

    async def __aenter__(self) -> WritableOwner:
        if self._owner is not None:
            raise LocalProtocolError("a reservation can be entered once; call reserve() again")
        nbytes = self._plan.nbytes
        if self._wait:
            record = await self._exporter._acquire(nbytes)
        else:
            record = self._exporter._acquire_nowait(nbytes)
        try:
            self._owner = WritableOwner(self._exporter, record, self._plan, self._terms)
        except BaseException:
            self._exporter._abandon(record, self._exporter._stream(None))
            raise
        return self._owner

    async def __aexit__(self, *exc: object) -> None:
        if self._owner is not None:
            self._owner._give_back()
