"""The exporter for code that is not async."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from asyncvmm._core.routing import To
from asyncvmm._exporter.acknowledgement import Require
from asyncvmm._exporter.explaining import Explanation
from asyncvmm._exporter.exporter import Exporter as AsyncExporter
from asyncvmm._exporter.statistics import PoolStatistics
from asyncvmm._types import Key, TensorSpec
from asyncvmm.blocking._acknowledgement import Acknowledgement
from asyncvmm.blocking._exporting import ROOM, Exporting
from asyncvmm.blocking._reservation import Reservation
from asyncvmm.blocking._thread import LoopThread

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor

Leave = Callable[
    [type[BaseException] | None, BaseException | None, TracebackType | None],
    Coroutine[Any, Any, None],
]


class Exporter(Exporting):
    """Owns a bounded pool; open one with :func:`asyncvmm.blocking.open_exporter`."""

    _what = "exporter"

    def __init__(
        self, exporter: AsyncExporter, thread: LoopThread, user: object, leave: Leave
    ) -> None:
        super().__init__(thread, user)
        self.name: str = exporter.name
        """The name it was opened under, as consumers resolve it."""
        self._exporter = exporter
        self._leave = leave

    # -- sending -----------------------------------------------------------------------------

    def send(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        stream: object = None,
        timeout: float | None = None,
    ) -> Acknowledgement:
        """Copy features into one chunk and publish them as one owner.

        Waits for a slot and for room.  The copy is queued on ``stream``, by default the one that
        is current in the calling thread.  The rest is as :meth:`asyncvmm.Exporter.send` says,
        with TimeoutError after ``timeout`` seconds without room: nothing is published then.
        """
        send = partial(
            self._exporter.send,
            features,
            key=key,
            metadata=metadata,
            to=to,
            require=require,
            stream=self._number(stream),
        )
        return Acknowledgement(self, self._run(send, timeout, ROOM))

    def send_nowait(
        self,
        features: Mapping[str, Tensor],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> Acknowledgement:
        """Do as ``send``, but raise WouldBlock instead of waiting for room."""
        send = partial(
            self._exporter.send_nowait,
            features,
            key=key,
            metadata=metadata,
            to=to,
            require=require,
            stream=self._number(stream),
        )
        return Acknowledgement(self, self._run(send))

    def send_all(
        self,
        owners: Sequence[Mapping[str, Tensor]],
        *,
        keys: Sequence[Key | None] = (),
        metadata: Sequence[object] = (),
        to: To = None,
        require: Require = "all",
        stream: object = None,
        timeout: float | None = None,
    ) -> list[Acknowledgement]:
        """Send several owners as one batch, or none; see :meth:`asyncvmm.Exporter.send_all`."""
        send = partial(
            self._exporter.send_all,
            owners,
            keys=keys,
            metadata=metadata,
            to=to,
            require=require,
            stream=self._number(stream),
        )
        return [Acknowledgement(self, ack) for ack in self._run(send, timeout, ROOM)]

    def send_all_nowait(
        self,
        owners: Sequence[Mapping[str, Tensor]],
        *,
        keys: Sequence[Key | None] = (),
        metadata: Sequence[object] = (),
        to: To = None,
        require: Require = "all",
        stream: object = None,
    ) -> list[Acknowledgement]:
        """Do as ``send_all``, but raise WouldBlock instead of waiting until all fit."""
        send = partial(
            self._exporter.send_all_nowait,
            owners,
            keys=keys,
            metadata=metadata,
            to=to,
            require=require,
            stream=self._number(stream),
        )
        return [Acknowledgement(self, ack) for ack in self._run(send)]

    def reserve(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        key: Key | None = None,
        metadata: object = None,
        to: To = None,
        require: Require = "all",
        timeout: float | None = None,
    ) -> Reservation:
        """Make room for features that the caller writes in place; use it with ``with``.

        Entering waits for room as ``send`` does, and gives a
        :class:`asyncvmm.blocking.WritableOwner`.
        """
        self._check()
        reservation = self._exporter.reserve(
            specs, key=key, metadata=metadata, to=to, require=require
        )
        return Reservation(self, reservation, timeout)

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
        self._check()
        reservation = self._exporter.reserve_nowait(
            specs, key=key, metadata=metadata, to=to, require=require
        )
        return Reservation(self, reservation, None)

    # -- looking and waiting -----------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Return what the pool, its owners and its consumers look like now."""

        async def look() -> PoolStatistics:
            return self._exporter.statistics()

        return self._run(look)

    def explain(self) -> Explanation:
        """Return why the next owner would have to wait; see :meth:`asyncvmm.Exporter.explain`."""

        async def look() -> Explanation:
            return self._exporter.explain()

        return self._run(look)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until nothing is out: every published owner's memory is back."""
        self._run(self._exporter.drain, timeout, "all owners to be let go of")

    def wait_attached(self, count: int, timeout: float | None = None) -> None:
        """Wait until ``count`` consumers are attached at once.  Sending need not wait for it."""
        self._run(
            partial(self._exporter.wait_attached, count), timeout, f"{count} attached consumers"
        )

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close as the end of the ``with`` block does; again is a no-op.

        Waits up to ``close_timeout`` seconds for the owners that are out.  Interrupted meanwhile,
        it hangs up at once.
        """
        self._close(partial(self._leave, None, None, None))

    async def leave(self) -> None:
        """Not for users: hang up when the interpreter exits."""
        await self._leave(SystemExit, SystemExit(), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(partial(self._leave, kind, error, trace))

    def __repr__(self) -> str:
        return f"<blocking.Exporter {self.name!r}>"
