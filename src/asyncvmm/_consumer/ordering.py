"""Reads come after writes: making streams wait for a batch's ready event (inv. 8)."""

from __future__ import annotations

from asyncvmm._backends.base import ConsumerRegion
from asyncvmm._consumer.lease import Lease
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.ledger import PeerState
from asyncvmm._errors import BackendError, PeerLostError
from asyncvmm._logs import Once, kind_of
from asyncvmm._tensors import DevicePort


class Ordering:
    """The ready events of one consumer's batches."""

    def __init__(
        self, core: ConsumerCore, region: ConsumerRegion, port: DevicePort, once: Once
    ) -> None:
        self._core = core
        self._region = region
        self._current_stream = port.current_stream
        self._lasting = port.lasting
        self._once = once
        self._unopened: dict[int, bytes] = {}  # events that the driver refused, by slot

    def order(self, lease: Lease) -> int:
        """Make the current stream wait for the ready event of the owner's own batch (inv. 8).

        Returns the stream, which the release is to wait for.
        """
        stream = self._current_stream()
        ready = lease.ready
        if stream not in ready.waited:
            if self._core.state is PeerState.CLOSED:
                raise PeerLostError(
                    f"the exporter is gone, so nobody knows whether owner {lease.frame.key!r} "
                    f"was ever completely written; it was not read before",
                    peer="exporter",
                )
            if self._unopened:
                self._open_again(ready.slot)
            self._region.wait_ready(ready.slot, stream)
            if self._lasting(stream):  # else the next one of this number may be another
                ready.waited += (stream,)
        if not lease.ordered:
            self._region.note_read(lease.frame.slot)
            lease.ordered = True
        return stream

    def open_ready(self, slot: int, handle: bytes) -> None:
        """Open a slot's ready event; if the driver refuses, whoever asks for a view is told."""
        try:
            self._region.open_ready(slot, handle)
        except BackendError as error:
            self._once.warning(
                kind_of(error), "the event of slot %d is opened when needed: %s", slot, error
            )
            self._unopened[slot] = handle

    def _open_again(self, slot: int) -> None:
        handle = self._unopened.get(slot)
        if handle is not None:
            self._region.open_ready(slot, handle)
            del self._unopened[slot]
