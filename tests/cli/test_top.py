"""``asyncvmm top``: what it shows of exporters that run, stand still, end, or are not there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import asyncvmm
from asyncvmm._core import wire
from asyncvmm._exporter.latencies import BOUNDS, Histogram, Latencies
from asyncvmm.cli import observing
from asyncvmm.cli.observing import Observer, Watch
from asyncvmm.cli.top.screen import screen, size
from asyncvmm.cli.top.view import view
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers

DATA = {"x": torch.arange(10)}
ABSTRACT = f"@asyncvmm-top-test-{os.getpid()}"
TOP = (sys.executable, "-m", "asyncvmm.cli", "top")

pytestmark = pytest.mark.usefixtures("folder")


def exporting(name: str = "vision", **options: Any) -> asyncvmm.open_exporter:
    settings = {"device": "cpu", "slots": 2, "pool_bytes": "64KiB", **options}
    return asyncvmm.open_exporter(name, **settings)


def drawn(observers: list[Observer]) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(observers))
    console.file.close()
    return console.export_text()


def ours(observers: list[Observer]) -> list[Observer]:
    """Leave out what others run on this machine under abstract names."""
    return [each for each in observers if each.now and each.now.pid == os.getpid()]


async def look(watch: Watch) -> list[Observer]:
    return ours(await asyncio.to_thread(watch.look, PROMPTLY))


async def top(*arguments: str) -> tuple[str, str]:
    """Run the command to its end; return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *TOP,
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "140"},
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err.decode()
    return out.decode(), err.decode()


# -- what it shows -------------------------------------------------------------------------------


async def test_a_stopped_consumer_is_named_within_a_second(peers: Peers) -> None:
    """With its rank, its process's number, what it holds, since when, and that it is stopped."""
    async with exporting() as exporter:
        peer = peers.start()
        await peer.call(steps.connect, "vision", 0)
        peer.stop()
        for owner in range(2):
            await exporter.send(DATA, key=f"owner {owner}", require="none")
        waiting = asyncio.create_task(exporter.send(DATA, require="none"))
        with closing(Watch(["vision"])) as watch:
            async with asyncio.timeout(PROMPTLY):
                (observer,) = await look(watch)
            shown = view(observer)
            (consumer,) = shown["consumers"]
            assert (consumer["member"], consumer["pid"]) == (0, peer.pid)
            assert (consumer["process"], consumer["holding"]) == ("stopped", 2)
            assert consumer["oldest"] > 0
            assert shown["waiting"] == 1
            assert f"rank 0 (pid {peer.pid}) holds 2 owners" in shown["explanation"]
            text = drawn([observer])
            assert any("rank 0" in line and "stopped" in line for line in text.splitlines())
            assert "1 call waits for room" in text
        waiting.cancel()
        await peer.killed()


async def test_a_stopped_exporter_is_shown_as_one_that_does_not_answer(peers: Peers) -> None:
    """Kills: a view that stands still with the first exporter that does."""
    peer = peers.start()
    await peer.call(steps.open_exporter, "still", 1)
    async with exporting() as exporter:
        with closing(Watch([])) as watch:
            seen = await asyncio.to_thread(watch.look, PROMPTLY)
            assert {"still", "vision"} <= {each.label for each in seen}
            peer.stop()
            for _ in range(2):
                seen = await asyncio.to_thread(watch.look, 0.01)
            still = next(each for each in seen if each.label == "still")
            assert view(still)["answers"] is False
            assert view(still)["process"] == "stopped"
            assert "has not answered" in drawn([still])
            with closing(Watch(["still"])) as late:  # it comes when nobody answers any more
                (late_still,) = await asyncio.to_thread(late.look, 0.01)
                assert view(late_still) == {
                    "name": "still", "pid": peer.pid, "process": "stopped", "answers": False,
                }  # fmt: skip
                assert f"its process {peer.pid} is stopped" in drawn([late_still])
            with closing(Watch(["vision"])) as other:
                (vision,) = await look(other)
                assert vision.now is not None
                assert vision.now.name == exporter.name
            peer.resume()
            await peer.call(steps.leave)
            for _ in range(2):  # the answer that was on its way, and the end
                seen = await asyncio.to_thread(watch.look, PROMPTLY)
            assert "still" not in {each.label for each in seen}


async def test_rates_and_latencies_are_those_between_two_looks() -> None:
    """Kills: a rate since the beginning, which a lull of an hour would not change."""
    async with exporting() as exporter, asyncvmm.connect("vision", rank=0) as consumer:

        async def stream(count: int) -> None:
            for _ in range(count):
                ack = await exporter.send(DATA)
                (await consumer.receive()).release()
                await ack

        with closing(Watch(["vision"])) as watch:
            await stream(5)
            (first,) = await look(watch)
            assert first.now is not None
            assert observing.rate(first) == pytest.approx(5 / first.now.uptime)
            assert observing.latencies(first, "handoff").count == 5
            await stream(3)
            (second,) = await look(watch)
            assert second.before is not None
            assert second.now is not None
            seconds = second.now.uptime - second.before.uptime
            assert observing.rate(second) == pytest.approx(3 / seconds)
            assert observing.latencies(second, "handoff").count == 3
            (third,) = await look(watch)
            assert observing.rate(third) == 0
            assert view(third)["handoff"]["count"] == 8


