"""Both cores joined in memory: no socket, no memory, no clock.

Whatever one core says becomes a packet in a queue and stays there until the test delivers it;
whatever drains stays in ``fences`` until the test says that its fences are done.  So every order
of events that two processes can produce is one order of calls here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from asyncvmm._core import wire
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.ledger import Peer, Record
from asyncvmm._types import ALIGNMENT, Group, Key, RegionInfo, Route, SegmentInfo

UNIT = ALIGNMENT
SEGMENT = 8 * UNIT
"""Bytes of each segment of a pair's pool: small, so that chunks often lie across boundaries."""


def features(nbytes: int) -> list[wire.Feature]:
    """Return one feature that fills a chunk of ``nbytes``."""
    return [wire.Feature("x", "uint8", (nbytes,))]


def hear(core: ConsumerCore, message: wire.FromExporter) -> None:
    """Have a consumer hear one message, as its shell would if every mapping worked."""
    if isinstance(message, wire.Deliver):
        core.deliver(message)
    elif isinstance(message, wire.Segment):
        core.check_segment(message.info)
        core.add_segment(message.info)
    elif isinstance(message, wire.Unmap):
        core.remove_segment(message.index)
    elif isinstance(message, wire.Ready):
        core.check_slot(message.slot)
    elif isinstance(message, wire.Redeemed):
        core.redeemed(message)
    elif isinstance(message, wire.Denied):
        core.denied(message)
    else:
        assert isinstance(message, wire.Goodbye)
        core.goodbye(message)


class End:
    """One consumer, and the packets between it and the exporter."""

    def __init__(self, peer: Peer, core: ConsumerCore) -> None:
        self.peer = peer
        self.id = peer.id
        self.member = peer.member
        self.core = core
        self.down: deque[bytes] = deque()  # packets to this consumer
        self.up: deque[bytes] = deque()  # packets from it
        self.linked = True
        self.alive = True

    def __repr__(self) -> str:
        return f"End({self.id}, {self.member!r})"


