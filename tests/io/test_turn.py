"""When a task that never has to wait lets the loop turn."""

from __future__ import annotations

import pytest

from asyncvmm._io.turn import LEAST, MOST, SECONDS, Turn


def counted(turn: Turn, times: list[float], features: int = 1) -> int | None:
    """Count owners at these times; return how many features it took until the turn was over."""
    for number, now in enumerate(times, start=1):
        turn.count(features, now)
        if turn.over:
            return number * features
    return None


@pytest.mark.parametrize("features", [1, 3, 10])
def test_a_turn_is_over_after_many_features_whatever_the_clock_says(features: int) -> None:
    """Kills: a clock alone, whose turns make uneven packets; owners counted, not features."""
    found = counted(Turn(), [5.0] * MOST, features)
    assert found == -(-MOST // features) * features


def test_a_turn_is_over_once_its_time_has_passed() -> None:
    """Kills: counts alone, which are as long as a hand-off is slow."""
    step = SECONDS / 8  # exactly
    assert counted(Turn(), [step * number for number in range(MOST)]) == 9


def test_a_few_features_are_no_turn_however_long_they_take() -> None:
    """Kills: a turn left for each owner of a task that waits for other things in between."""
    assert counted(Turn(), [10.0 * SECONDS * number for number in range(MOST)]) == LEAST


def test_a_turn_that_begins_forgets_the_one_before() -> None:
    """Kills: time that goes on from the turn before; a turn that stays over."""
    turn = Turn()
    assert counted(turn, [0.0, SECONDS / 2, SECONDS / 2]) is None
    turn.begin()
    assert counted(turn, [SECONDS] * LEAST) is None
    assert counted(turn, [SECONDS * 2]) == 1
    assert turn.over
    turn.begin()
    assert not turn.over
