"""The producer's side of a request's life: tensors become tickets, or stay what they were."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from asyncvmm._core.routing import To
from asyncvmm._errors import ArgumentError, ClosedError, OwnerTooLargeError, WouldBlock
from asyncvmm._exporter.exporter import Exporter
from asyncvmm._exporter.exporting import Exported
from asyncvmm._logs import Once, kind_of
from asyncvmm.tickets.requests import Place, each, owners, parcels

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor

logger = logging.getLogger("asyncvmm.tickets")

OnFull = Literal["wait", "host", "raise"]


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """What a transport did so far."""

    prepared: int
    """Requests whose features were replaced by tickets (or host copies)."""
    exported: int
    """Owners."""
    fallbacks: int
    """Features that went as host copies, for want of room (``on_full="host"``)."""
    rolled_back: int
    """Calls that failed or were cancelled half-way, and changed nothing."""
    cancelled: int
    """Owners that were withdrawn by :meth:`FeatureTransport.cancel_for_dispatch`."""


class FeatureTransport:
    """Replaces the tensors in requests by tickets, and takes them back if that fails.

    A request has ``items``; an item has a ``modality`` and the fields ``feature`` and
    ``precomputed_embeddings``, each a tensor or None.  Two or more image, video and audio
    features of one request become one owner; everything else is an owner of its own.

    ``on_full`` says what happens while the pool has no room: "wait" for it (the default: that is
    the backpressure), "raise" WouldBlock, or send what does not fit as a "host" copy in the
    field itself, which is counted and, once per cause, warned of.

    The exporter stays its opener's.  ``async with FeatureTransport(exporter)`` shuts down at the
    end.
    """

    def __init__(self, exporter: Exporter, *, on_full: OnFull = "wait") -> None:
        if on_full not in ("wait", "host", "raise"):
            raise ArgumentError(f"on_full={on_full!r} is unknown; give 'wait', 'host' or 'raise'")
        if not isinstance(exporter, Exporter):
            raise ArgumentError(
                f"a FeatureTransport takes the exporter that asyncvmm.open_exporter() gives, got a "
                f"{type(exporter).__module__}.{type(exporter).__name__}"
            )
        self._exporter = exporter
        self._on_full: OnFull = on_full
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._once = Once(logger)
        self._prepared = self._exported = self._fallbacks = 0
        self._rolled_back = self._cancelled = 0

    async def prepare_for_dispatch(
        self, requests: Iterable[Any], *, to: To = None, stream: object = None
    ) -> None:
        """Export the features of requests and put tickets into their fields.

        ``to`` narrows them to some ranks or one attention group.  The fields are changed when
        everything is exported, so a failure or cancellation half-way leaves every field with its
        tensor and nothing exported.  With "wait" it waits until the whole batch fits at once;
        ArgumentError if it never can.  TypeError for a field that holds a list or tuple, before
        anything is taken; otherwise what ``Exporter.export`` raises.
        """
        if self._closed:
            raise ClosedError("the transport was shut down")
        batch = list(each(requests))
        seen = set[tuple[int, str]]()
        found = [(request, places) for request in batch for places in parcels(request, seen)]
        self._at_work += 1
        self._idle.clear()
        replaced: list[tuple[Place, object]] = []
        exported: list[Exported] = []
        try:
            values = await self._export(found, exported, to, stream)
            for place, value in values:
                before = place.get()
                place.set(value)
                replaced.append((place, before))
        except BaseException:
            for place, before in replaced:
                place.set(before)
            for tickets in exported:
                self._exporter.cancel(tickets.owner)
            self._rolled_back += 1
            raise
        finally:
            self._at_work -= 1
            if not self._at_work:
                self._idle.set()
        self._prepared += len(batch)
        self._exported += len(exported)

    async def _export(
        self,
        found: Sequence[tuple[Any, list[Place]]],
        exported: list[Exported],
        to: To,
        stream: object,
    ) -> list[tuple[Place, object]]:
        """Return what each place is to hold; owners are noted in ``exported`` as they are made."""
        values: list[tuple[Place, object]] = []
        if self._on_full == "wait":
            exported += await self._exporter.export_all(
                [_features(places) for _, places in found],
                keys=[getattr(request, "key", None) for request, _ in found],
                to=to,
                stream=stream,
            )
            for (_, places), tickets in zip(found, exported, strict=True):
                values += zip(places, tickets.values(), strict=True)
            return values
        for request, places in found:
            try:
                tickets = await self._exporter.export_nowait(
                    _features(places), key=getattr(request, "key", None), to=to, stream=stream
                )
            except (WouldBlock, OwnerTooLargeError) as error:
                if self._on_full == "raise":
                    raise
                values += zip(places, await self._copy_to_host(places, error, stream), strict=True)
            else:
                exported.append(tickets)
                values += zip(places, tickets.values(), strict=True)
        return values

    async def _copy_to_host(
        self, places: Sequence[Place], why: Exception, stream: object
    ) -> list[Tensor]:
        # As text: a record that is kept would keep the frames of the error, and their tensors.
        self._once.warning(kind_of(why), "features go as host copies: %s", str(why))
        copies = await self._exporter._to_host([place.get() for place in places], stream)
        self._fallbacks += len(copies)
        return copies

    def cancel_for_dispatch(self, requests: Iterable[Any]) -> int:
        """Withdraw what was exported for requests that never left.

        Returns how many owners could not be: some consumer has redeemed them already (they come
        back as it releases them), or they were withdrawn before.  The tickets in the fields are
        void then; host copies stay.
        """
        failed = 0
        for ticket in owners(requests).values():
            if self._exporter.cancel(ticket):
                self._cancelled += 1
            else:
                failed += 1
        return failed

    def statistics(self) -> TransportStatistics:
        """Return what this transport did so far."""
        return TransportStatistics(
            self._prepared, self._exported, self._fallbacks, self._rolled_back, self._cancelled
        )

    async def shutdown(self) -> None:
        """Take no new requests, and wait for the calls that are at work; again is a no-op.

        What was dispatched stays out until it is redeemed; leaving ``open_exporter`` waits for
        that and gives the memory back.  Cancelled, it stays shut and waits no longer.
        """
        self._closed = True
        await self._idle.wait()

    async def __aenter__(self) -> FeatureTransport:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()


def _features(places: Sequence[Place]) -> dict[str, Tensor]:
    """Return the features of one owner, by names that say where they come from."""
    return {f"{place.field}_{number}": place.get() for number, place in enumerate(places)}