async def test_the_screen_draws_whatever_state_there_is() -> None:
    """Kills: a division by nothing, and markup that a name can break out of."""
    assert "no exporter is running" in drawn([])
    async with (
        exporting("a", slots=1, route=asyncvmm.Compete()) as exporter,
        asyncvmm.connect("a", device="cpu", member="[red]x[/nope]") as consumer,
    ):
        await exporter.send(DATA, key="[/]", require="none")
        batch = await consumer.receive()
        with closing(Watch(["a"])) as watch:
            text = drawn(await look(watch))
            assert "[red]x[/nope]" in text
            assert "none of 1 slots is free" in text
        batch.release()
    assert [size(n) for n in (0, 1023, 1024, 1536, (1 << 20) - 512, 3 << 30)] == [
        "0 B", "1023 B", "1 KiB", "1.5 KiB", "0.9995 MiB", "3 GiB",
    ]  # fmt: skip


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_once_as_json_lists_all_exporters_of_this_user() -> None:
    asyncio.run(list_all())  # the loop makes no difference to another process


async def list_all() -> None:
    async with exporting("one") as exporter, exporting("two"), exporting(ABSTRACT):
        await exporter.send(DATA, key="k", require="none")
        out, err = await top("--once", "--json")
        assert err == ""
        shown = {each["name"]: each for each in json.loads(out) if each["pid"] == os.getpid()}
        assert set(shown) == {"one", "two", ABSTRACT}
        statistics = exporter.statistics()
        assert shown["one"]["used_bytes"] == statistics.used_bytes == 256
        assert shown["one"]["slots"]["held"] == 1
        assert shown["one"]["owners"][0]["key"] == "k"
        async with asyncvmm.connect("one", rank=0) as consumer:
            (await consumer.receive()).release()
        out, err = await top("two", "--once")
        assert "two" in out
        assert "64 KiB free of 64 KiB" in out


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["drawn", "json"])
def test_it_goes_on_looking_until_it_is_interrupted_or_the_exporter_ends(
    options: list[str],
) -> None:
    """A picture or a line of JSON per look; Ctrl-C is no error, and an end is one line.

    Kills: a traceback for whoever leaves, and a view of an exporter that is long gone.
    """
    asyncio.run(go_on(options))


async def go_on(options: list[str]) -> None:
    for interrupt in (True, False):
        async with exporting():
            process = await asyncio.create_subprocess_exec(
                *(*TOP, "vision", "--interval", "0.1", *options),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert process.stdout is not None
            seen = 0
            while seen < 2:
                seen += b"vision" in await process.stdout.readline()
            if interrupt:
                process.send_signal(signal.SIGINT)
                _, err = await process.communicate()
                assert (process.returncode, err) == (0, b"")
        if not interrupt:
            _, err = await process.communicate()
            assert process.returncode == 1
            assert err.splitlines() == [b"asyncvmm: PeerLostError: the exporter 'vision' is gone"]


@pytest.mark.slow
def test_an_exporter_that_is_not_there_is_one_line_and_status_1() -> None:
    done = subprocess.run([*TOP, "nobody"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "ExporterNotFoundError" in done.stderr


# -- its parts -----------------------------------------------------------------------------------


def test_a_stale_node_is_left_out(folder: Path) -> None:
    """Kills: a view that ends because of what a killed exporter left."""
    import socket

    (folder / "asyncvmm").mkdir(mode=0o700)
    path = folder / "asyncvmm" / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
    (folder / "asyncvmm" / "file.sock").write_text("no socket")
    with closing(Watch([])) as watch:
        assert {"stale", "file"} & {each.label for each in watch.look(0.1)} == set()
    path.unlink()
    (folder / "asyncvmm" / "file.sock").unlink()


def test_rubbish_for_an_answer_is_an_error_of_its_kind(folder: Path) -> None:
    import socket

    address = str(folder / "liar")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        for answer, error in {
            b"rubbish": asyncvmm.RemoteProtocolError,
            wire.encode_greeting(wire.Attached()): asyncvmm.HandshakeError,
            wire.encode_greeting(wire.Attached(), version=9): asyncvmm.VersionMismatchError,
        }.items():
            with closing(Watch([address])) as watch:
                watch.look(0.0)
                liar = listener.accept()[0]
                liar.send(answer)
                with liar, pytest.raises(error):
                    watch.look(PROMPTLY)
    os.unlink(address)


def test_quantiles_lie_in_the_bucket_of_what_was_counted() -> None:
    """Kills: a rank that is off by one, and a bucket whose bounds are off by a power."""
    histogram = Histogram()
    for microseconds in [3] * 98 + [1000] + [10**10]:
        histogram.add(microseconds * 1e-6)
    found = histogram.latencies()
    assert found.count == 100
    assert 2e-6 < found.quantile(0.5) <= 4e-6
    assert 2e-6 < found.quantile(0.98) <= 4e-6
    assert 512e-6 < found.quantile(0.99) <= 1024e-6
    assert found.quantile(1.0) == BOUNDS[-1]
    assert found.mean == pytest.approx((3 * 98 + 1000 + 10**10) * 1e-8)
    assert Latencies((0, 0), 0.0).quantile(0.5) == 0.0
    assert Latencies((0, 0), 0.0).mean == 0.0
    for power in range(20):
        below, at = Histogram(), Histogram()
        below.add((2**power - 0.5) * 1e-6)
        at.add((2**power + 0.5) * 1e-6)
        assert below.latencies().counts.index(1) == power
        assert at.latencies().counts.index(1) == power + 1