class Pair:
    """One ExporterCore, any number of ConsumerCores, and everything that is on its way."""

    def __init__(
        self, route: Route, *, slots: int = 4, segments: int = 2, max_segments: int = 4
    ) -> None:
        self.exporter = ExporterCore(slots=slots, route=route)
        self.region = RegionInfo("host", max_segments * SEGMENT, SEGMENT, slots)
        self.ends: dict[int, End] = {}  # by peer id, also those that are gone
        self.fences: list[Record] = []  # draining, and their fences are not done
        self.segments: dict[int, SegmentInfo] = {}
        # What each side has said since the test last cleared these; the packets hold the same.
        self.sent: list[tuple[int, wire.FromExporter]] = []
        self.spoken: list[tuple[int, wire.FromConsumer]] = []
        for _ in range(segments):
            self.add_segment()

    # -- memory ------------------------------------------------------------------------------

    def add_segment(self) -> SegmentInfo:
        """Map the first missing segment on every side."""
        index = next(i for i in range(len(self.segments) + 1) if i not in self.segments)
        info = SegmentInfo(index, index * SEGMENT, SEGMENT)
        self.segments[index] = info
        self.exporter.add_segment(info, SEGMENT)
        self._tell_all(wire.encode(wire.Segment(info)))
        return info

    def remove_segment(self, index: int) -> bool:
        """Give a segment back if it is wholly free; say whether it was."""
        info = self.segments[index]
        if not self.exporter.bytes.remove_range(info.start, info.nbytes):
            return False
        del self.segments[index]
        self._tell_all(wire.encode(wire.Unmap(index)))
        return True

    def _tell_all(self, message: bytes) -> None:
        for end in self.ends.values():
            if end.linked:
                end.down.append(wire.frame([message]))

    # -- the exporter ------------------------------------------------------------------------

    def reserve(self, nbytes: int = UNIT) -> Record:
        """Take a slot and a chunk that must be there."""
        record = self.exporter.reserve(nbytes)
        assert record is not None
        return record

    def publish(
        self,
        *records: Record,
        key: Key = "key",
        to: Group | Iterable[int] | int | None = None,
        ready: bytes = b"",
    ) -> None:
        """Publish records as one batch, each with one feature that fills it."""
        owners = [(record, key, features(record.nbytes), b"", ready) for record in records]
        self.exporter.publish_batch(owners, to=to)
        self.collect()

    def send(self, nbytes: int = UNIT, *, to: int | None = None) -> Record:
        """Reserve and publish one owner."""
        record = self.reserve(nbytes)
        self.publish(record, to=to)
        return record

    def abandon(self, record: Record) -> None:
        """Give a loan back unpublished."""
        self.exporter.abandon(record)
        self.collect()

    def fence_done(self, *records: Record) -> None:
        """Say that everything that touched the bytes of draining records is done."""
        for record in records:
            self.fences.remove(record)
        self.exporter.drained(*records)
        self.collect()

    def fence_failed(self, record: Record) -> None:
        """Say that a draining record's fence can no longer be asked."""
        self.fences.remove(record)
        self.exporter.fence_failed(record)
        self.collect()

    def say_goodbye(self) -> None:
        """Close the exporter to new owners."""
        self.exporter.say_goodbye("closed")
        self.collect()

    def give_up_waiting(self) -> None:
        """Settle what waits for members that are not there."""
        self.exporter.give_up_waiting()
        self.collect()

    # -- consumers ---------------------------------------------------------------------------

    def admit(self, rank: int | None = None, name: str | None = None, window: int = 2) -> End:
        """Let a consumer in and send it the pool; nothing is delivered to it yet."""
        peer = self.exporter.admit(rank, name, window)
        end = End(peer, ConsumerCore(self.region, competes=rank is None))
        self.ends[end.id] = end
        pool = [wire.encode(wire.Segment(info)) for info in self.segments.values()]
        end.down.append(wire.frame(pool))
        return end

    def open(self, end: End) -> None:
        """Begin deliveries to an admitted consumer."""
        self.exporter.open(end.peer)
        self.collect()

    def attach(self, rank: int | None = None, name: str | None = None, window: int = 2) -> End:
        """Admit and open at once."""
        end = self.admit(rank, name, window)
        self.open(end)
        return end

    def take(self, end: End) -> list[wire.OwnerFrame] | None:
        """Take the oldest batch of a consumer's inbox."""
        owners = end.core.take()
        self.collect()
        return owners

    def release(
        self, end: End, owner: wire.OwnerFrame, others: Sequence[wire.OwnerFrame] = ()
    ) -> None:
        """Let a consumer release one owner, and others with it."""
        end.core.release(owner, others=others)
        self.collect()

    def refuse(self, end: End, owner: wire.OwnerFrame) -> None:
        """Let a consumer refuse one owner."""
        end.core.refuse(owner, "refused")
        self.collect()

    def leave(self, end: End) -> None:
        """Let a consumer say goodbye."""
        end.core.leave()
        self.collect()

    def inject(self, end: End, *messages: wire.FromConsumer) -> None:
        """Have the exporter hear at once what a consumer's core never said."""
        self._receive(end, wire.frame([wire.encode(message) for message in messages]))

    def vanish(self, end: End) -> None:
        """Cut a consumer's link; its process lives, and what it said last may yet be heard."""
        self._cut(end)
        end.core.lose()
        self.exporter.vanished(end.id)
        self.collect()

    def resume(self, end: End) -> None:
        """Give a consumer whose link was cut another one, for what it has to say."""
        end.linked = True
        end.core.resume(self.exporter.found_again(end.peer))
        self.collect()

    def die(self, end: End) -> None:
        """Kill a consumer; what it said last is heard only if the test delivers it first."""
        self._cut(end)
        end.up.clear()
        end.alive = False
        self.exporter.died(end.id)
        self.collect()

    def _cut(self, end: End) -> None:
        end.linked = False
        end.down.clear()

    # -- packets -----------------------------------------------------------------------------

    def collect(self) -> None:
        """Put what both cores have just said and begun to drain where the test can reach it.

        What is said after one input travels in one packet, as it does on a link.
        """
        core = self.exporter
        packets: dict[int, list[bytes]] = {}
        for peer_id, message in core.outgoing:
            packets.setdefault(peer_id, []).append(message)
            (decoded,) = wire.decode_from_exporter(wire.frame([message]))
            self.sent.append((peer_id, decoded))
        core.outgoing.clear()
        for peer_id, messages in packets.items():
            if self.ends[peer_id].linked:
                self.ends[peer_id].down.append(wire.frame(messages))
        self.fences += core.draining
        core.draining.clear()
        for end in self.ends.values():
            if end.core.outgoing:
                packet = wire.frame(end.core.outgoing)
                end.core.outgoing.clear()
                self.spoken += [(end.id, said) for said in wire.decode_from_consumer(packet)]
                if end.linked:
                    end.up.append(packet)

    def deliver_down(self, end: End) -> list[wire.FromExporter]:
        """Deliver the oldest packet on its way to a consumer; return its messages."""
        messages = wire.decode_from_exporter(end.down.popleft())
        for message in messages:
            hear(end.core, message)
        self.collect()
        return messages

    def deliver_up(self, end: End) -> list[wire.FromConsumer]:
        """Deliver the oldest packet on its way from a consumer; return its messages."""
        return self._receive(end, end.up.popleft())

    def _receive(self, end: End, packet: bytes) -> list[wire.FromConsumer]:
        messages = wire.decode_from_consumer(packet)
        self.exporter.receive(end.id, messages)
        self.collect()
        return messages

    def settle(self) -> None:
        """Deliver everything that is on its way, in both directions, until nothing is."""
        while busy := [end for end in self.ends.values() if end.down or end.up]:
            for end in busy:
                while end.down:
                    self.deliver_down(end)
                while end.up:
                    self.deliver_up(end)

    def finish_fences(self) -> None:
        """Say that every fence is done."""
        while self.fences:
            self.fence_done(self.fences[0])

    def read(self, end: End) -> Iterator[wire.OwnerFrame]:
        """Take, yield and release all that a consumer has, in order."""
        while (owners := self.take(end)) is not None:
            for owner in owners:
                yield owner
                self.release(end, owner)
