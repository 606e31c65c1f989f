"""Writing straight into the pool, for code that is not async."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from asyncvmm._errors import ClosedError
from asyncvmm._exporter.reservation import Reservation as AsyncReservation
from asyncvmm._exporter.reservation import WritableOwner as AsyncWritableOwner
from asyncvmm.blocking._acknowledgement import Acknowledgement
from asyncvmm.blocking._exporting import ROOM
from asyncvmm.blocking._thread import seconds

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor
    from asyncvmm.blocking._exporter import Exporter


class WritableOwner:
    """An owner being filled: ``owner["name"]`` is a writable tensor in the pool.

    It means what :class:`asyncvmm.WritableOwner` means.
    """

    def __init__(self, exporter: Exporter, owner: AsyncWritableOwner) -> None:
        self._exporter = exporter
        self._owner = owner

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes."""
        return self._owner.nbytes

    @property
    def slot(self) -> int:
        """The slot that it uses, as its consumers will see it."""
        return self._owner.slot

    @property
    def generation(self) -> int:
        """Which use of that slot it is."""
        return self._owner.generation

    def __getitem__(self, name: str) -> Tensor:
        """Return the feature as a writable tensor; no payload byte is copied."""
        return self._owner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)

    def publish(self, *, metadata: object = None, stream: object = None) -> Acknowledgement:
        """Hand the owner over, after the work queued on ``stream``.

        By default that is the stream that is current in the calling thread.  Raises ReleasedError
        the second time; any other error leaves the loan as it was.
        """
        number = self._exporter._number(stream)

        async def publish() -> Acknowledgement:
            found = self._owner.publish(metadata=metadata, stream=number)
            return Acknowledgement(self._exporter, found)

        return self._exporter._run(publish)


class Reservation:
    """The ``with`` of :meth:`asyncvmm.blocking.Exporter.reserve`; usable once."""

    def __init__(
        self, exporter: Exporter, reservation: AsyncReservation, timeout: float | None
    ) -> None:
        seconds(timeout)
        self._exporter = exporter
        self._reservation = reservation
        self._timeout = timeout
        self._owner: AsyncWritableOwner | None = None

    def __enter__(self) -> WritableOwner:
        try:
            self._exporter._run(self._enter, self._timeout, ROOM)
            assert self._owner is not None
            return WritableOwner(self._exporter, self._owner)
        except BaseException:
            self._give_back()
            raise

    async def _enter(self) -> None:
        # Noted here and not by the caller, who may have been interrupted meanwhile.
        self._owner = await self._reservation.__aenter__()

    def __exit__(self, *exc: object) -> None:
        try:
            self._give_back()
        except BaseException:
            self._give_back()  # it may not have begun; again is a no-op
            raise

    def _give_back(self) -> None:
        owner, exporter = self._owner, self._exporter
        if owner is None or exporter._thread.forked:
            return
        # A closed exporter's pool is gone, and the loan with it.
        with suppress(ClosedError):
            number = exporter._number(None)  # what this thread wrote, on its own stream

            async def give_back() -> None:
                owner._give_back(number)

            exporter._run(give_back)
