"""Making tickets, for code that is not async."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from asyncvmm._core.routing import To
from asyncvmm._exporter.acknowledgement import Acknowledgement as AsyncAcknowledgement
from asyncvmm._exporter.acknowledgement import Require
from asyncvmm._exporter.exporter import Exporter as AsyncExporter
from asyncvmm._ticket import OwnerTicket, Ticket, Tickets
from asyncvmm._types import Key
from asyncvmm.blocking._acknowledgement import Acknowledgement
from asyncvmm.blocking._facade import Facade

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor

ROOM = "room; statistics() says who has it"


class Exporting(Facade):
    """The part of a blocking exporter that makes tickets."""

    _exporter: AsyncExporter

    def export(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        stream: object = None,
        timeout: float | None = None,
    ) -> Tickets[Acknowledgement]:
        """Copy features into one chunk and return a ticket for each.

        It waits as ``send`` does; the rest is as :meth:`asyncvmm.Exporter.export` says.
        """
        export = partial(
            self._exporter.export,
            features,
            key=key,
            metadata=metadata,
            to=to,
            require=require,
            stream=self._number(stream),
        )
        return self._exported(self._run(export, timeout, ROOM))

    def export_nowait(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> Tickets[Acknowledgement]:
        """Do as ``export``, but raise WouldBlock instead of waiting for room."""
        export = partial(
            self._exporter.export_nowait,
            features,
            key=key,
            metadata=metadata,
            to=to,
            require=require,
            stream=self._number(stream),
        )
        return self._exported(self._run(export))

    def export_all(
        self,
        owners: Sequence[Mapping[str, Tensor]],
        *,
        keys: Sequence[Key | None] = (),
        to: To = None,
        require: Require = "all",
        stream: object = None,
        timeout: float | None = None,
    ) -> list[Tickets[Acknowledgement]]:
        """Export several owners, or none of them; see :meth:`asyncvmm.Exporter.export_all`."""
        export = partial(
            self._exporter.export_all,
            owners,
            keys=keys,
            to=to,
            require=require,
            stream=self._number(stream),
        )
        return [self._exported(each) for each in self._run(export, timeout, ROOM)]

    def cancel(self, ticket: Ticket | OwnerTicket) -> bool:
        """Withdraw an exported owner, by any of its tickets; again is a no-op.

        Returns and raises what :meth:`asyncvmm.Exporter.cancel` does.
        """

        async def cancel() -> bool:
            return self._exporter.cancel(ticket)

        return self._run(cancel)

    def _exported(self, found: Tickets[AsyncAcknowledgement]) -> Tickets[Acknowledgement]:
        return Tickets(dict(found), Acknowledgement(self, found.acknowledgement))

    def _number(self, stream: object) -> int:
        """Return the stream that is meant; the current one is the calling thread's own."""
        self._check()
        return self._exporter._stream(stream)
