"""The timeline: what it shows is what happened, and it costs nothing where it is off."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm._core.slots import SlotTable
from asyncvmm._io import chrome, timeline
from asyncvmm.cli import traces
from tests.api.books import until
from tests.api.traces import Trace
from tests.io.ends import open_fds
from tests.process import steps
from tests.process.harness import Peers
from tests.process.patterns import features, note

SPEC = {"x": asyncvmm.TensorSpec((8,), torch.uint8)}


def names(trace: Trace, end: str, **facts: Any) -> list[str]:
    """Return the names of an end's lives that have these facts."""
    return [
        life["name"]
        for life in trace.lives[end]
        if all(life["args"].get(key) == value for key, value in facts.items())
    ]


@pytest.mark.slow
async def test_lives_add_up_to_the_statistics(peers: Peers, folder: Path, tmp_path: Path) -> None:
    """Kills the planted bugs of a move not noted, a wait noted twice, and an arrow's other id."""
    files = [tmp_path / f"{part}.json" for part in ("exporter", "rank-0", "rank-1")]
    ranks = [peers.start() for _ in range(2)]
    async with asyncvmm.open_exporter(
        "pool",
        device="cpu",
        pool_bytes="64KiB",
        slots=4,
        route=asyncvmm.Broadcast(2),
        trace=files[0],
    ) as exporter:

        async def send(owner: int) -> asyncvmm.Acknowledgement:
            terms: Any = {"metadata": note(owner, 0, 500), "require": "none"}
            return await exporter.send(features(owner, 0, 500), key=owner, **terms)

        for rank, peer in enumerate(ranks):
            options = {"trace": str(files[1 + rank])}
            await peer.call(steps.connect, "pool", rank, options)
        acks = [await send(owner) for owner in range(3)]
        for peer in ranks:
            await peer.call(steps.take, 3)
        async with exporter.reserve(SPEC):
            waiting = asyncio.create_task(send(3))
            await until(lambda: exporter.statistics().waiting == 1)
        acks.append(await waiting)
        for peer in ranks:
            await peer.call(steps.give_back)
        for ack in acks[:3]:
            await ack
        await ranks[0].call(steps.drop, 1)
        acks += [await send(owner) for owner in (4, 5)]
        await ranks[0].call(steps.take, 2)
        await ranks[1].killed()
        await ranks[0].call(steps.give_back)
        for ack in acks:
            await ack
        stats = exporter.statistics()
        await ranks[0].call(steps.leave)
    assert chrome.join(files[:2], tmp_path / "all.json") > 0
    trace = Trace(tmp_path / "all.json")
    assert (stats.published, stats.waits, stats.refused, stats.lost) == (6, 1, 1, 3)

    mine = trace.lives["exporter pool"]
    assert len(mine) == stats.published + 1
    assert sorted(names(trace, "exporter pool", published=True)) == list("012345")
    assert names(trace, "exporter pool", published=False) == ["given up"]
    assert trace.waits == stats.waits
    facts = [life["args"] for life in mine if life["args"]["published"]]
    assert sum(len(fact["refused"]) for fact in facts) == stats.refused
    assert sum(len(fact["lost"]) for fact in facts) == stats.lost
    released = Counter(member for fact in facts for member in fact["released"])
    assert released == {0: 5, 1: 3}
    for life in mine:
        phases = [phase for phase in trace.phases[id(life)] if phase != "quarantined"]
        want = ["filling", "held", "draining"]
        assert phases == (want if life["args"]["published"] else ["filling", "draining"])
    generations = Counter((life["tid"], life["args"]["generation"]) for life in mine)
    assert max(generations.values()) == 1

    assert sorted(names(trace, "rank 0", ended="released")) == list("01245")
    assert names(trace, "rank 0", ended="refused") == ["3"]
    # Six to rank 0, and six back; rank 1 was killed and wrote nothing.
    assert Counter((start, end) for start, end, _ in trace.arrows) == {
        ("exporter pool", "rank 0"): 6,
        ("rank 0", "exporter pool"): 6,
    }
    assert all(micros >= 0 for _, _, micros in trace.arrows)
    assert [about["unfinished"] for about in trace.about] == [0, 0]


async def test_a_competitors_arrow_goes_to_who_began_it(folder: Path, tmp_path: Path) -> None:
    """Kills the planted bug of two ends of one arrow, where an unbegun owner goes to another."""
    files = [tmp_path / f"{part}.json" for part in "eab"]
    async with asyncvmm.open_exporter(
        "work", device="cpu", pool_bytes="64KiB", slots=4, route=asyncvmm.Compete(), trace=files[0]
    ) as exporter:
        async with asyncvmm.connect("work", device="cpu", prefetch=1, trace=files[1]) as first:
            ack = await exporter.send({"x": torch.ones(4)}, key="k")
            await until(lambda: first.statistics().unread == 1)
        async with asyncvmm.connect("work", device="cpu", member="b", trace=files[2]) as second:
            (await second.receive())[0].release()
            await ack
    chrome.join(files, tmp_path / "all.json")
    trace = Trace(tmp_path / "all.json")
    assert names(trace, "consumer", ended="given on") == ["k"]
    assert names(trace, "consumer b", ended="released") == ["k"]
    assert {(start, end) for start, end, _ in trace.arrows} == {
        ("exporter work", "consumer b"),
        ("consumer b", "exporter work"),
    }
    assert len(trace.arrows) == 2


