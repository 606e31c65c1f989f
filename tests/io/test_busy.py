"""Turning for quick answers: when it begins, when it ends, and that it gives way."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable

import pytest

from asyncvmm._io import busy as module
from asyncvmm._io.busy import Busy

LONGEST = 500e-6
QUICK = 80e-6
PER_TURN = 2e-6


class Hand:
    """A clock and a loop that go on by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due: list[Callable[[], None]] = []
        self.looks = 0
        self.yields = 0
        self.others = 0.0  # seconds that they take of the core when it is yielded

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def sched_yield(self) -> None:
        self.yields += 1
        self.now += self.others

    def call_soon(self, call: Callable[[], None]) -> None:
        self.due.append(call)

    def run(self, seconds: float) -> int:
        """Let time pass; return how many turns the loop made instead of sleeping."""
        end, turns = self.now + seconds, 0
        while self.due and self.now < end:
            due, self.due = self.due, []
            for call in due:
                call()
            self.now += PER_TURN
            turns += 1
            assert turns < 5000, "it never sleeps"
        self.now = max(self.now, end)
        return turns


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(module, "monotonic", hand.monotonic)
    monkeypatch.setattr(os, "sched_yield", hand.sched_yield)
    return hand


def make(hand: Hand, longest: float = LONGEST, **options: Callable[[], bool]) -> Busy:
    return Busy(hand, longest, **options)  # type: ignore[arg-type]  # a loop of one method


def answer(busy: Busy, hand: Hand, seconds: float) -> int:
    """Wait for an answer that comes after so long; return the turns that the loop made."""
    with busy:
        turns = hand.run(seconds)
        busy.came()
    hand.run(1.0)
    return turns


def taught(hand: Hand, seconds: float = QUICK) -> Busy:
    """Return one that has seen many answers of that kind."""
    busy = make(hand)
    for _ in range(60):
        answer(busy, hand, seconds)
    return busy


def slept_before(busy: Busy, hand: Hand, seconds: float) -> int:
    """Return for how many such answers the loop slept before it turned for one."""
    slept = 0
    while not answer(busy, hand, seconds):
        slept += 1
        assert slept <= module.REST, "it never turns"
    return slept


def test_nothing_turns_before_anything_is_known(hand: Hand) -> None:
    """Kills: probing, by which a link that is slow from the start would pay."""
    busy = make(hand)
    assert not answer(busy, hand, QUICK)
    for _ in range(50):
        assert not answer(busy, hand, 0.02)


def test_a_few_quick_answers_begin_it(hand: Hand) -> None:
    """Also those of two that sleep, which take 200 us.  Kills: an end that never begins."""
    for seconds in (QUICK, 200e-6):
        busy = make(hand)
        assert 3 <= slept_before(busy, hand, seconds) <= 25
        assert all(answer(busy, hand, seconds) for _ in range(20))


def test_it_turns_until_the_answer_is_there(hand: Hand) -> None:
    """Kills: a window that ends before most answers, and turns that go on behind one."""
    busy = taught(hand)
    with busy:
        turns = hand.run(QUICK)
        assert turns == pytest.approx(QUICK / PER_TURN, abs=2)
        busy.came()
    assert hand.run(1.0) <= 1


def test_the_window_is_twice_the_usual_and_then_it_sleeps(hand: Hand) -> None:
    """Kills: turning for the longest time for each answer, and for ever."""
    for seconds in (50e-6, QUICK, 150e-6):
        busy = taught(hand, seconds)
        with busy:
            turns = hand.run(1.0)
        assert turns * PER_TURN == pytest.approx(2 * seconds, rel=0.1)


def test_answers_that_take_as_long_as_it_may_turn_are_slept_on(hand: Hand) -> None:
    """Kills: a window that is cut off at the longest, which then ends in vain each time."""
    busy = taught(hand, 0.6 * LONGEST)
    assert not answer(busy, hand, 0.6 * LONGEST)


def test_a_few_in_vain_end_it(hand: Hand) -> None:
    """However late the answers come.  Kills: an average that slow ones do not move."""
    for late in (0.0011, 0.1, 3600.0):
        busy = taught(hand)
        in_vain = [answer(busy, hand, late) > 0 for _ in range(20)]
        assert 1 <= sum(in_vain) <= 3
        assert not any(in_vain[3:])


SLOW = 200e-6
"""Seconds: quick enough to be turned for, and more than may be turned for in vain."""


def test_it_rests_where_answers_come_no_quicker_for_it(hand: Hand) -> None:
    """Twice as long after each trial in vain, and then always a thirtieth of the time.

    Kills: a core that turns for a GPU which is shared in turns of its own; a rest for ever; one
    that begins at once, before it can be known; one that is as long after one slow moment.
    """
    busy = taught(hand, SLOW)
    turned = [answer(busy, hand, SLOW) > 0 for _ in range(5 * module.REST)]
    runs = [(on, len(list(run))) for on, run in itertools.groupby(turned)]
    trials = [count for on, count in runs[1:-1] if on]
    rests = [count for on, count in runs[:-1] if not on]
    assert trials == pytest.approx([module.TRIAL] * len(trials), abs=1)
    assert rests[:7] == pytest.approx([module.TRIAL << n for n in range(6)] + [module.REST], abs=1)


def test_rests_are_short_again_once_a_trial_was_not_in_vain(hand: Hand) -> None:
    """The other end rested too, or the machine was slow for a moment.

    Kills: rests that only become longer.
    """
    busy = taught(hand, SLOW)
    for _ in range(2 * module.REST):
        answer(busy, hand, SLOW)
    slept_before(busy, hand, SLOW)
    for _ in range(module.TRIAL):
        assert answer(busy, hand, QUICK)
    assert not all(answer(busy, hand, SLOW) for _ in range(2 * module.TRIAL))
    assert slept_before(busy, hand, SLOW) <= module.TRIAL


