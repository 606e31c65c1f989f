"""What keeps an owner: the word of its user, and the views that are alive (inv. 14).

A lease ends when both are true: somebody said "done" (``release()``, leaving a block, or dropping
the last reference to the owner) and no view of its bytes is left.  Views are tensors that torch
may hand around, slice, and destroy in any thread and in the middle of anything, so their end is
only noted here; the consumer acts on it from its loop.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from asyncvmm._core.wire import OwnerFrame
from asyncvmm._errors import ReleasedError


class Keeper(Protocol):
    """Who settles a lease."""

    def settle_later(self, lease: Lease) -> None:
        """Settle it soon; called from any thread, also from a finaliser."""


class Lease:
    """One owner in this process."""

    __slots__ = (
        "__weakref__",
        "done",
        "frame",
        "holder",
        "keeper",
        "lock",
        "offsets",
        "reason",
        "said",
        "streams",
        "views",
        "waited",
    )

    def __init__(self, frame: OwnerFrame, keeper: Keeper) -> None:
        self.frame = frame
        self.keeper = keeper
        self.lock = threading.Lock()  # views may be taken, and "done" be said, in any thread
        self.offsets: list[int] | None = None  # of its features, once more than one is viewed
        self.holder: object = None  # what every view holds; we hold it while views may be asked
        self.views: weakref.ref[object] | None = None
        self.said = False  # somebody said "done"
        self.done = False  # the exporter was told
        self.reason = ""  # why it was refused, if it was
        self.streams: tuple[int, ...] = ()  # device streams that read it
        self.waited: tuple[int, ...] = ()  # device streams that were made to wait for it

    @property
    def opened(self) -> bool:
        """True once any view of it was made."""
        return self.views is not None

    @property
    def viewed(self) -> bool:
        """True while any view of it is alive, or may be asked for."""
        return self.views is not None and self.views() is not None

    def open(self, holder: object) -> object:
        """Keep the object that every view will hold; return the one that is kept.

        Two threads may come with one each, and only the one that is watched may have views.
        """
        with self.lock:
            if self.said:
                raise ReleasedError(f"owner {self.frame.key!r} was given back in another thread")
            if self.holder is None:
                self.holder = holder
                self.views = weakref.ref(holder, self._gone)
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
        return not self.viewed

    def _gone(self, _: object) -> None:
        if self.said and not self.done:
            self.keeper.settle_later(self)
