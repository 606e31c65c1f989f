"""One socket under one event loop: whole packets, in order, with their descriptors.

The rules of this module:

* Nothing awaits between the socket and ``on_packet``; there is no reader task to cancel.
* Packets leave whole and in the order of :meth:`Link.post` (inv. 11).  What the kernel does not
  take now stays encoded and leaves first once it does.
* A descriptor is owned from the first instant until it is sent, taken or closed (inv. 12).
* A broken connection is read to its end before ``on_end`` is told: the kernel reports a reset
  ahead of the peer's last words.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence

from asyncvmm._errors import LocalProtocolError, PeerLostError, ProtocolError
from asyncvmm._fds import OwnedFd, close_after_fork
from asyncvmm._io.busy import Busy
from asyncvmm._io.due import Due
from asyncvmm._io.outbox import BATCH_BYTES, BATCH_MESSAGES, Outbox, too_many
from asyncvmm._io.packets import PACKET_LIMIT, close_all, receive, send, socket_error

__all__ = ["PACKET_LIMIT", "Link"]

_logger = logging.getLogger("asyncvmm.io")


class Link:
    """One connected SEQPACKET socket: whole packets, in order, with their descriptors.

    Everything here runs on the loop's thread.  ``frame`` joins messages into one packet.
    ``on_packet`` gets a view that is valid during the call only, and a list of descriptors: it
    takes one by removing it, the rest are closed.  ``on_end`` is called once, from the loop,
    when the link ended by itself: with None after the peer's end-of-file, else with the error.
    """

    __slots__ = (
        "_accept_fds", "_accepting", "_blocked", "_buffer", "_closed", "_eof", "_fd", "_finished",
        "_hung_up", "_loop", "_lost", "_on_end", "_outbox", "_pending_bytes", "_queue_limit",
        "_sock", "_telling", "busy", "due", "on_packet",
    )  # fmt: skip

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        frame: Callable[[Sequence[bytes]], bytes],
        on_packet: Callable[[memoryview, list[OwnedFd]], None],
        on_end: Callable[[Exception | None], None],
        accept_fds: int = 0,
        queue_limit: int = 4096,
    ) -> None:
        sock.setblocking(False)
        self._sock = close_after_fork(sock)
        self._fd = sock.fileno()
        self._loop = loop
        self.on_packet, self._on_end = on_packet, on_end  # the first may be replaced
        self._accept_fds, self._queue_limit = accept_fds, queue_limit
        # One byte more than a packet may have, so that a longer one shows.
        self._buffer = memoryview(bytearray(PACKET_LIMIT + 1))
        self._outbox = Outbox(frame)
        self._pending_bytes = 0  # posted since the last flush
        self.due = Due(loop, self._outbox.queue, self.flush)
        self.busy = Busy(loop, 0)  # for whoever has waits to put a better one here
        self._blocked = False  # the kernel took no more; the writer callback is registered
        self._accepting = True  # post() still means something
        self._eof = self._hung_up = self._closed = False
        self._lost: PeerLostError | None = None  # reading on for the last words
        self._finished: asyncio.Future[None] | None = None
        self._telling: asyncio.Handle | None = None

    @property
    def queued(self) -> int:
        """Messages that the kernel has not taken yet."""
        return len(self._outbox)

    @property
    def closed(self) -> bool:
        """Whether the socket is closed or given away."""
        return self._closed

    def start(self) -> None:
        """Begin to read, or go on after a pause.  The reader stays registered until the end."""
        self._loop.add_reader(self._fd, self._on_readable)

    def pause(self) -> None:
        """Read nothing more until :meth:`start`: the kernel keeps what comes, and bounds it."""
        self._loop.remove_reader(self._fd)

    def post(self, message: bytes, fds: Sequence[OwnedFd] = ()) -> None:
        """Queue one message, with its descriptors if it has any; after the end, drop it.

        Messages posted in one loop turn leave as one packet; one with descriptors makes its
        own.  Descriptors are closed here once sent, or when the link ends.
        """
        if not self._accepting:
            return close_all(fds)
        queue = self._outbox.queue
        queue.append((message, tuple(fds)) if fds else message)
        if self._blocked:
            return self._piled()
        self._pending_bytes += len(message)
        if len(queue) >= BATCH_MESSAGES or self._pending_bytes >= BATCH_BYTES:
            self._pump()
        elif not self.due.scheduled:
            self.due.soon()

    def post_now(self, messages: Sequence[bytes]) -> None:
        """Send these now, behind what is queued, as far as the kernel takes them."""
        alone = self._accepting and len(messages) == 1
        if alone and self._outbox.pass_by(self._sock, messages[0]):
            self.due.stop()
        elif self._accepting:
            self._outbox.queue.extend(messages)
            self._piled() if self._blocked else self._pump()

    def flush(self) -> None:
        """Send what is queued, as far as the kernel takes it now."""
        if not self._blocked and not self._closed:
            self._pump()

    async def finish(self, timeout: float) -> bool:  # noqa: ASYNC109 - a deadline for the peer
        """Send what is queued, hang up in order and close; True if the peer hung up too.

        Packets are read until the peer hangs up or ``timeout`` seconds pass: to close with
        unread input would reset the peer.  Messages posted meanwhile are dropped, ``on_end`` is
        not called.  Cancelled, it closes at once.
        """
        if self._closed:
            return self._hung_up
        if self._finished is None:
            self._finished = self._loop.create_future()
            self._accepting = False
            self.flush()
        try:
            # wait() leaves the future alone when it is cancelled or too late.
            await asyncio.wait((self._finished,), timeout=timeout)
        finally:
            self.abort()
        return self._hung_up

    def abort(self) -> None:
        """Close at once; again is a no-op.  ``on_end`` is not called any more."""
        if self._telling is not None:
            self._telling.cancel()
        if not self._closed:
            self._leave()
            self._sock.close()

    def detach(self) -> tuple[socket.socket, list[bytes]]:
        """Send what is queued, leave the loop and give the socket away, still non-blocking.

        What the kernel does not take now is returned, too, to be sent by the new owner.
        ``on_end`` is not called any more.
        """
        self.flush()
        if self._closed:
            raise LocalProtocolError("the link has ended; there is no socket to give away")
        unsent = self._outbox.take()
        self._leave()
        return self._sock, unsent

    # Reading

    def read_pending(self) -> None:
        """Read every packet that is there now: the last words of a peer that has just died."""
        while not self._closed and self._on_readable():
            pass

    def _on_readable(self) -> bool:
        """Read one packet; False if there was none and none can follow at once."""
        fds: list[OwnedFd] = []
        try:
            size, error = receive(self._sock, self._buffer, self._accept_fds, fds)
        except (BlockingIOError, InterruptedError):
            if self._lost is not None:
                self._end(self._lost)
            return False
        except OSError as failure:
            self._fail(failure)
            return failure.errno == errno.ECONNRESET
        if error is not None:
            self._end(error)
        elif size:
            self.busy.came()
            self._deliver(self._buffer[:size], fds)
        else:
            self._on_eof()
        if fds:
            close_all(fds)
        return size > 0

    def _deliver(self, view: memoryview, fds: list[OwnedFd]) -> None:
        try:
            self.on_packet(view, fds)
            view.release()  # a late reader gets an error, not the next packet
        except ProtocolError as error:
            self._end(error)
        except Exception as error:  # handled by half: the two ends have different books
            broken = LocalProtocolError(f"a packet of {len(view):,} bytes met a bug: {error!r}")
            broken.__cause__ = error
            self._end(broken)

    def _on_eof(self) -> None:
        self._eof = True  # it may still listen: it gets what is queued
        self._loop.remove_reader(self._fd)
        self.flush()

    def _drain(self) -> None:  # after a loss, one packet a turn, until nothing is left
        if not self._closed:
            self._on_readable()
            self._loop.call_soon(self._drain)

    # Writing

    def _piled(self) -> None:
        if self.queued > self._queue_limit:
            self._end(too_many(self.queued, self._queue_limit))

    def _pump(self) -> None:
        """Send packets until none is left or the kernel takes no more."""
        self._pending_bytes = 0
        self.due.stop()
        outbox = self._outbox
        try:
            while (packet := outbox.next()) is not None:
                try:
                    send(self._sock, packet, outbox.fds)
                except OSError as failure:
                    if failure.errno == errno.EMSGSIZE and outbox.split():
                        continue
                    raise
                outbox.sent()
        except (BlockingIOError, InterruptedError):
            if not self._blocked:
                self._blocked = True
                self._loop.add_writer(self._fd, self._pump)
        except OSError as failure:
            self._fail(failure)
        except LocalProtocolError as error:
            self._end(error)
        else:
            self._all_sent()

    def _all_sent(self) -> None:
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self._fd)
        if self._eof:
            self._end(self._lost)
        elif self._finished is not None and self._lost is None:
            self._sock.shutdown(socket.SHUT_WR)

    # Ending

    def _fail(self, failure: OSError) -> None:
        """Take a socket's error; after a loss, go on for the peer's last words."""
        if self._lost is not None:
            if failure.errno != errno.ECONNRESET:  # told once per socket, so reading goes on
                self._end(self._lost)
            return
        error = socket_error(failure, self.queued)
        if not isinstance(error, PeerLostError):
            return self._end(error)
        self._lost, self._accepting = error, False
        self._outbox.drop()
        self._unregister()
        self._loop.call_soon(self._drain)

    def _end(self, error: Exception | None) -> None:
        """End by itself: close now, tell from the loop."""
        asked_for = self._closed or self._finished is not None
        hung_up = error is None or isinstance(error, PeerLostError)
        if not self._closed:
            self._hung_up = hung_up
            self.abort()
        if not asked_for:
            self._telling = self._loop.call_soon(self._on_end, error)
        elif not hung_up:
            _logger.warning("an error on a link that is closing anyway: %s", error)

    def _leave(self) -> None:
        self._closed, self._accepting = True, False
        self._unregister()
        self._outbox.drop()
        if (finished := self._finished) is not None and not finished.done():
            finished.set_result(None)

    def _unregister(self) -> None:
        self._blocked = False
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
