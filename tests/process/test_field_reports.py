"""docs/field-reports.md says the truth, and the reports that no other test of a kind covers."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import threading
from pathlib import Path
from time import monotonic

import pytest
import torch

import asyncvmm
from asyncvmm.testing import FakeDevice, FakePort, open_pair
from tests.process.harness import turns, until

ROOT = Path(__file__).parents[2]
NUMBERS = [
    1, 3, 4, 6, 7, 8, 9, 11, 12, 13, 16, 17, 18, 19, 20, 21, 22, 25, 26, 27, 28, 30, 32, 33, 35, 38,
    39, 40, 42, 43, 44, 45, 46, 48, 49, 51, 52, 53, 54, 55, 56, 57, 60, 61, 63,
]  # fmt: skip
"""The reports of the log, which has gaps."""

ON_A_GPU = {3, 4, 7, 8, 11, 16, 17, 18, 20, 22, 38, 39, 40, 42, 43, 44, 45, 46, 49, 52, 60, 61}
"""Those whose trial needs a GPU, or needs one as well."""

ONLY_ON_A_GPU = {3, 38, 39, 42, 43, 44, 46, 48}
"""Those whose trial says nothing without one.  48 needs MPS, and is a written rule until then."""


def rows() -> dict[int, str]:
    """Return the rows of the table by number."""
    found: dict[int, str] = {}
    for line in (ROOT / "docs" / "field-reports.md").read_text().splitlines():
        match = re.match(r"\| (\d+) \|", line)
        if match:
            assert int(match[1]) not in found, f"report {match[1]} has two rows"
            found[int(match[1])] = line
    return found


def test_every_report_has_a_row() -> None:
    """Kills: a report that nobody answered."""
    assert list(rows()) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_every_test_that_a_row_names_is_there_and_knows_its_report(number: int) -> None:
    """Kills: a row that outlived its test."""
    knows: list[str] = []
    for each in re.findall(r"`(tests/[^`]*)`", rows()[number]):
        path, _, name = each.partition("::")
        texts = docstrings(ROOT / path)
        assert not name or name in texts, f"{each} is not there"
        if number in reports_in(texts[name]):
            knows.append(path)
    on_a_gpu = [path for path in knows if path.startswith("tests/gpu/")]
    assert on_a_gpu or number not in ON_A_GPU, f"no test on a GPU names report {number}"
    assert len(knows) > len(on_a_gpu) or number in ONLY_ON_A_GPU, f"no test names report {number}"


def docstrings(file: Path) -> dict[str, str]:
    """Return the docstrings of a file's tests by name, and its own by ""."""
    tree = ast.parse(file.read_text())
    functions = [e for e in tree.body if isinstance(e, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {each.name: ast.get_docstring(each) or "" for each in functions}
    return {"": ast.get_docstring(tree) or "", **found}


def reports_in(text: str) -> set[int]:
    """Return the numbers of the reports that a docstring names."""
    lists = re.findall(r"[Rr]eports? (\d+(?:(?:, and |, | and )\d+)*)", " ".join(text.split()))
    return {int(number) for each in lists for number in re.findall(r"\d+", each)}


NEVER = {
    r"\bpickle\b|\bmarshal\b|\bshelve\b|(?<!\.)\b(eval|exec)\(": "objects or code from a peer (53)",
    r"cuLaunchHostFunc|cuStreamAddCallback": "Python in a driver callback (46)",
    r"multiprocessing\.shared_memory|shm_open|resource_tracker": "names that outlive us (6)",
    r"SIGKILL|os\.kill\(": "a hard kill of anybody, which may hurt others under MPS (48)",
}


@pytest.mark.parametrize("pattern", NEVER, ids=NEVER.values())
def test_what_the_package_never_does(pattern: str) -> None:
    """Looked for in its source, comments and docstrings left out (field reports 6, 46, 48, 53).

    Its tools for tests may kill what they started themselves.
    """
    package = Path(asyncvmm.__file__).parent
    for file in package.rglob("*.py"):
        if "SIGKILL" in pattern and file.is_relative_to(package / "testing"):
            continue
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", file.read_text())
        assert re.search(pattern, code) is None, file


async def test_the_statistics_say_how_large_a_pool_should_be(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a mixed run, and one line at creation with the true size (field report 57).

    Kills: a number that is not kept, and a pool whose size nobody was told.
    """
    with caplog.at_level(logging.INFO, "asyncvmm"):
        async with open_pair(name="sized", pool_bytes=10_000, slots=4) as pair:
            exporter, consumer = pair.exporter, pair.consumer
            lines = [each.getMessage() for each in caplog.records if "sized" in each.getMessage()]
            assert lines == ["exporter sized: pool of 10000 bytes (12288 physical) on cpu, 4 slots"]
            data = {"x": torch.zeros(4000, dtype=torch.uint8)}
            acks = [await exporter.send(data, key=key, require="none") for key in ("a", "b")]
            waiting = asyncio.ensure_future(exporter.send(data, key="c", require="none"))
            await turns(20)
            now = exporter.statistics()
            assert (now.pool_bytes, now.physical_bytes, now.max_pool_bytes) == (10240, 12288, 10240)
            assert (now.used_bytes, now.free_bytes, now.largest_gap) == (8192, 2048, 2048)
            assert (now.waiting, now.waits) == (1, 0)
            assert now.oldest_wait > 0
            assert [(o.key, o.held_by, o.age > 0) for o in now.owners] == [
                ("a", (0,), True),
                ("b", (0,), True),
            ]
            (await consumer.receive()).release()
            await consumer.receive()  # dropped
            acks.append(await waiting)
            (await consumer.receive()).release()
            for ack in acks:
                await ack
            after = exporter.statistics()
            assert (after.waiting, after.waits, after.high_water) == (0, 1, 8192)
            assert after.longest_wait == after.total_wait > 0
            assert (after.published, after.acknowledged, after.refused) == (3, 3, 1)
            assert (after.copies, after.copied_bytes, after.fallbacks) == (3, 12288, 0)


async def test_events_are_as_many_as_slots_and_consumers(folder: Path) -> None:
    """One slot, three consumers, hundreds of batches (field report 7).

    Kills: an event for each read, and a name of one that is sent again.
    """
    device = FakeDevice()
    async with open_pair(name="events", port=FakePort(device), consumers=3, slots=1) as pair:
        for _ in range(200):
            ack = await pair.exporter.send({"x": torch.ones(4)})
            for consumer in pair.consumers:
                with await consumer.receive() as batch:
                    batch[0]["x"]
                del batch
            await ack
        assert len(device.events) == 3
        assert len(device.waits) == 600


async def test_no_slower_path_is_taken_unasked(folder: Path) -> None:
    """There is no fallback: both ends say what they use, or that they do not fit (report 56).

    Kills: a consumer that asks for a GPU and is served from host memory without a word.
    """
    async with open_pair(name="slow") as pair:
        assert pair.exporter.statistics().device == "cpu"
        assert pair.consumer.device == pair.consumer.statistics().device == "cpu"
        with pytest.raises((asyncvmm.HandshakeError, asyncvmm.BackendError)):
            async with asyncvmm.connect("slow", device="cuda:0", rank=0):
                pass
    device = FakeDevice()
    async with open_pair(name="fast", port=FakePort(device)):
        with pytest.raises(asyncvmm.HandshakeError) as caught:
            async with asyncvmm.connect("fast", device="cpu", rank=0):
                pass
        assert caught.value.reason == "kind"


async def test_waiting_for_many_fences_costs_one_thread_and_few_looks(folder: Path) -> None:
    """Fifty acknowledgements pending, asked after ever longer naps (field report 61).

    Kills: a task or a thread for each, and a loop that looks without a pause.
    """
    device = FakeDevice(hold_release=True)
    async with open_pair(name="waiting", port=FakePort(device), slots=64) as pair:
        threads = threading.active_count()
        acks = []
        for _ in range(50):
            acks.append(await pair.exporter.send({"x": torch.ones(4)}))
            with await pair.consumer.receive() as batch:
                batch[0]["x"]
            del batch
        await until(lambda: len(device.pending("release")) == 50 and device.fences[-1].asked >= 0)
        assert threading.active_count() <= threads + 1
        await until(lambda: pair.exporter._draining._soon.idle)  # the thread asks from here on
        (oldest, *others) = device.pending("release")
        begin, before = oldest.asked, sum(fence.asked for fence in others)
        began = monotonic()
        await asyncio.sleep(0.2)
        await until(lambda: oldest.asked > begin)
        assert oldest.asked - begin <= 2000 * (monotonic() - began)
        # One lane: the oldest tells.
        assert sum(fence.asked for fence in others) == before
        device.finish()
        for ack in acks:
            await ack
