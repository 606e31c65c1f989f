"""The parts of the demo, one by one: what decides its verdict, and what it refuses."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer

from asyncvmm._errors import ArgumentError, DeliveryError, PeerLostError
from asyncvmm._types import Outcome
from asyncvmm.cli import ends
from asyncvmm.cli.demo import images, model, plan, reference, report
from asyncvmm.cli.demo.command import demo

WANTED = [("a", "1"), ("b", "2"), ("c", "3")]


@pytest.mark.parametrize(
    ("told", "mismatches", "lost"),
    [
        (WANTED, 0, 0),
        (WANTED[::-1], 0, 0),
        (WANTED[:2], 0, 1),
        ([*WANTED, ("a", "1")], 1, 0),
        ([("a", "1"), ("b", "2"), ("c", "wrong")], 1, 0),
        ([("a", "1"), ("b", "1"), ("b", "2")], 1, 1),
        ([], 0, 3),
    ],
    ids=["same", "other order", "lost", "doubled", "wrong bytes", "wrong and lost", "nothing"],
)
def test_comparison_tells_wrong_from_lost(
    told: list[tuple[str, str]], mismatches: int, lost: int
) -> None:
    """Kills the planted bug of a comparison by set, which doubles pass."""
    verdict = reference.compare([Counter(WANTED), Counter(WANTED)], [WANTED, told])
    assert (verdict.mismatches, verdict.lost) == (mismatches, lost)


def test_competing_ranks_are_compared_as_a_sum() -> None:
    """Kills the planted bug of expecting everything from each competitor."""
    good = reference.compare([Counter(WANTED)], [WANTED[:1], [], WANTED[1:]])
    assert (good.mismatches, good.lost) == (0, 0)
    doubled = reference.compare([Counter(WANTED)], [WANTED[:2], WANTED[1:]])
    assert (doubled.mismatches, doubled.lost) == (1, 0)


def test_percentile_is_a_value_that_occurred() -> None:
    """Kills the planted bug of an index one too high or too low."""
    values = [float(n) for n in range(1, 101)]
    assert report.percentile(values, 50) == 50.0
    assert report.percentile(values, 99) == 99.0
    assert report.percentile([7.0], 99) == 7.0
    assert report.percentile([], 99) == 0.0


def test_requests_are_the_same_each_time_and_differ_in_size() -> None:
    """Kills the planted bug of a reference that sees other pixels than the ranks did."""
    source = images.Frames()
    first = [images.request(source, index) for index in range(24)]
    again = [images.request(source, index) for index in range(24)]
    for one, other in zip(first, again, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert {len(one) for one in first} == {1, 2, 3, 4}
    assert len({images.patches(picture) for one in first for picture in one}) > 10


def test_encoding_in_place_gives_the_same_bits() -> None:
    """Kills the planted bug of a last layer that computes otherwise when given ``out``."""
    encoder = model.build_encoder("cpu")
    picture = images.Frames().get(5)
    with torch.inference_mode():
        fresh = encoder(picture)
        room = torch.empty(images.patches(picture), model.WIDTH)
        encoder(picture, out=room)
    assert torch.equal(fresh, room)


def test_ranks_use_features_and_grid() -> None:
    """Kills the planted bug of a verdict that damaged features or another grid would pass."""
    rank = model.build_rank("cpu", 0)
    features = [torch.arange(12 * model.WIDTH).view(12, -1).remainder(7).float()]
    grid = torch.tensor([[3, 4]])
    with torch.inference_mode():
        right = model.digest(rank(features, grid))
        assert model.digest(rank(features, grid)) == right
        assert model.digest(rank(features, torch.tensor([[4, 3]]))) != right
        features[0][11, 3] += 1
        assert model.digest(rank(features, grid)) != right
        assert model.digest(model.build_rank("cpu", 1)(features, grid)) != right


@pytest.mark.parametrize(
    ("shape", "patches"), [((16, 16), 1), ((500, 250, 3), 98), ((4, 31, 100), 12), ((3, 8, 8), 1)]
)
def test_any_picture_is_cut_to_patches(shape: tuple[int, ...], patches: int) -> None:
    """Kills the planted bug of a side that is no multiple of the patch."""
    fitted = images.fit(torch.zeros(shape, dtype=torch.uint8), Path("x.pt"))
    assert fitted.shape[0] == 3
    assert fitted.shape[1] % model.PATCH == fitted.shape[2] % model.PATCH == 0
    assert images.patches(fitted) == patches


@pytest.mark.parametrize("content", [torch.zeros(5, 5, 7), torch.zeros(4), [1, 2]])
def test_what_is_no_image_is_named(content: object, tmp_path: Path) -> None:
    """Kills the planted bug of an error that does not say which file it was."""
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(ArgumentError, match=r"odd\.pt"):
        images.Folder(tmp_path).get(0)


def test_pictures_are_read_in_colour(tmp_path: Path) -> None:
    """Kills the planted bug of a picture whose channels are taken for rows."""
    pillow = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    pillow.new("RGB", (64, 32), (255, 0, 128)).save(tmp_path / "p.png")
    picture = images.Folder(tmp_path).get(0)
    assert picture.shape == (3, 32, 64)
    assert picture[:, 5, 5].tolist() == [255, 0, 128]


def test_devices_are_resolved_once_for_all() -> None:
    """Without a GPU everything is on the host; what cannot work is refused."""
    assert plan.resolve_devices("cpu", None, 3) == ("cpu", ("cpu", "cpu", "cpu"))
    assert plan.resolve_devices("cpu", "cpu", 2) == ("cpu", ("cpu", "cpu"))
    with pytest.raises(ArgumentError, match="2 devices for 3 ranks"):
        plan.resolve_devices("cpu", "cpu,cpu", 3)


@pytest.mark.parametrize(
    ("device", "rank_devices", "folder", "words"),
    [
        ("cpu", None, Path("/nowhere"), ["/nowhere", "not a folder"]),
        ("cuda:77", None, None, ["cuda:77", "CUDA devices"]),
        ("tpu", None, None, ["tpu", "auto, cpu or cuda:N"]),
        ("cpu", "cpu,cpu,cpu", None, ["3 devices", "2 ranks"]),
    ],
)
def test_bad_arguments_end_in_one_line(
    device: str,
    rank_devices: str | None,
    folder: Path | None,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kills the planted bug of a traceback in a user's face."""
    with pytest.raises(typer.Exit) as left:
        demo(device=device, rank_devices=rank_devices, images=folder)
    printed = capsys.readouterr()
    assert left.value.exit_code == ends.MISUSED
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert all(word in printed.err for word in ["asyncvmm: ArgumentError", *words])


def test_the_telling_error_of_a_group_is_shown() -> None:
    """Kills the planted bug of showing the consequence, and of hiding a bug behind it."""
    lost, failed = PeerLostError("rank 1"), DeliveryError("owner", outcome=Outcome())
    group = BaseExceptionGroup("", [failed, BaseExceptionGroup("", [lost])])
    assert ends.cause_of(group) is lost
    bug = ZeroDivisionError()
    assert ends.cause_of(BaseExceptionGroup("", [group, bug])) is bug
    assert ends.cause_of(asyncio.CancelledError()).args == ()