async def test_redeemed_owners_have_lives_too(folder: Path, tmp_path: Path) -> None:
    """Kills the planted bug of a consumer whose owners came by ticket and are not to be seen."""
    files = [tmp_path / "e.json", tmp_path / "c.json"]
    async with (
        asyncvmm.open_exporter(
            "pool", device="cpu", pool_bytes="64KiB", trace=files[0]
        ) as exporter,
        asyncvmm.connect("pool", device="cpu", rank=0, trace=files[1]) as consumer,
    ):
        tickets = await exporter.export({"x": torch.ones(4)}, key="copied")
        await consumer.reconstruct(tickets["x"])
        await tickets.acknowledgement
        tickets = await exporter.export({"x": torch.ones(4)}, key="borrowed")
        (await consumer.borrow(tickets["x"])).release()
        await tickets.acknowledgement
    chrome.join(files, tmp_path / "all.json")
    trace = Trace(tmp_path / "all.json")
    assert names(trace, "rank 0", ended="released") == ["copied", "borrowed"]
    assert Counter((start, end) for start, end, _ in trace.arrows) == {
        ("exporter pool", "rank 0"): 2,
        ("rank 0", "exporter pool"): 2,
    }


async def test_what_is_released_and_still_viewed_is_shown(folder: Path, tmp_path: Path) -> None:
    """Kills the planted bug of a phase that hides who is really late: a view in a variable."""
    async with (
        asyncvmm.open_exporter(
            "pool", device="cpu", pool_bytes="64KiB", trace=tmp_path / "e.json"
        ) as exporter,
        asyncvmm.connect("pool", device="cpu", rank=0, trace=tmp_path / "c.json") as consumer,
    ):
        ack = await exporter.send({"x": torch.ones(4)}, key="k")
        owner = (await consumer.receive())[0]
        view = owner["x"]
        owner.release()
        del view
        await ack
    trace = Trace(tmp_path / "c.json")
    (life,) = trace.lives["rank 0"]
    assert trace.phases[id(life)] == ["delivered", "in hand", "viewed"]


async def test_the_oldest_lives_go_and_are_counted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills the planted bug of a timeline that grows for as long as the exporter lives."""
    monkeypatch.setattr(timeline, "MOST_LIVES", 3)
    async with (
        asyncvmm.open_exporter(
            "pool", device="cpu", pool_bytes="64KiB", trace=tmp_path / "e.json"
        ) as exporter,
        asyncvmm.connect("pool", device="cpu", rank=0) as consumer,
    ):
        for number in range(5):
            ack = await exporter.send({"x": torch.ones(4)}, key=number)
            (await consumer.receive())[0].release()
            await ack
    trace = Trace(tmp_path / "e.json")
    assert names(trace, "exporter pool") == ["2", "3", "4"]
    assert (trace.about[0]["lives"], trace.about[0]["dropped_lives"]) == (5, 2)


async def test_owners_that_are_out_at_the_end_are_in_it(folder: Path, tmp_path: Path) -> None:
    """Kills the planted bug of a timeline without what went wrong, which ends with an error."""
    opening = asyncvmm.open_exporter(
        "pool", device="cpu", pool_bytes="64KiB", trace=tmp_path / "e.json"
    )
    exporter = await opening.__aenter__()
    await exporter.send({"x": torch.ones(4)}, key="stuck")
    await opening.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
    trace = Trace(tmp_path / "e.json")
    (life,) = trace.lives["exporter pool"]
    assert life["args"]["unfinished"] is True
    assert trace.phases[id(life)] == ["filling", "held"]


async def test_without_it_nothing_of_it_is_there(folder: Path) -> None:
    """Kills the planted bug of a hot path that asks each time whether there is a timeline."""
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
        assert type(exporter._core.slots) is SlotTable
        assert "_forget" not in vars(exporter._room)
        async with asyncvmm.connect("pool", device="cpu", rank=0) as consumer:
            assert type(consumer._core).__name__ == "ConsumerCore"
            assert "say_done" not in vars(consumer._leases)


async def test_a_file_that_cannot_be_written_is_refused_at_once(folder: Path) -> None:
    """Kills the planted bug of finding that out when hours of lives are to be written."""
    for opening in (
        asyncvmm.open_exporter("pool", device="cpu", trace="/nowhere/e.json"),
        asyncvmm.connect("pool", device="cpu", rank=0, trace="/nowhere/c.json"),
    ):
        with pytest.raises(asyncvmm.ArgumentError, match=r"/nowhere/.*cannot be written"):
            await opening.__aenter__()


def test_a_forked_child_leaves_its_parents_file_alone(tmp_path: Path) -> None:
    """Kills the planted bug of a child that ends first and writes what it copied."""
    noted = timeline.Timeline(tmp_path / "trace.json")
    noted.made_in += 1  # as it looks from a child
    chrome.write(noted)
    assert not (tmp_path / "trace.json").exists()


def test_what_is_no_regular_file_is_written_into_and_stays(tmp_path: Path) -> None:
    """Kills: a device, a pipe or a link in whose place a file is put (root's /dev/null, say)."""
    near, far = os.pipe()
    pipe = tmp_path / "pipe"
    pipe.symlink_to(f"/proc/self/fd/{far}")  # as /dev/stdout is
    chrome.write(timeline.Timeline(pipe))
    os.close(far)
    with open(near, "rb") as file:
        assert json.load(file)["traceEvents"]
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "trace.json")
    chrome.write(timeline.Timeline(link))
    assert link.is_symlink()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert pipe.is_symlink()
    with pytest.raises(asyncvmm.ArgumentError, match=r"cannot be written: Is a directory"):
        chrome.join([link], tmp_path)


