"""What keeps an owner: the word of its user, and the views that are alive (inv. 14).

A lease ends when both are true: somebody said "done" (``release()``, leaving a block, or dropping
the last reference to the owner) and no view of its bytes is left.  Views are tensors that torch
may hand around, slice, and destroy in any thread and in the middle of anything, so their end is
only noted here; the consumer acts on it from its loop.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncvmm._core.wire import OwnerFrame
from asyncvmm._errors import ReleasedError

if TYPE_CHECKING:
    from asyncvmm._tensors.plan import Tensor


class Keeper(Protocol):
    """Who makes the views of a lease, and settles it."""

    def view(self, lease: Lease, index: int) -> Tensor: ...

    def clone(self, lease: Lease) -> dict[str, Tensor]: ...

    def say_done(self, lease: Lease, stream: object) -> None: ...

    def say_all_done(self, leases: Sequence[Lease], stream: object) -> None: ...

    def force(self, lease: Lease) -> None: ...

    def drop(self, lease: Lease) -> None: ...

    def record_stream(self, lease: Lease, stream: object) -> None: ...

    def settle_later(self, lease: Lease) -> None:
        """Settle it soon; called from any thread, also from a finaliser."""


class Readiness(msgspec.Struct, eq=False):
    """When the owners of one batch are ready, all together."""

    slot: int
    """The slot whose ready event stands for them: that of the first of them."""
    waited: tuple[int, ...] = ()
    """Device streams that were made to wait for it."""


class Lease(msgspec.Struct, eq=False):
    """One owner in this process.

    A struct, because one is made for every owner and Python's own ``__init__`` takes five times as
    long.
    """

    frame: OwnerFrame
    keeper: Keeper
    ready: Readiness
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    """Views may be taken, and "done" be said, in any thread."""
    offsets: list[int] | None = None
    """Of its features, once more than one is viewed."""
    holder: object = None
    """What every view holds; we hold it while views may be asked for."""
    views: weakref.ref[object] | None = None
    said: bool = False
    """Somebody said "done"."""
    done: bool = False
    """The exporter was told."""
    reason: str = ""
    """Why it was refused, if it was."""
    streams: tuple[int, ...] = ()
    """Device streams that read it."""
    ordered: bool = False
    """One of them has waited for its batch: what is recorded behind them all is behind its copy."""

    @property
    def opened(self) -> bool:
        """True once any view of it was made."""
        return self.views is not None

    @property
    def viewed(self) -> bool:
        """True while any view of it is alive, or may be asked for."""
        return self.views is not None and self.views() is not None

    def open(self, holder: object, stream: int | None) -> object:
        """Keep the object that every view will hold; return the one that is kept.

        ``stream`` reads it, so the release waits for that.  Two threads may come with one holder
        each, and only the one that is watched may have views.
        """
        with self.lock:
            if self.said:
                raise ReleasedError(f"owner {self.frame.key!r} was given back in another thread")
            if self.holder is None:
                self.holder = holder
                self.views = weakref.ref(holder, self._gone)
            if stream is not None and stream not in self.streams:
                self.streams += (stream,)
            return self.holder

    def add_stream(self, stream: int) -> None:
        """Have the release wait for this stream too."""
        with self.lock:
            if stream not in self.streams:
                self.streams += (stream,)

    def say_done(self) -> bool:
        """Note that its user is done; True if no view is left, so that it can be settled now.

        The order matters when the last view dies in another thread meanwhile: our own reference
        goes first and is not mistaken for the last view; whoever comes second sees both.
        """
        with self.lock:
            self.holder = None
            self.said = True
        views = self.views
        return views is None or views() is None

    def _gone(self, _: object) -> None:
        if self.said and not self.done:
            self.keeper.settle_later(self)
