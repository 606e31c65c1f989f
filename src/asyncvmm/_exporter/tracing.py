"""An exporter that notes its timeline.  Without ``trace=`` nothing of this is loaded.

The slot table is the one place through which every slot's state goes, so a table that notes its
moves is all that is needed; the queue for room notes those who had to wait.
"""

from __future__ import annotations

from asyncvmm._core.exporter import ExporterCore
from asyncvmm._core.ledger import Record
from asyncvmm._core.routing import Competitors
from asyncvmm._core.slots import FILLING, FREE, SlotState, SlotTable
from asyncvmm._exporter.lending import Lending
from asyncvmm._exporter.room import Room, Waiter
from asyncvmm._io.timeline import Life, Timeline
from asyncvmm._types import Key


def follow(exporter: Lending, timeline: Timeline) -> None:
    """Note the exporter's timeline from now on; call it before anything else knows the parts."""
    timeline.title = f"exporter {exporter.name}"
    timeline.identity = exporter._connections.handshake.identity
    exporter._core.slots = _Slots(exporter._core, timeline)
    _follow_waits(exporter._room, timeline)


def _follow_waits(room: Room, timeline: Timeline) -> None:
    forget = room._forget

    def noted(waiter: Waiter, waited: bool) -> None:
        forget(waiter, waited)
        if waited:
            timeline.wait(waiter.since, sum(waiter.sizes))

    room._forget = noted  # type: ignore[method-assign]  # a wrapper costs nothing when off


class _Slots(SlotTable):
    """A slot table that notes its moves."""

    __slots__ = ("_core", "_timeline")

    def __init__(self, core: ExporterCore, timeline: Timeline) -> None:
        super().__init__(len(core.slots.states))
        self._core = core
        self._timeline = timeline

    def take(self) -> int:
        slot = super().take()
        self._timeline.begin(slot, self.generations[slot], FILLING.name.lower())
        return slot

    def move(self, slot: int, to: SlotState) -> None:
        super().move(slot, to)
        if to is not FREE:
            self._timeline.mark(slot, to.name.lower())
            return
        record = self._core.records[slot]
        if not record.published:
            self._timeline.end(slot, "given up", bytes=record.nbytes, published=False)
            return
        life = self._timeline.end(
            slot,
            record.key,
            bytes=record.nbytes,
            published=True,
            released=list(record.released),
            refused=dict(record.refused),
            lost=list(record.lost),
        )
        if life is not None:
            self._add_arrows(life, record)

    def _add_arrows(self, life: Life, record: Record) -> None:
        """Draw one to each consumer when it is published, one back when the last let go."""
        back: list[Key] = [*record.released, *(member for member, _ in record.refused)]
        out: list[Key] = [*back, *record.lost]
        if isinstance(self._core.route, Competitors):
            back, out = [""] * bool(back), [""]  # one of them has it, and may not know its name
        for member in out:
            life.arrows.append(("leaves", life.since("held"), f"to {member}"))
        for member in back:
            life.arrows.append(("arrives", life.since("draining"), f"from {member}"))
