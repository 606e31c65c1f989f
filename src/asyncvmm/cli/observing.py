"""Looking at exporters from outside, over their own sockets, as one that may only look."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from asyncvmm._core import wire
from asyncvmm._core.wire import Snapshot
from asyncvmm._errors import (
    AccessDeniedError,
    AsyncVMMError,
    ExporterNotFoundError,
    HandshakeError,
    PeerLostError,
)
from asyncvmm._exporter.latencies import Latencies
from asyncvmm._io.binding import new_socket
from asyncvmm._io.fitting import fitting
from asyncvmm._io.liveness import peer_credentials
from asyncvmm._io.names import Address, private_folder, resolve
from asyncvmm._io.packets import PACKET_LIMIT

ABSTRACT = "@asyncvmm"
"""How the abstract names begin among which exporters are looked for; the demo's do."""


class Observer:
    """One exporter that is looked at."""

    def __init__(self, address: Address, secret: bytes = b"") -> None:
        self.label = address.display
        self.now: Snapshot | None = None
        """The newest answer."""
        self.before: Snapshot | None = None
        """The one before that, of the same exporter."""
        self.answered = 0.0
        self._question = wire.encode_greeting(wire.Observe(secret))
        self._asked = False
        self.pid = 0
        """Its process, by the kernel's word; 0 if it lives in another pid namespace."""
        self._sock = new_socket()
        try:
            with fitting(address) as sockaddr:
                self._sock.connect(sockaddr)
            self.pid = peer_credentials(self._sock)[0]
        except BlockingIOError:
            self._sock.close()
            raise HandshakeError(
                f"{self.label!r} does not accept connections now; its process may stand still",
                reason="busy",
            ) from None
        except OSError as error:
            self._sock.close()
            raise _not_there(self.label, error) from error
        except AsyncVMMError:
            self._sock.close()
            raise

    def fileno(self) -> int:
        """Return the socket's descriptor, to be polled."""
        return self._sock.fileno()

    def ask(self) -> None:
        """Ask how things stand, unless the last question is not answered yet."""
        if not self._asked:
            try:
                self._sock.send(self._question, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost() from error
            self._asked = True

    @property
    def waits(self) -> bool:
        """Whether a question is not answered yet."""
        return self._asked

    def read(self) -> None:
        """Take the answer that has come; raise if it is a refusal, or the end."""
        try:
            packet = self._sock.recv(PACKET_LIMIT)
        except OSError as error:
            raise self._lost() from error
        if not packet:
            raise self._lost()
        answer = wire.decode_greeting(packet)
        if isinstance(answer, wire.Rejected):
            kind = AccessDeniedError if answer.reason == "access_denied" else HandshakeError
            raise kind(f"{self.label!r} refuses: {answer.text}")
        if not isinstance(answer, Snapshot):
            raise HandshakeError(f"{self.label!r} answered with a {type(answer).__name__}")
        same = self.now is not None and self.now.exporter == answer.exporter
        self.before, self.now = self.now if same else None, answer
        self._asked = False
        self.answered = monotonic()

    def close(self) -> None:
        """Hang up; again is a no-op."""
        self._sock.close()

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"the exporter {self.label!r} is gone", peer=self.label)


class Watch:
    """Several exporters: those named, or all that are found now and later."""

    def __init__(self, names: Iterable[str], secret: bytes = b"") -> None:
        self._secret = secret
        self._named = [resolve(name) for name in names]
        self._known: dict[str, Observer] = {}

    def look(self, seconds: float) -> list[Observer]:
        """Ask everybody, wait so long for the answers; return who has ever answered.

        Whoever is named and cannot be reached, or refuses, raises; of those that were found for
        themselves it is only left out.
        """
        for address in self._named or found():
            if address.sockaddr not in self._known:
                with self._leaving_out(address.sockaddr):
                    self._known[address.sockaddr] = Observer(address, self._secret)
        for key, observer in list(self._known.items()):
            with self._leaving_out(key):
                observer.ask()
        self._take(monotonic() + seconds)
        return [each for each in self._known.values() if each.now or each.waits]

    def _take(self, deadline: float) -> None:
        poll = select.poll()
        waiting = {each.fileno(): key for key, each in self._known.items() if each.waits}
        for number in waiting:
            poll.register(number, select.POLLIN)
        while waiting:
            left = deadline - monotonic()
            ready = poll.poll(max(0.0, left * 1000))
            for number, _ in ready:
                poll.unregister(number)
                key = waiting.pop(number)
                with self._leaving_out(key):
                    self._known[key].read()
            if not ready and left <= 0:
                return

    def _leaving_out(self, key: str) -> _LeavingOut:
        return _LeavingOut(self, key)

    def drop(self, key: str) -> bool:
        """Forget one; say whether that is fine, because it was found and not named."""
        gone = self._known.pop(key, None)
        if gone is not None:
            gone.close()
        return not self._named

    def close(self) -> None:
        """Hang up on all of them."""
        for observer in self._known.values():
            observer.close()
        self._known.clear()


class _LeavingOut:
    """Leaves out an exporter that cannot be looked at, if nobody named it."""

    def __init__(self, watch: Watch, key: str) -> None:
        self._watch = watch
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, AsyncVMMError) and self._watch.drop(self._key)


def found() -> list[Address]:
    """Return where exporters may be: this user's private folder, and our abstract names."""
    folder = Path(private_folder())
    addresses = [
        Address(node.name.removesuffix(".sock"), str(node), "name")
        for node in sorted(folder.glob("*.sock"))
    ]
    with suppress(OSError):
        table = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
        lines = table.splitlines()[1:]
        names = {fields[7] for line in lines if len(fields := line.split()) == 8 and _ours(fields)}
        addresses += [Address(name, "\0" + name[1:], "abstract") for name in sorted(names)]
    return addresses


def _ours(fields: list[str]) -> bool:
    """Say whether a line of /proc/net/unix is a listening SEQPACKET socket with such a name."""
    accepts, kind, name = int(fields[3], 16) & 0x10000, fields[4], fields[7]
    return bool(accepts) and kind == "0005" and name.startswith(ABSTRACT)


def _not_there(label: str, error: OSError) -> HandshakeError:
    if isinstance(error, PermissionError):
        return AccessDeniedError(
            f"user {os.geteuid()} may not look at {label!r}; run as the exporter's user"
        )
    return ExporterNotFoundError(
        f"no exporter listens as {label!r} ({error.strerror}); asyncvmm top without a name lists "
        f"those there are",
        name=label,
    )


def process_state(pid: int) -> str:
    """Say what a process does: running, stopped, dead, gone; unknown without a number."""
    if pid <= 0:
        return "unknown"
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(letter, "running")


def latencies(observer: Observer, field: str) -> Latencies:
    """Return what took how long since the last look; since the beginning if nothing did."""
    assert observer.now is not None
    now = getattr(observer.now.pool, field)
    if observer.before is not None:
        before = getattr(observer.before.pool, field)
        counts = tuple(a - b for a, b in zip(now.counts, before.counts, strict=True))
        if any(counts):
            return Latencies(counts, now.total - before.total)
    return Latencies(now.counts, now.total)


def rate(observer: Observer) -> float:
    """Return the owners published per second since the last look; since the beginning if none."""
    now, before = observer.now, observer.before
    assert now is not None
    if before is None:
        return now.pool.published / (now.uptime or 1.0)
    seconds = now.uptime - before.uptime
    return (now.pool.published - before.pool.published) / (seconds or 1.0)
