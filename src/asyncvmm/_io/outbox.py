"""What waits to be sent: messages in order, joined into packets at the last moment.

Joining late means that messages which pile up behind a full socket leave in few packets.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from asyncvmm._errors import LocalProtocolError
from asyncvmm._fds import OwnedFd
from asyncvmm._io.packets import PACKET_LIMIT, close_all, send

BATCH_MESSAGES = 16
"""Most messages of one packet; as many leave at once, without waiting for the turn to end."""

BATCH_BYTES = 32_768
"""The same in bytes: half a packet, which leaves room for whatever joining them adds."""

Fds: TypeAlias = tuple[OwnedFd, ...]


class Outbox:
    """A queue of messages whose head is at most one encoded packet."""

    __slots__ = ("_batch_bytes", "_frame", "_messages", "fds", "packet", "queue")

    def __init__(self, frame: Callable[[Sequence[bytes]], bytes]) -> None:
        self._frame = frame
        self.queue: deque[bytes | tuple[bytes, Fds]] = deque()
        self.packet: bytes | None = None  # encoded, not yet taken by the kernel
        self.fds: Fds = ()  # that go with it
        self._messages: list[bytes] = []  # what it was joined from
        self._batch_bytes = BATCH_BYTES

    def __len__(self) -> int:
        """Messages that the kernel has not taken yet."""
        return len(self.queue) + len(self._messages)

    def pass_by(self, sock: socket.socket, message: bytes) -> bool:
        """Send one message past the queue; False if others are in it, or if that goes wrong.

        Queued then, it meets the same error again where that is dealt with.
        """
        if self.queue or self.packet is not None:
            return False
        packet = self._frame((message,))
        if not 0 < len(packet) <= PACKET_LIMIT:
            return False
        try:
            send(sock, packet, ())
        except OSError:
            return False
        return True

    def next(self) -> bytes | None:
        """Return the packet to send now, the same one until :meth:`sent`; None if all is sent."""
        if self.packet is not None:
            return self.packet
        queue = self.queue
        if not queue:
            return None
        fds: Fds = ()
        if len(queue) == 1 and type(queue[0]) is bytes:  # where each waits for the last
            messages = [queue[0]]
        else:
            messages = self._all() if len(queue) <= BATCH_MESSAGES else []
        if not messages:
            messages, fds = self._first()
        packet = self._frame(messages)
        if not 0 < len(packet) <= PACKET_LIMIT:
            raise LocalProtocolError(
                f"a packet of {len(packet):,} bytes was to be sent, but 1 to {PACKET_LIMIT:,} "
                f"are allowed; send fewer features or less metadata in one batch"
            )
        if len(messages) == len(queue):
            queue.clear()
        else:
            for _ in messages:
                queue.popleft()
        self.packet, self.fds, self._messages = packet, fds, messages
        return packet

    def _all(self) -> list[bytes]:
        """Return every message if they make one packet, as they mostly do; else none."""
        messages = [entry for entry in self.queue if not isinstance(entry, tuple)]
        whole = len(messages) == len(self.queue) and sum(map(len, messages)) <= self._batch_bytes
        return messages if whole else []

    def _first(self) -> tuple[list[bytes], Fds]:
        """Return the messages of the next packet, and the descriptors that go with them."""
        messages: list[bytes] = []
        size = 0
        for entry in self.queue:
            if isinstance(entry, tuple):
                if messages:
                    break
                return [entry[0]], entry[1]
            size += len(entry)
            if messages and size > self._batch_bytes:
                break
            messages.append(entry)
            if len(messages) == BATCH_MESSAGES:
                break
        return messages, ()

    def sent(self) -> None:
        """Forget the packet that the kernel took, and close the descriptors that went with it."""
        self.packet, self._messages = None, []
        if self.fds:
            close_all(self.fds)
            self.fds = ()

    def split(self) -> bool:
        """Join less from now on, for a socket buffer that cannot hold the packet; say if it helps.

        Only a host that was given less than the usual 208 KiB per socket comes here.
        """
        messages = self._messages
        if len(messages) < 2:
            return False
        self._batch_bytes = sum(map(len, messages)) // 2
        self.queue.extendleft(reversed(messages))
        self.packet, self._messages = None, []
        return True

    def take(self) -> list[bytes]:
        """Return all messages, oldest first, and forget them; close the descriptors."""
        messages = self._messages + [m if isinstance(m, bytes) else m[0] for m in self.queue]
        self.drop()
        return messages

    def drop(self) -> None:
        """Forget everything and close the descriptors."""
        self.sent()
        for entry in self.queue:
            if isinstance(entry, tuple):
                close_all(entry[1])
        self.queue.clear()


def too_many(queued: int, limit: int) -> LocalProtocolError:
    """Return the error for a queue that outgrew its bound (inv. 11)."""
    return LocalProtocolError(
        f"{queued:,} messages wait for a peer that does not read, the limit is {limit:,}; "
        f"the link is dropped"
    )
