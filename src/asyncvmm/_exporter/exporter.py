"""The exporter as its user sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from asyncvmm._core.routing import Ranks, To
from asyncvmm._errors import ArgumentError
from asyncvmm._exporter.acknowledgement import Acknowledgement, Require
from asyncvmm._exporter.explaining import Explanation, explain
from asyncvmm._exporter.exporting import Exporting
from asyncvmm._exporter.reporting import report
from asyncvmm._exporter.reservation import Reservation
from asyncvmm._exporter.statistics import PoolStatistics
from asyncvmm._types import Key, TensorSpec, is_int

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor


class Exporter(Exporting):
    """Owns a bounded pool and hands out chunks of it; open one with ``open_exporter``.

    Every method is to be called on the event loop it was opened on; with ``debug=True`` what sends
    raises LocalProtocolError in another thread, which is not looked at otherwise.  Everything
    awaited here may be cancelled at any point: a cancelled call loses neither a slot nor a byte
    (inv. 9).
    """

    # -- sending -----------------------------------------------------------------------------

    async def send(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> Acknowledgement:
        """Copy features into one chunk and publish them as one owner.

        Waits for a slot and for room (first come, first served); returns once the copy is queued
        on ``stream`` (default: the one that is current now), and the sources may be freed then.
        ``metadata`` is any value of plain data (None, bool, numbers, text, bytes, lists,
        mappings).  ``to`` narrows a Broadcast to some ranks.  ``require`` is what awaiting the
        acknowledgement asks of the consumers: "all" of them, "any", or "none".

        Raises InvalidTensorError (it names the feature), OwnerTooLargeError, ArgumentError and
        RankError before anything is taken; ClosedError if the exporter closes while it waits, and
        DeviceLostError once a fault has ended this process's use of the GPU.
        Cancelled, it publishes nothing, and the chunk returns once no copy touches it any more.
        """
        number = self._current_stream() if stream is None else self._stream(stream)
        plan = self._plan_tensors(features)
        terms = self._terms(plan, key, metadata, to, require)
        if self._turn.over:
            await self._breathe()
        record = None if self._queue else self._core.reserve(plan.nbytes)
        if record is None:
            record = await self._acquire(plan.nbytes)
        if self._copies_slowly(plan):
            return await self._fill_elsewhere(record, plan, terms, number)
        return self._fill(record, plan, terms, number)

    async def send_nowait(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> Acknowledgement:
        """Do as ``send``, but raise WouldBlock instead of waiting for room.

        It is still awaited, because a large copy leaves the event loop.
        """
        number = self._current_stream() if stream is None else self._stream(stream)
        plan = self._plan_tensors(features)
        terms = self._terms(plan, key, metadata, to, require)
        record = self._acquire_nowait(plan.nbytes)
        if self._copies_slowly(plan):
            return await self._fill_elsewhere(record, plan, terms, number)
        return self._fill(record, plan, terms, number)

    def reserve(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
    ) -> Reservation:
        """Make room for features that the caller writes in place; use it with ``async with``.

        Entering waits for room, as ``send`` does, and gives a :class:`WritableOwner`.
        """
        plan = self._plan_specs(specs)
        terms = self._terms(plan, key, metadata, to, require)
        return Reservation(self, plan, terms, wait=True)

    def reserve_nowait(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
    ) -> Reservation:
        """Do as ``reserve``, but entering raises WouldBlock instead of waiting."""
        plan = self._plan_specs(specs)
        terms = self._terms(plan, key, metadata, to, require)
        return Reservation(self, plan, terms, wait=False)

    # -- looking and waiting -----------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Return what the pool, its owners and its consumers look like now."""
        return report(self)

    def explain(self) -> Explanation:
        """Return why the next owner would have to wait: what lacks, who keeps it, since when.

        ``str()`` of it is one line that also says what would free it.  A call that has waited for
        ``explain_after`` seconds has the same line logged, once per cause, by the logger
        ``asyncvmm.exporter``.
        """
        return explain(self)

    async def drain(self) -> None:
        """Wait until nothing is out: every published owner's memory is back."""
        self._guard()
        with self._connections.busy:
            await self._until_idle()

    async def wait_attached(self, count: int) -> None:
        """Wait until ``count`` consumers are attached at once.  Sending need not wait for it.

        Raises ArgumentError for more than the ranks of a Broadcast, who can never be here at once.
        """
        if not is_int(count) or count < 0:
            raise ArgumentError(f"count={count!r} must be an int of 0 or more: how many consumers")
        self._guard()
        route = self._core.route
        if isinstance(route, Ranks) and count > route.consumer_count:
            raise ArgumentError(
                f"count={count} consumers can never be attached at once: this exporter has "
                f"consumer_count={route.consumer_count}"
            )
        await self._connections.wait_attached(count, self._guard)