def test_it_goes_on_where_answers_come_quicker_for_it(hand: Hand) -> None:
    """Kills: a comparison with what is usual now, instead of with what it was before."""
    busy = make(hand)
    turned = 0
    for _ in range(8 * module.TRIAL):
        seconds = SLOW / 3 if turned else SLOW
        turned = answer(busy, hand, seconds)
    assert turned


def test_what_was_quick_for_the_turning_is_not_the_measure_of_it(hand: Hand) -> None:
    """Now and then an answer is not turned for, while the other end still turns.

    Kills: a comparison with what is usual when turning begins again, which is quick already.
    """
    worth = [True]
    busy = make(hand, worth=lambda: worth[0])
    turned = [answer(busy, hand, SLOW) > 0 for _ in range(60)]
    assert turned[-1]
    for number in range(6 * module.TRIAL):
        worth[0] = number % (module.TRIAL + 10) != 9
        assert (answer(busy, hand, 0.6 * SLOW) > 0) == worth[0]


def test_a_late_answer_is_forgotten_soon(hand: Hand) -> None:
    """However late: after a pause of an hour it begins again as after one of 1 ms.

    Kills: an average of which one answer is all for hours.
    """
    busy = taught(hand)
    for _ in range(10):
        answer(busy, hand, 3600.0)
    assert slept_before(busy, hand, QUICK) <= 20


def test_turning_ends_once_nothing_can_come(hand: Hand) -> None:
    """The packet has come, and what is waited for now is a fence.

    Kills: asking only when the wait begins.
    """
    worth = [True]
    busy = make(hand, worth=lambda: worth[0])
    for _ in range(60):
        answer(busy, hand, QUICK)
    with busy:
        assert hand.run(QUICK) > 10
        busy.came()
        worth[0] = False
        assert hand.run(1.0) <= 2  # in the first of them the packet is dealt with
    worth[0] = True
    assert answer(busy, hand, QUICK) > 10


def test_the_core_is_offered_in_some_turns(hand: Hand) -> None:
    """Not in the one in which a packet is dealt with: whoever waited for it goes on behind that.

    Kills: a yield in every turn, or in the first one; none at all.
    """
    busy = taught(hand)
    with busy:
        for _ in range(10):
            before = hand.yields
            assert hand.run(PER_TURN) == 1
            assert hand.yields == before
            turns = 1 + hand.run(QUICK - PER_TURN)
            assert turns // module.LOOK_EVERY <= hand.yields - before
            assert 0 < hand.yields - before <= 1 + turns // module.LOOK_EVERY
            busy.came()


def test_what_was_there_already_tells_nothing(hand: Hand) -> None:
    """Most packets are there when one looks, the others take 2 ms: nothing is to be gained.

    Kills: an average over both, by which the loop turns for each that takes long.
    """
    busy = make(hand)
    for _ in range(100):
        for _ in range(9):
            assert not answer(busy, hand, 15e-6)
        assert not answer(busy, hand, 0.002)


def test_a_core_that_others_need_is_left_to_them(hand: Hand) -> None:
    """In the second turn, and for a whole wait.

    Kills: turning on when there are more processes than cores.
    """
    busy = taught(hand)
    hand.others = 35e-6  # twice within an answer
    assert all(answer(busy, hand, QUICK) <= 2 for _ in range(50))


def test_it_goes_on_for_the_next_packet_while_somebody_waits(hand: Hand) -> None:
    """Of eight consumers' releases the first wakes nobody.

    Kills: sleeping after the first packet, whoever it was for.
    """
    busy = taught(hand)
    with busy:
        for _ in range(8):
            assert hand.run(QUICK) > 10
            busy.came()
    assert hand.run(1.0) <= 1


def test_it_turns_until_nobody_waits(hand: Hand) -> None:
    """Two wait, one of them is cancelled.  Kills: a flag in place of a count."""
    busy = taught(hand)
    with busy:
        with pytest.raises(asyncio.CancelledError), busy:
            raise asyncio.CancelledError
        assert hand.run(QUICK) > 10
    assert hand.run(1.0) <= 1
    busy.came()
    assert not hand.run(1.0)


def test_a_wait_given_up_teaches_nothing(hand: Hand) -> None:
    """Kills: taking the time until somebody waits again for that of an answer."""
    busy = taught(hand)
    for _ in range(20):
        with busy:
            pass
        hand.run(10.0)
    assert answer(busy, hand, QUICK) > 10


def test_where_it_is_not_worth_it_the_loop_sleeps(hand: Hand) -> None:
    """Asked for each answer.  Kills: an exporter that turns with 64 owners in flight."""
    worth = True
    busy = make(hand, worth=lambda: worth)
    slept_before(busy, hand, QUICK)
    worth = False
    assert not answer(busy, hand, QUICK)
    worth = True
    assert answer(busy, hand, QUICK)


def test_switched_off_it_does_nothing_at_all(hand: Hand) -> None:
    """Kills: a look at the clock for each packet of who switched it off."""
    busy = make(hand, 0)
    for _ in range(50):
        answer(busy, hand, QUICK)
    assert not hand.looks
    assert not hand.due


async def test_others_run_between_two_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real loop.  Kills: spinning inside one callback, which blocks the loop (inv. 10)."""
    monkeypatch.setattr(module, "WANTED_SECONDS", 3600.0)
    busy = Busy(asyncio.get_running_loop(), 3600.0)
    busy._usual = 1.0
    with busy:
        for _ in range(20):
            await asyncio.sleep(0)
            assert busy._turning
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not busy._turning
