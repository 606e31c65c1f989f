"""The Prometheus collector: the same numbers as ``statistics()``, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

import asyncvmm
from asyncvmm import blocking
from asyncvmm._core.observation import PoolLine, Snapshot
from asyncvmm._exporter.observing import snapshot
from asyncvmm.cli.demo import exporter_side, images, model
from asyncvmm.cli.demo.plan import Plan
from asyncvmm.cli.loops import LoopChoice
from asyncvmm.cli.observing import Watch
from asyncvmm.testing import open_pair
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.conftest import folder, nursery, peers
from tests.process.harness import Peers, until
from tests.process.patterns import features, note

prometheus_client = pytest.importorskip("prometheus_client", reason="needs asyncvmm[metrics]")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402 - see above

from asyncvmm.integrations import prometheus  # noqa: E402 - see above
from asyncvmm.integrations.metric_names import CONSUMER, METRICS, POOL  # noqa: E402 - see above
from asyncvmm.integrations.prometheus import ExporterMetrics  # noqa: E402 - see above

__all__ = ["folder", "nursery", "peers"]

ROOT = Path(__file__).parent.parent.parent
DEMO = f"@asyncvmm-metrics-demo-{os.getpid()}"
DATA = {"x": torch.arange(10)}
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a loop that is only kept off the processor."""
    monkeypatch.setattr(prometheus, "SCRAPE_SECONDS", PROMPTLY)