def test_parts_of_other_hosts_are_not_joined(tmp_path: Path) -> None:
    """Kills the planted bug of one picture made of two clocks."""
    for boot in "ab":
        part = {"traceEvents": [], "otherData": {"asyncvmm": [{"boot": boot}]}}
        (tmp_path / boot).write_text(json.dumps(part))
    with pytest.raises(asyncvmm.ArgumentError, match="different hosts"):
        chrome.join([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    (tmp_path / "c").write_text("[]")
    with pytest.raises(asyncvmm.ArgumentError, match="no trace"):
        chrome.join([tmp_path / "c"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_file_of_another_end_is_refused_at_once_and_free_after_it(
    folder: Path, tmp_path: Path
) -> None:
    """Kills: two ends that write over each other; a claim that outlives its end, or an end that
    could not be opened."""
    file = tmp_path / "trace.json"
    kept = [  # so that nothing is given back by the garbage collector
        asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB", trace=file)
        for _ in range(2)
    ]
    before = open_fds()
    for run in kept:  # one after the other has the same file
        async with run:
            for opening in (
                asyncvmm.connect("pool", device="cpu", rank=0, trace=file),
                asyncvmm.open_exporter("other", device="cpu", trace=file),
            ):
                with pytest.raises(asyncvmm.ArgumentError, match=r"trace\.json.*a folder"):
                    await opening.__aenter__()
        assert [*Trace(file).lives] == []
        assert open_fds() == before
    for _ in range(2):
        with pytest.raises(asyncvmm.ExporterNotFoundError):
            await asyncvmm.connect("pool", device="cpu", rank=0, trace=file).__aenter__()
        with pytest.raises(asyncvmm.ArgumentError, match="no folder"):
            await asyncvmm.open_exporter("/nowhere/e", device="cpu", trace=file).__aenter__()


async def test_in_a_folder_each_end_names_its_own_file(folder: Path, tmp_path: Path) -> None:
    """All ends are given the same, as by one environment variable; two of them have one name.

    Kills: a name that two ends of one process share, that leaves the folder, or that is left
    empty by an end that could not be opened.
    """
    with pytest.raises(asyncvmm.ExporterNotFoundError):
        await asyncvmm.connect("pool", device="cpu", rank=0, trace=tmp_path).__aenter__()
    assert os.listdir(tmp_path) == []
    path = str(folder / "pool")  # of which the file has no slash
    for _ in range(2):
        async with (
            asyncvmm.open_exporter(
                path, device="cpu", pool_bytes="64KiB", route=asyncvmm.Broadcast(2), trace=tmp_path
            ) as exporter,
            asyncvmm.connect(path, device="cpu", rank=0, trace=str(tmp_path)),
            asyncvmm.connect(path, device="cpu", rank=1, trace=f"{tmp_path}/"),
        ):
            await exporter.wait_attached(2)
    pid, parts = os.getpid(), sorted(os.listdir(tmp_path))
    ends = f"exporter{path.replace('/', '-')}", "rank-0", "rank-1"
    assert parts == sorted(f"{end}-{pid}{more}.json" for end in ends for more in ("", "_2"))
    out = tmp_path / "all.json"
    assert chrome.join([tmp_path / part for part in parts], out) > 0
    titles = sorted([f"exporter {path}", "rank 0", "rank 1"] * 2)
    assert sorted(Trace(out).ends.values()) == titles


def test_what_a_killed_process_left_empty_keeps_nobody_from_joining(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kills: an error, or silence, for a file that was claimed and never written."""
    noted = timeline.Timeline(tmp_path / "a.json")
    noted.prepare("a")
    chrome.write(noted)
    (tmp_path / "b.json").touch()
    traces.join(tmp_path / "out", [tmp_path / "a.json", tmp_path / "b.json"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("events of 1 parts")
    assert second == f"nothing is in {tmp_path / 'b.json'}"
