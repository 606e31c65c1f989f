"""Prometheus metrics of the exporters of this process; needs ``asyncvmm[metrics]``.

::

    metrics = ExporterMetrics(exporter)
    prometheus_client.REGISTRY.register(metrics)
    prometheus_client.start_http_server(9464)

The numbers are those of ``exporter.statistics()``, taken when somebody scrapes and at no other
time.  ``docs/metrics.md`` lists the names; a test holds it to the table in ``metric_names``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from asyncvmm._errors import ArgumentError
from asyncvmm._exporter.exporter import Exporter
from asyncvmm._exporter.latencies import BOUNDS, Latencies
from asyncvmm._exporter.statistics import ConsumerStatistics, PoolStatistics
from asyncvmm._types import Key
from asyncvmm.blocking import Exporter as BlockingExporter
from asyncvmm.integrations.metric_names import CONSUMER, METRICS, POOL

SCRAPE_SECONDS = 2.0
"""How long a scrape waits for an exporter's event loop before it counts as down; Prometheus
itself gives up after ten."""

_BOUNDS = [repr(bound) for bound in BOUNDS[:-1]]


class ExporterMetrics(Collector):
    """Collects the statistics of some exporters; register it with a registry.

    It may be scraped from any thread: an exporter is asked on its own event loop.  One that is
    closed, or whose loop stands still, is ``asyncvmm_up 0`` and shows nothing else.  Of several
    under one name, one after the other, it is the one that is open.
    """

    def __init__(self, *exporters: Exporter | BlockingExporter) -> None:
        self._exporters: dict[object, tuple[Exporter, asyncio.AbstractEventLoop]] = {}
        for exporter in exporters:
            self.add(exporter)

    def add(self, exporter: Exporter | BlockingExporter) -> None:
        """Collect from this exporter, too.

        Call it on the exporter's event loop; for one of :mod:`asyncvmm.blocking` in any thread.
        """
        if isinstance(exporter, BlockingExporter):
            found = exporter._exporter, exporter._thread._loop
        elif not isinstance(exporter, Exporter):
            raise ArgumentError(
                f"an exporter of asyncvmm or asyncvmm.blocking is asked for, got a "
                f"{type(exporter).__module__}.{type(exporter).__name__}"
            )
        else:
            found = exporter, asyncio.get_running_loop()
        self._exporters[exporter] = found

    def discard(self, exporter: Exporter | BlockingExporter) -> None:
        """Collect from this one no more; again is a no-op."""
        self._exporters.pop(exporter, None)

    def describe(self) -> Iterable[Metric]:
        """Return the families without samples, so that registering scrapes nothing."""
        return [_family(name) for name in METRICS]

    def collect(self) -> Iterator[Metric]:
        """Ask every exporter; yield every family once, whatever there is in it."""
        families = {name: _family(name) for name in METRICS}
        by_name: dict[str, PoolStatistics | None] = {}
        for exporter, loop in list(self._exporters.values()):
            by_name[exporter.name] = _ask(exporter, loop) or by_name.get(exporter.name)
        for exporter_name, found in by_name.items():
            labels = {"exporter": exporter_name}
            _sample(families["asyncvmm_up"], labels, float(found is not None))
            if found is not None:
                _pool(families, labels, found)
                _consumers(families, labels, found.consumers)
        yield from families.values()


def _ask(exporter: Exporter, loop: asyncio.AbstractEventLoop) -> PoolStatistics | None:
    """Return an exporter's statistics, taken on its loop; None if that does not answer."""
    answer: concurrent.futures.Future[PoolStatistics | None] = concurrent.futures.Future()

    def look() -> None:
        if answer.set_running_or_notify_cancel():
            answer.set_result(None if exporter._ended else exporter.statistics())

    try:
        if asyncio.get_running_loop() is loop:
            look()
            return answer.result()
    except RuntimeError:
        pass  # no loop runs in this thread, which is as it should be
    try:
        loop.call_soon_threadsafe(look)
        return answer.result(SCRAPE_SECONDS)
    except (TimeoutError, RuntimeError):  # it stands still, or is closed
        answer.cancel()
        return None


def _family(name: str) -> Metric:
    kind, text, _ = METRICS[name]
    return Metric(name.removesuffix("_total"), text, kind)


def _sample(family: Metric, labels: dict[str, str], value: float) -> None:
    suffix = "_total" if family.type == "counter" else ""
    family.add_sample(family.name + suffix, labels, value)


def _pool(families: dict[str, Metric], labels: dict[str, str], found: PoolStatistics) -> None:
    for name, field in POOL.items():
        value = getattr(found, field)
        if isinstance(value, Latencies):
            _histogram(families[name], labels, value)
        else:
            _sample(families[name], labels, float(value))
    slots = found.slots
    for state in ("free", "filling", "held", "draining", "quarantined"):
        _sample(families["asyncvmm_slots"], {**labels, "state": state}, getattr(slots, state))


def _histogram(family: Metric, labels: dict[str, str], found: Latencies) -> None:
    below = 0
    for bound, count in zip(_BOUNDS, found.counts, strict=False):
        below += count
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, below)
    family.add_sample(f"{family.name}_bucket", {**labels, "le": "+Inf"}, found.count)
    family.add_sample(f"{family.name}_sum", labels, found.total)
    family.add_sample(f"{family.name}_count", labels, found.count)


def _consumers(
    families: dict[str, Metric], labels: dict[str, str], found: tuple[ConsumerStatistics, ...]
) -> None:
    by_member: dict[Key, list[ConsumerStatistics]] = {}
    for each in found:  # a quarantined rank and its successor have the same name
        by_member.setdefault(each.member, []).append(each)
    for member, same in by_member.items():
        whose = {**labels, "consumer": str(member)}
        for name, field in CONSUMER.items():
            values = [float(getattr(each, field)) for each in same]
            _sample(families[name], whose, max(values) if field == "oldest" else sum(values))
        for pid, state in {(str(each.pid), each.state) for each in same}:
            info = {**whose, "pid": pid, "state": state}
            _sample(families["asyncvmm_consumer_info"], info, 1.0)