def scrape(metrics: ExporterMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Have it scraped as a server would; return every sample, and fail on a doubled one."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics)
    text = prometheus_client.generate_latest(registry).decode()
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def agrees(samples: Samples, exporter: asyncvmm.Exporter) -> None:
    """Check every sample against what the exporter says itself at this moment."""
    statistics = exporter.statistics()

    def of(name: str, **labels: str) -> float:
        return samples[name, frozenset({"exporter": exporter.name, **labels}.items())]

    assert of("asyncvmm_up") == 1
    for name, field in POOL.items():
        value = getattr(statistics, field)
        if isinstance(value, asyncvmm.Latencies):
            assert of(f"{name}_count") == of(f"{name}_bucket", le="+Inf") == value.count
            assert of(f"{name}_sum") == pytest.approx(value.total)
        elif field != "oldest_wait":
            assert of(name) == value, name
    for state in ("free", "filling", "held", "draining", "quarantined"):
        assert of("asyncvmm_slots", state=state) == getattr(statistics.slots, state)
    for consumer in statistics.consumers:
        for name, field in CONSUMER.items():
            if field != "oldest":
                whose = of(name, consumer=str(consumer.member))
                assert whose == getattr(consumer, field), name


async def test_every_number_is_that_of_the_statistics() -> None:
    """Kills: a counter that shows another one's field, and a histogram that is not cumulative."""
    async with open_pair(consumers=2, slots=4) as pair:
        exporter = pair.exporter
        metrics = ExporterMetrics(exporter)
        agrees(scrape(metrics), exporter)
        for number in range(3):
            ack = await exporter.send({"x": torch.zeros(100)}, key=number, require="none")
            batches = [await each.receive() for each in pair.consumers]
            agrees(scrape(metrics), exporter)
            for batch in batches:
                batch.release()
            await ack
        await exporter.send({"x": torch.zeros(7)}, key="held", to=0)
        held = await pair.consumer.receive()
        samples = scrape(metrics)
        agrees(samples, exporter)
        buckets = sorted(
            (float(dict(labels)["le"]), value)
            for (name, labels), value in samples.items()
            if name == "asyncvmm_handoff_seconds_bucket"
        )
        values = [value for _, value in buckets]
        assert len(values) == 32
        assert values == sorted(values)
        assert values[-1] == 3
        assert {name for name, _ in samples} == {
            each
            for name, (kind, _, _) in METRICS.items()
            for each in (
                [f"{name}_bucket", f"{name}_sum", f"{name}_count"]
                if kind == "histogram"
                else [name]
            )
        }
        held.release()


async def test_a_scrape_may_come_from_any_thread_while_owners_flow() -> None:
    """Kills: statistics that are put together beside the loop that changes them."""
    threads = set()
    async with open_pair(slots=4) as pair:
        exporter, consumer = pair.exporter, pair.consumer
        report = exporter.statistics

        def noted() -> asyncvmm.PoolStatistics:
            threads.add(threading.get_ident())
            return report()

        exporter.statistics = noted  # type: ignore[method-assign]  # to see who asks
        metrics = ExporterMetrics(exporter)
        loop = asyncio.get_running_loop()
        scraping = loop.run_in_executor(None, lambda: [scrape(metrics) for _ in range(20)])
        while not scraping.done():
            ack = await exporter.send(DATA)
            (await consumer.receive()).release()
            await ack
        published = [
            samples["asyncvmm_owners_published_total", frozenset({("exporter", exporter.name)})]
            for samples in await scraping
        ]
        assert published == sorted(published)
        assert threads == {threading.get_ident()}


async def test_a_loop_that_stands_still_and_an_exporter_that_is_closed_are_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: a scrape that hangs with the loop, and one that dies with an exporter."""
    monkeypatch.setattr(prometheus, "SCRAPE_SECONDS", 0.05)
    async with open_pair() as pair, open_pair() as other:
        metrics = ExporterMetrics(pair.exporter, other.exporter)
        found: list[Samples] = []
        thread = threading.Thread(target=lambda: found.append(scrape(metrics)))
        thread.start()
        thread.join()  # the loop stands still for as long as it is scraped
        (samples,) = found
        assert {name for name, _ in samples} == {"asyncvmm_up"}
        assert set(samples.values()) == {0.0}
    assert set(scrape(metrics).values()) == {0.0}
    metrics.discard(pair.exporter)
    metrics.discard(other.exporter)
    metrics.discard(other.exporter)
    assert scrape(metrics) == {}


async def test_an_exporter_and_its_successor_under_the_name_are_one_sample() -> None:
    """Kills: asyncvmm_up twice, 0 and 1, of which Prometheus keeps the first."""
    name = f"@asyncvmm-metrics-{os.getpid()}"
    metrics = ExporterMetrics()
    for _ in range(3):
        async with open_pair(name=name) as pair:
            metrics.add(pair.exporter)
            assert scrape(metrics)["asyncvmm_up", frozenset({("exporter", name)})] == 1
    assert list(scrape(metrics).values()) == [0.0]


def test_an_exporter_of_code_that_is_not_async_is_collected_too() -> None:
    with blocking.open_exporter(
        f"@asyncvmm-metrics-{os.getpid()}", device="cpu", pool_bytes="64KiB", slots=4
    ) as exporter:
        metrics = ExporterMetrics(exporter)
        exporter.send(DATA, require="none")
        labels = frozenset({("exporter", exporter.name), ("state", "held")})
        assert scrape(metrics)["asyncvmm_slots", labels] == 1
        with blocking.connect(exporter.name, device="cpu", rank=0) as consumer:
            consumer.receive().release()
    assert set(scrape(metrics).values()) == {0.0}
    metrics.discard(exporter)
    assert scrape(metrics) == {}


async def test_registering_scrapes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair() as pair:
        monkeypatch.setattr(prometheus, "_ask", lambda *_: pytest.fail("it was asked"))
        registry = prometheus_client.CollectorRegistry()
        registry.register(ExporterMetrics(pair.exporter))
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(ExporterMetrics(pair.exporter))


async def test_a_quarantined_rank_and_its_successor_are_one_sample(peers: Peers) -> None:
    """Kills: two samples of one name and one set of labels, which Prometheus refuses."""
    async with asyncvmm.open_exporter(
        "pool", device="cpu", slots=4, pool_bytes="64KiB"
    ) as exporter:
        first, second = peers.start(), peers.start()
        await first.call(steps.connect, "pool", 0)
        await exporter.send(features(0, 0, 99), key=0, metadata=note(0, 0, 99), require="none")
        await first.call(steps.take, 1)
        await first.call(steps.close_socket)
        await until(lambda: exporter.statistics().slots.quarantined == 1)
        await second.call(steps.connect, "pool", 0)
        await exporter.send(features(1, 0, 99), key=1, metadata=note(1, 0, 99), require="none")
        samples = scrape(ExporterMetrics(exporter))
        labels = frozenset({("exporter", "pool"), ("consumer", "0")})
        assert samples["asyncvmm_consumer_holding", labels] == 2
        assert samples["asyncvmm_consumer_quarantined", labels] == 1
        infos = [dict(labels) for name, labels in samples if name == "asyncvmm_consumer_info"]
        assert {int(info["pid"]) for info in infos} == {first.pid, second.pid}
        await first.killed()
        await second.call(steps.drop, 1)


@pytest.mark.slow
def test_top_and_metrics_during_the_demo_agree_with_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each of its acknowledgements, and from outside all the time.

    Kills: numbers that are right only while nothing happens.
    """
    opened: list[Any] = []
    enter = asyncvmm.open_exporter.__aenter__

    async def noted(self: Any) -> Any:
        exporter = await enter(self)
        opened.append((exporter, ExporterMetrics(exporter)))
        return exporter

    monkeypatch.setattr(asyncvmm.open_exporter, "__aenter__", noted)
    looks = 0

    def look() -> None:
        nonlocal looks
        exporter, metrics = opened[0]
        agrees(scrape(metrics), exporter)
        pool = msgspec.convert(exporter.statistics(), PoolLine, from_attributes=True)
        still = {"oldest_wait": 0.0}  # the only number that time alone changes
        assert replace(snapshot(exporter).pool, **still) == replace(pool, **still)
        looks += 1

    plan = Plan(DEMO, "cpu", ("cpu",), "broadcast", 6, None, False, LoopChoice.AUTO)
    streamer = exporter_side.Streamer(plan, images.Frames(), model.build_encoder("cpu"), look)
    over = threading.Event()
    seen: list[Snapshot] = []
    outside = threading.Thread(target=look_from_outside, args=(over, seen))
    outside.start()
    try:
        streamed = asyncio.run(streamer.run())
    finally:
        over.set()
        outside.join()
    assert looks == 6
    assert streamed.statistics is not None
    assert streamed.statistics.acknowledged == 6
    assert seen
    for before, after in itertools.pairwise(seen):
        assert before.pool.published <= after.pool.published <= 6
    for each in seen:
        slots, pool = each.pool.slots, each.pool
        states = slots.free, slots.filling, slots.held, slots.draining, slots.quarantined
        assert sum(states) == slots.total == plan.slots
        assert pool.used_bytes + pool.free_bytes == pool.pool_bytes
        assert pool.published - pool.acknowledged == slots.held + slots.draining
        assert each.owners_out == slots.total - slots.free


def look_from_outside(over: threading.Event, seen: list[Snapshot]) -> None:
    """Look at the demo as ``asyncvmm top`` does until it is over."""
    while not over.wait(0.02):
        with (
            contextlib.suppress(asyncvmm.AsyncVMMError),
            contextlib.closing(Watch([DEMO])) as watch,
        ):
            while not over.wait(0.02):
                seen += [each.now for each in watch.look(PROMPTLY) if each.now is not None]


def test_a_metric_has_the_words_of_what_it_shows_in_its_name() -> None:
    """Kills: one counter's name over another one's field, which agrees with itself everywhere."""
    for name, field in {**POOL, **CONSUMER}.items():
        assert set(field.split("_")) <= set(name.split("_")), (name, field)
    assert len({*POOL.values()}) == len(POOL)
    assert len({*CONSUMER.values()}) == len(CONSUMER)


# -- what is written down ------------------------------------------------------------------------


def test_the_page_lists_exactly_the_metrics_there_are() -> None:
    """Kills: a metric that is renamed or added in silence."""
    rows = re.findall(
        r"^\| `(asyncvmm_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$",
        (ROOT / "docs/metrics.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    listed = {
        name: (kind, text, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, text in rows
    }
    assert listed == METRICS


def test_the_dashboard_asks_only_for_metrics_and_labels_there_are() -> None:
    """Kills: a panel that stays empty because of a name that nobody has."""
    board = json.loads((ROOT / "docs/grafana/asyncvmm.json").read_text(encoding="utf-8"))
    asked = set()
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = re.findall(r"asyncvmm_\w+", target["expr"])
            assert names, target
            labels: set[str] = set()
            for name in names:
                plain = re.sub(r"_(bucket|sum|count)$", "", name)
                found = plain if METRICS.get(plain, ("",))[0] == "histogram" else name
                assert found in METRICS, name
                labels |= {*METRICS[found][2], "le"}
                asked.add(found)
            used = re.findall(r"{{(\w+)}}", target["legendFormat"])
            used += re.findall(r"(\w+)=~?\"", target["expr"])
            for group in re.findall(r"by \(([^)]*)\)", target["expr"]):
                used += [each.strip() for each in group.split(",")]
            assert set(used) <= labels, target
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {
        "asyncvmm_slots",
        "asyncvmm_handoff_seconds",
        "asyncvmm_consumer_oldest_seconds",
    } <= asked


@pytest.mark.parametrize("thing", [None, 5, "vision"])
async def test_metrics_of_what_is_no_exporter_are_refused(thing: Any) -> None:
    """Kills: a collector that fails at each scrape, for what it was given long ago."""
    with pytest.raises(asyncvmm.ArgumentError, match="an exporter of asyncvmm"):
        ExporterMetrics(thing)
