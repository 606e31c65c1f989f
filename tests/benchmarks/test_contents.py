"""What payloads hold tells right from wrong."""

from __future__ import annotations

from benchmarks.contents import CHECKED, Contents, variant
from benchmarks.setting import KIB, Payload


def test_any_changed_byte_is_seen() -> None:
    """Kills: comparing only the first feature, or only its beginning."""
    contents = Contents(Payload(3, 4 * KIB), "cpu")
    number = 5 | CHECKED
    for index in range(3):
        for place in (0, 2_000, -1):
            features = [feature.clone() for feature in contents.features(number)]
            assert contents.right(number, features)
            features[index][place] ^= 1
            assert not contents.right(number, features)


def test_missing_swapped_and_stale_features_are_seen() -> None:
    """Kills: the same bytes in every feature, or in every hand-off."""
    contents = Contents(Payload(2, KIB), "cpu")
    first, second = contents.features(1)
    assert not contents.right(1, [first])
    assert not contents.right(1, [second, first])
    other = next(n for n in range(2, 50) if variant(n) != variant(1))
    assert not contents.right(other, [first, second])


def test_what_a_slot_held_before_is_another_variant_often_enough() -> None:
    """Kills: numbering variants by number modulo 4, which hides a stale slot among 64."""
    for slots in (1, 2, 3, 4, 8, 28, 64):
        differ = sum(variant(n | CHECKED) != variant((n + slots) | CHECKED) for n in range(200))
        assert differ > 60, slots
