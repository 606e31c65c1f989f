"""Every error of the library, in one tree.

::

    AsyncVMMError
      ArgumentError          (ValueError)  an argument that can never work
        InvalidTensorError                 a feature that cannot be packed        .feature
        OwnerTooLargeError                 larger than the pool can ever be       .needed .limit
        AttentionGroupError                ranks that do not exist  .start .end .consumer_count
      ClosedError            (anyio.ClosedResourceError)  this side closed it
      EndOfStream            (anyio.EndOfStream)          the exporter said goodbye
      WouldBlock             (anyio.WouldBlock)           a *_nowait call found nothing
      PeerLostError          (anyio.BrokenResourceError)  the other process went   .peer .lost
      HandshakeError                       the two ends do not fit                .reason
        ExporterNotFoundError              nobody listens under that name         .name
        NameInUseError                     a live exporter has the name           .name .pid
        AccessDeniedError                  another user's process                 .uid .allowed
        VersionMismatchError               other versions        .ours .theirs
        RankError                          taken or out of range .rank .consumer_count
        ExporterLimitError                 its process's open-file limit is met   .limit .used
      ProtocolError
        LocalProtocolError                 we broke the rules: a bug here
        RemoteProtocolError                they broke the rules: the link is dropped
      DeliveryError                        not every consumer let go in order     .outcome
      ReleasedError                        an owner was used after it was given back
      TicketError  (_ticket_errors.py)     a ticket cannot be redeemed
        ForeignTicketError                 another exporter made it       .made_by .attached_to
        StaleTicketError                   its owner is over              .slot .generation
        RefusedTicketError                 forged, or not for this consumer       .reason
        BorrowedTicketError                this consumer holds its owner already
        ReleasedTicketError (ReleasedError)    released here without having been copied
        LostTicketError     (PeerLostError)    its exporter is gone
        PackedReleaseError  (RuntimeError)     one member cannot be released alone
      DescriptorLimitError                 the open-file limit cut a descriptor   .limit .used
      ForkError                            used in a process it was not made in   .made_in .used_in
      CopyError            (TypeError)     one of a kind was to be copied or pickled        .kind
      BackendError                         memory or driver failed                .call .code
        DeviceLostError                    a fault ended this process's use of the GPU
        PoolMemoryError                    it is not there       .asked .available .where

Match on types and attributes, never on text.  The anyio bases are there so that code written
against anyio's streams keeps working; nothing here derives from ``OSError``, because a socket
failure and a refusal must not be confused.
"""

from __future__ import annotations

import anyio


class AsyncVMMError(Exception):
    """Root of every error this library raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # By class, text and attributes: constructors differ, and an error must survive a pool.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(
    kind: type[AsyncVMMError], args: tuple[object, ...], attributes: dict[str, object]
) -> AsyncVMMError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ArgumentError(AsyncVMMError, ValueError):
    """An argument that can never work; nothing was changed."""


class InvalidTensorError(ArgumentError):
    """A feature that cannot be packed; ``feature`` names it."""

    def __init__(self, message: str, *, feature: str) -> None:
        super().__init__(message)
        self.feature = feature


class OwnerTooLargeError(ArgumentError):
    """An owner that is larger than the pool can ever be.

    ``needed`` and ``limit`` are bytes.
    """

    def __init__(self, needed: int, limit: int, *, what: str = "pool") -> None:
        super().__init__(
            f"the owner needs {needed:,} bytes in one piece, but the {what} can never hold more "
            f"than {limit:,}; open the exporter with a larger max_pool_bytes or send the "
            f"features as several owners"
        )
        self.needed = needed
        self.limit = limit


class AttentionGroupError(ArgumentError):
    """An attention group that reaches past the ranks of the route.

    The group is ``range(start, end)``; ranks are ``range(consumer_count)``.
    """

    def __init__(self, start: int, end: int, consumer_count: int) -> None:
        super().__init__(
            f"attention group range [{start}, {end}) is outside consumer_count={consumer_count}"
        )
        self.start = start
        self.end = end
        self.consumer_count = consumer_count
        self.add_note(
            f"the exporter was opened for {consumer_count} ranks, and others are running; open it "
            f"with Broadcast(consumer_count) of the ranks that take part, at least {end} here, "
            f"and open it anew when the world size changes"
        )


class ClosedError(AsyncVMMError, anyio.ClosedResourceError):
    """This side closed the object before the call."""


class EndOfStream(AsyncVMMError, anyio.EndOfStream):
    """The exporter said goodbye: no further batch will come."""


class WouldBlock(AsyncVMMError, anyio.WouldBlock):
    """A ``*_nowait`` call would have had to wait."""


class PeerLostError(AsyncVMMError, anyio.BrokenResourceError):
    """The other process vanished, or its socket did, without a goodbye.

    ``peer`` says who, in words.  ``lost`` is how many batches had come from it and were not
    received; what it had not yet sent went with it uncounted.
    """

    def __init__(self, message: str, *, peer: str = "", lost: int = 0) -> None:
        super().__init__(message)
        self.peer = peer
        self.lost = lost


class HandshakeError(AsyncVMMError):
    """The two ends do not fit together; ``reason`` is a stable word for programs."""

    def __init__(self, message: str, *, reason: str = "handshake") -> None:
        super().__init__(message)
        self.reason = reason


class ExporterNotFoundError(HandshakeError):
    """Nobody listens under that name."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message, reason="not_found")
        self.name = name


