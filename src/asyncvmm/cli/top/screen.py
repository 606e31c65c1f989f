"""What ``asyncvmm top`` draws."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncvmm._core.observation import ConsumerLine
from asyncvmm._core.wire import Snapshot
from asyncvmm.cli.observing import Observer, latencies, process_state, rate

LATE_SECONDS = 1.0
"""An owner older than this is drawn in yellow."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def screen(observers: Sequence[Observer]) -> RenderableType:
    """Draw every exporter, one below the other."""
    if not observers:
        return Text("no exporter is running under this user's names", style="dim")
    return Group(*(_exporter(each) for each in observers))


def _exporter(observer: Observer) -> Panel:
    now = observer.now
    if now is None:
        process = f"its process {observer.pid or ''} is {process_state(observer.pid)}"
        return Panel(Text(f"does not answer; {' '.join(process.split())}"), title=observer.label)
    parts: list[RenderableType] = [_numbers(observer, now), _consumers(now)]
    if now.pool.waiting or not now.pool.slots.free:
        parts.append(Text(now.explanation, style="yellow"))
    title = Text.assemble((now.name, "bold"), f"  pid {now.pid}  {now.pool.device}  {now.route}")
    if observer.waits:
        silent = monotonic() - observer.answered
        title.append(f"  has not answered for {silent:.1f} s", style="bold red")
    return Panel(Group(*parts), title=title, title_align="left")


def _numbers(observer: Observer, now: Snapshot) -> Table:
    pool, slots = now.pool, now.pool.slots
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_column()
    grid.add_row(
        "pool",
        ProgressBar(total=max(1, pool.pool_bytes), completed=pool.used_bytes, width=24),
        f"{size(pool.used_bytes)} used, {size(pool.free_bytes)} free of {size(pool.pool_bytes)}; "
        f"largest gap {size(pool.largest_gap)}, high water {size(pool.high_water)}, "
        f"{pool.segments} segment{'s' * (pool.segments != 1)}",
    )
    grid.add_row(
        "slots",
        ProgressBar(total=max(1, slots.total), completed=slots.total - slots.free, width=24),
        f"{slots.free} free, {slots.filling} filling, {slots.held} held, "
        f"{slots.draining} draining, {slots.quarantined} quarantined of {slots.total}",
    )
    waits = f"{pool.waiting} now" + (
        f", the first for {_time(pool.oldest_wait)}" * (pool.waiting > 0)
    )
    grid.add_row("waiting", waits, f"{pool.waits:,} so far, at most {_time(pool.longest_wait)}")
    grid.add_row(
        "owners",
        f"{rate(observer):,.1f} per second",
        f"{pool.published:,} published, {pool.acknowledged:,} back, {pool.refused:,} refused, "
        f"{pool.lost:,} lost",
    )
    handoff, release = latencies(observer, "handoff"), latencies(observer, "release")
    grid.add_row(
        "latency",
        f"hand-off {_time(handoff.quantile(0.5))} / {_time(handoff.quantile(0.99))}",
        f"release {_time(release.quantile(0.5))} / {_time(release.quantile(0.99))} (p50 / p99)",
    )
    return grid


def _consumers(now: Snapshot) -> RenderableType:
    if not now.consumers:
        return Text("no consumer is attached", style="dim")
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("consumer")
    for title in ("pid", "process", "state", "in hand", "untaken", "oldest", "released", "stale"):
        table.add_column(title, justify="left" if title in ("process", "state") else "right")
    for consumer in now.consumers:
        table.add_row(*_consumer(consumer))
    left = now.consumers_known - len(now.consumers)
    return Group(table, Text(f"and {left} more")) if left else table


def _consumer(consumer: ConsumerLine) -> list[Text]:
    process = process_state(consumer.pid)
    state = "quarantined" if consumer.quarantined else consumer.state
    late = consumer.oldest > LATE_SECONDS
    name = f"rank {consumer.member}" if isinstance(consumer.member, int) else consumer.member
    return [
        Text(name),
        Text(str(consumer.pid or "?")),
        Text(process, style="bold red" if process == "stopped" else ""),
        Text(state, style="bold red" if consumer.quarantined else ""),
        Text(str(consumer.holding)),
        Text(str(consumer.untaken)),
        Text(_time(consumer.oldest), style="yellow" if late else ""),
        Text(f"{consumer.released:,}"),
        Text(f"{consumer.stale:,}"),
    ]


def size(nbytes: int) -> str:
    """Return a number of bytes in the unit that suits it."""
    value, unit = float(nbytes), 0
    while float(f"{value:.4g}") >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def _time(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
