"""A consumer that notes its timeline; only made with ``trace=``."""

from __future__ import annotations

from collections.abc import Sequence

from asyncvmm._consumer.lease import Lease
from asyncvmm._consumer.leases import Leases
from asyncvmm._core import wire
from asyncvmm._core.consumer import ConsumerCore
from asyncvmm._io.timeline import Timeline


class TracedCore(ConsumerCore):
    """A core that notes what it is told and what it says.

    The phases of a life here: ``delivered`` (here, and not yet received by the program),
    ``in hand``, and ``viewed`` (released, but a view is still alive).
    """

    def __init__(self, welcome: wire.Welcome, hello: wire.Hello, timeline: Timeline) -> None:
        super().__init__(welcome.region, competes=not welcome.consumer_count)
        self._timeline = timeline
        # Exactly one competitor has an owner, and those without a name do not know theirs.
        self._who = "" if self.competes else hello.rank
        timeline.identity = welcome.exporter
        timeline.title = "consumer" if self.competes else f"rank {hello.rank}"
        if self.competes and hello.name is not None:
            timeline.title = f"consumer {hello.name}"

    def deliver(self, message: wire.Deliver) -> None:
        super().deliver(message)
        for owner in message.owners:
            if self.held.get(owner.slot) is owner:
                self._begin(owner)

    def _begin(self, owner: wire.OwnerFrame) -> None:
        self._timeline.begin(owner.slot, owner.generation, "delivered")

    def redeemed(self, message: wire.Redeemed) -> None:
        super().redeemed(message)
        owner = message.owner
        if self.held.get(owner.slot) is owner:
            self._timeline.begin(owner.slot, owner.generation, "in hand")

    def put_back(self, owner: wire.OwnerFrame) -> None:
        super().put_back(owner)
        self._timeline.end(owner.slot, owner.key, bytes=owner.nbytes, ended="put back")

    def take(self) -> list[wire.OwnerFrame] | None:
        owners = super().take()
        for owner in owners or ():
            self._timeline.mark(owner.slot, "in hand")
        return owners

    def release(
        self,
        owner: wire.OwnerFrame,
        handle: bytes = b"",
        lane: int = 0,
        others: Sequence[wire.OwnerFrame] = (),
    ) -> None:
        super().release(owner, handle, lane, others)
        for each in (owner, *others):
            self._end(each, "released")

    def refuse(self, owner: wire.OwnerFrame, reason: str) -> None:
        super().refuse(owner, reason)
        if owner.slot not in self._timeline.open:
            self._begin(owner)  # refused in the moment in which it came
        self._end(owner, "refused", reason=reason)

    def _end(self, owner: wire.OwnerFrame, how: str, **facts: object) -> None:
        life = self._timeline.end(owner.slot, owner.key, bytes=owner.nbytes, ended=how, **facts)
        if life is not None and how != "lost":
            # Only who settles an owner has its arrows: it may have been with others before.
            life.arrows.append(("arrives", life.phases[0][0], f"to {self._who}"))
            # A nanosecond earlier, so that the arrow begins inside the slice.
            life.arrows.append(("leaves", life.over - 1, f"from {self._who}"))

    def _decline(self, owners: Sequence[wire.OwnerFrame], reason: str) -> None:
        super()._decline(owners, reason)
        for owner in owners:
            if owner.slot in self._timeline.open:  # a competitor's, which goes to another
                self._timeline.end(owner.slot, owner.key, bytes=owner.nbytes, ended="given on")

    def lose(self) -> int:
        unread = [owner for owners in self.inbox for owner in owners]
        count = super().lose()
        for owner in unread:
            self._end(owner, "lost")
        return count


def follow(leases: Leases, timeline: Timeline) -> None:
    """Note also which owners are released while a view of them is alive."""
    say_done, say_all_done = leases.say_done, leases.say_all_done

    def noted(lease: Lease, stream: object) -> None:
        say_done(lease, stream)
        note((lease,))

    def all_noted(leases: Sequence[Lease], stream: object) -> None:
        say_all_done(leases, stream)
        note(leases)

    def note(several: Sequence[Lease]) -> None:
        for lease in several:
            if not lease.done:
                timeline.mark(lease.frame.slot, "viewed")

    # Wrappers cost nothing when off.
    leases.say_done = noted  # type: ignore[method-assign]  # see above
    leases.say_all_done = all_noted  # type: ignore[method-assign]  # see above