class NameInUseError(HandshakeError):
    """A live exporter has the name; ``pid`` is 0 if it lives in another pid namespace."""

    def __init__(self, message: str, *, name: str, pid: int) -> None:
        super().__init__(message, reason="name_in_use")
        self.name = name
        self.pid = pid


class AccessDeniedError(HandshakeError):
    """The peer runs as a user that may not connect."""

    def __init__(self, message: str, *, uid: int = -1, allowed: tuple[int, ...] = ()) -> None:
        super().__init__(message, reason="access_denied")
        self.uid = uid
        self.allowed = allowed


class VersionMismatchError(HandshakeError):
    """The two ends speak different protocol versions."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"this end speaks protocol version {ours}, the other end {theirs}; "
            f"install the same asyncvmm release on both",
            reason="version",
        )
        self.ours = ours
        self.theirs = theirs


class RankError(HandshakeError):
    """A rank that is taken, out of range, or missing."""

    def __init__(self, message: str, *, rank: int | None, consumer_count: int | None) -> None:
        super().__init__(message, reason="rank")
        self.rank = rank
        self.consumer_count = consumer_count


class ExporterLimitError(HandshakeError):
    """The exporter's process has no descriptor left for another consumer; it serves on."""

    def __init__(self, message: str, *, limit: int, used: int) -> None:
        super().__init__(message, reason="descriptor_limit")
        self.limit = limit
        self.used = used


class ProtocolError(AsyncVMMError):
    """A rule of the protocol was broken; see the two children for by whom."""


class LocalProtocolError(ProtocolError):
    """This side broke the rules: a bug here, or a caller's misuse of a loan."""


class RemoteProtocolError(ProtocolError):
    """The other side broke the rules; its link is dropped, nothing else is touched."""


class DeliveryError(AsyncVMMError):
    """Not every consumer that was to see the owner let go of it in order.

    ``outcome`` is the :class:`asyncvmm.Outcome` that says who did what.
    """

    def __init__(self, message: str, *, outcome: object) -> None:
        super().__init__(message)
        self.outcome = outcome


class ReleasedError(AsyncVMMError):
    """An owner or a loan was used after it had been given back."""


class DescriptorLimitError(AsyncVMMError):
    """The kernel cut off a descriptor because this process may not hold another."""

    def __init__(self, limit: int, used: int) -> None:
        super().__init__(
            f"a descriptor was lost at the open-file limit: {used} of {limit} are in use here; "
            f"raise the limit (ulimit -n) or close some files, then connect again"
        )
        self.limit = limit
        self.used = used


class ForkError(AsyncVMMError):
    """An exporter or consumer was used in a forked child; nothing of it works there."""

    def __init__(self, what: str, made_in: int, used_in: int) -> None:
        super().__init__(
            f"this {what} was opened in process {made_in} and used in its child {used_in}; "
            f"open a new one in the child, or start processes with spawn"
        )
        self.made_in = made_in
        self.used_in = used_in


class CopyError(AsyncVMMError, TypeError):
    """Something that stands for memory or sockets was to be copied or pickled.

    ``kind`` is the name of its type.
    """

    def __init__(self, kind: str, instead: str) -> None:
        super().__init__(f"there is one of each {kind}, so it is not copied or pickled; {instead}")
        self.kind = kind


class BackendError(AsyncVMMError):
    """A memory or driver call failed.

    ``call`` names it, ``code`` is what it answered.
    """

    def __init__(self, message: str, *, call: str = "", code: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code


class DeviceLostError(BackendError):
    """A fault, under MPS of any process on the GPU, ended this one's use of it: start anew."""


class PoolMemoryError(BackendError):
    """The memory asked for is not there; nothing was kept."""

    def __init__(self, asked: int, available: int, where: str) -> None:
        super().__init__(
            f"a pool of {asked:,} bytes was asked for, but only {available:,} bytes are "
            f"available in {where}; ask for less or make room",
            call="create_pool",
            code="no_memory",
        )
        self.asked = asked
        self.available = available
        self.where = where


class OwnersOutstandingWarning(UserWarning):
    """An exporter was closed while consumers still held owners; the text says who and how old."""
