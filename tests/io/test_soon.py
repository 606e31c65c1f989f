"""Fences asked in the loop's turns: all of what is done, in order, and not for long."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

import pytest

from asyncvmm._io import soon
from asyncvmm._io.fences import Fence
from asyncvmm._io.soon import SoonFences


class Lane:
    """Fences of one lane: the first ``ended`` of them are done."""

    def __init__(self, length: int) -> None:
        self.ended = 0
        self.asked = 0
        self.fences = [_OfLane(self, number) for number in range(length)]


class _OfLane:
    def __init__(self, lane: Lane, number: int) -> None:
        self._lane, self._number = lane, number

    def done(self) -> bool:
        self._lane.asked += 1
        return self._number < self._lane.ended


class Ears:
    """What a SoonFences tells."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.late: list[object] = []
        self.soon = SoonFences(asyncio.get_running_loop(), ask, self.done.extend, self._later)

    def _later(self, lane: Hashable, fence: Fence, token: object) -> None:
        self.late.append(token)


def ask(fences: Sequence[Fence]) -> list[bool]:
    return [fence.done() for fence in fences]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soon, "SOON_SECONDS", 3600.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("length", [1, 2, 3, 7, 64])
async def test_exactly_what_is_done_is_told_in_order(length: int) -> None:
    """For every number of finished fences.  Kills: a search that stops one too early or late."""
    for ended in range(length + 1):
        ears, lane = Ears(), Lane(length)
        lane.ended = ended
        for number, fence in enumerate(lane.fences):
            ears.soon.watch("lane", fence, number)
        await asyncio.sleep(0)
        assert ears.done == list(range(ended))
        assert lane.asked <= 2 + length.bit_length()
        lane.ended = length
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ears.done == list(range(length))
        assert not ears.late


@pytest.mark.usefixtures("patient")
async def test_one_lane_does_not_hide_another() -> None:
    """Kills: asking only the oldest of all."""
    ears, slow, quick = Ears(), Lane(1), Lane(1)
    ears.soon.watch("slow", slow.fences[0], "slow")
    ears.soon.watch("quick", quick.fences[0], "quick")
    quick.ended = 1
    await asyncio.sleep(0)
    assert ears.done == ["quick"]
    ears.soon.clear()


@pytest.mark.usefixtures("patient")
async def test_others_run_between_two_questions() -> None:
    """Each turn of the loop asks once.  Kills: spinning inside one callback (inv. 10)."""
    ears, lane = Ears(), Lane(1)
    ears.soon.watch("lane", lane.fences[0], "x")
    for turns in range(1, 20):
        await asyncio.sleep(0)
        assert lane.asked <= 2 * turns
    lane.ended = 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ears.done == ["x"]


async def test_after_a_while_the_rest_goes_on_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: asking from the loop for ever, and a rest that is dropped or turned round."""
    monkeypatch.setattr(soon, "SOON_SECONDS", 0.0)
    ears, lane = Ears(), Lane(5)
    lane.ended = 2
    for number, fence in enumerate(lane.fences):
        ears.soon.watch("lane", fence, number)
    for _ in range(5):
        await asyncio.sleep(0)
    assert ears.done == [0, 1]
    assert ears.late == [2, 3, 4]
    asked = lane.asked
    for _ in range(5):
        await asyncio.sleep(0)
    assert lane.asked == asked


async def test_what_is_cleared_is_never_told() -> None:
    """Kills: a question after the end, when the events are gone."""
    ears, lane = Ears(), Lane(2)
    for fence in lane.fences:
        ears.soon.watch("lane", fence, fence)
    ears.soon.clear()
    lane.ended = 2
    for _ in range(3):
        await asyncio.sleep(0)
    assert not ears.done
    assert not ears.late
    assert not lane.asked
