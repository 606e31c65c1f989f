"""What the library must show, as code: each target is met or missed by a result file, or not run.

Ratios are taken round by round between lanes of one run; a target is met if the median is.  Where
a target does not say which numbers it means, its function does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.report import Result
from benchmarks.rows import Row, ratios
from benchmarks.setting import MIB

OURS = ("asyncvmm", "asyncvmm_reserve", "asyncvmm_send_all", "asyncvmm_reserve_filled")
MEASURED = OURS[:3]
"""Those whose loop does nothing but hand over."""


@dataclass(frozen=True)
class Verdict:
    """One target, beside what was seen."""

    about: str
    needed: str
    seen: str
    word: str
    """met, missed, impossible or not run.

    Impossible is what is missed by the floor of the same run, too: the same copy and the same
    messages without any library.
    """


class Rows:
    """The rows of a result, by transport, workload and loop."""

    def __init__(self, result: Result) -> None:
        self._rows: list[Row] = [
            row for row in result["rows"] if row.get("rounds") and not row.get("failed")
        ]
        self.cores: int = result["machine"]["cores"]

    def all(self, transports: tuple[str, ...]) -> list[Row]:
        """Return every row of some transports."""
        return [row for row in self._rows if row["transport"] in transports]

    def get(self, transport: str, workload: str, loop: str = "") -> Row | None:
        """Return one row; blocking transports have theirs whatever the loop."""
        wanted = (transport, workload)
        loops = (loop, "none")
        for row in self._rows:
            if (row["transport"], row["workload"]) == wanted and (not loop or row["loop"] in loops):
                return row
        return None

    def loops(self) -> list[str]:
        """Return the loops that this library ran on."""
        return list(
            dict.fromkeys(row["loop"] for row in self.all(MEASURED) if row["loop"] != "none")
        )


def judge(result: Result) -> list[Verdict]:
    """Return a verdict for every target of this kind of device."""
    rows = Rows(result)
    on_gpu = result["options"]["device"].startswith("cuda")
    verdicts = []
    for loop in rows.loops():
        found = _gpu(rows, loop, result) if on_gpu else _cpu(rows, loop)
        for verdict in found:
            about = f"{verdict.about} ({loop})"
            verdicts.append(Verdict(about, verdict.needed, verdict.seen, verdict.word))
    if not on_gpu:
        many, few = (rows.get("asyncvmm", f"allocator_{live}") for live in (100_000, 10))
        about = "allocator at 100,000 live chunks / at 10, p50"
        verdicts.append(_compare(about, many, few, "p50_us", most=3))
    verdicts.append(_clean(rows))
    return verdicts


def _cpu(rows: Rows, loop: str) -> Iterator[Verdict]:
    def get(transport: str, workload: str) -> Row | None:
        return rows.get(transport, workload, loop)

    def pair(a: str, b: str, workload: str) -> tuple[Row | None, Row | None]:
        return get(a, workload), get(b, workload)

    small, large = "pipelined_16KiB", "pipelined_36MiB"
    yield _compare(
        "closed 16 KiB: send / add_reader ping-pong, p50",
        *pair("asyncvmm", "ping_pong", "closed_16KiB"), "p50_us", most=2.5,
    )  # fmt: skip
    for base, least in (("floor_loop", 0.4), ("pickle_uds", 3.0), ("torch_mp", 5.0)):
        yield _compare(
            f"pipelined 16 KiB: send / {base}, rate",
            *pair("asyncvmm", base, small), "per_s", least=least, floor=get("floor_loop", small),
        )  # fmt: skip
    reserve = "asyncvmm_reserve"
    yield _compare(
        "reserve: 36 MiB / 16 KiB, rate", get(reserve, large), get(reserve, small), "per_s",
        least=0.8,
    )  # fmt: skip
    for workload in (large, "closed_36MiB"):
        yield _compare(
            f"{workload}: reserve, written / torch_mp, rate",
            *pair("asyncvmm_reserve_filled", "torch_mp", workload), "per_s", least=20,
            floor=get("floor_loop", workload),
        )  # fmt: skip
        yield _compare(
            f"{workload}: reserve, written / the same copy without a library, rate",
            *pair("asyncvmm_reserve_filled", "floor_loop", workload), "per_s", least=0.85,
        )  # fmt: skip
    yield _compare(
        "send 36 MiB / plain copy_, bandwidth",
        *pair("asyncvmm", "plain_copy", large), "gbytes_per_s", least=0.85,
        floor=get("floor_thread", large),
    )  # fmt: skip
    yield _compare(
        "send 36 MiB / the same copy in a thread without a library, bandwidth",
        *pair("asyncvmm", "floor_thread", large), "gbytes_per_s", least=0.85,
    )  # fmt: skip
    yield _broadcast(rows, loop)
    yield from _compete(rows, loop)
    yield _compare(
        "reuse: last word to waiter / a loop's wake-up, p50",
        *pair("asyncvmm", "ping_pong", "reuse"), "p50_us", most=3,
    )  # fmt: skip
    yield _gap(rows, loop, 2.0)


def _gpu(rows: Rows, loop: str, result: Result) -> Iterator[Verdict]:
    options = result["options"]
    two = options["device"] != options["consumer_device"]
    peers = (
        ("asyncvmm", "torch_mp", "floor"),
        ("asyncvmm_reserve", "torch_mp_reused", "floor_reserve"),
    )
    for ours, theirs, bare in peers:
        for row in rows.all((ours,)):
            if row["loop"] != loop:
                continue
            base, floor = (rows.get(name, row["workload"]) for name in (theirs, bare))
            # A consumer that rests sets the pace of both.
            bound = row["workload"] == "slow_consumer"
            ahead = 3.0 if row["nbytes"] >= MIB and not bound else 1.0
            about = f"{row['workload']}: {ours} / {theirs}"
            yield _compare(f"{about}, rate", row, base, "per_s", least=ahead, floor=floor)
            yield _compare(f"{about}, p50", row, base, "p50_us", most=1 / ahead, floor=floor)
    yield _compare(
        "closed 2 MiB: send / floor, p50",
        rows.get("asyncvmm", "closed_2MiB", loop), rows.get("floor", "closed_2MiB"), "p50_us",
        most=1.8 if two else 1.3,
    )  # fmt: skip
    for size in ("16KiB", "2MiB"):
        name = f"pipelined_{size}"
        pair = rows.get("asyncvmm", name, loop), rows.get("floor", name)
        yield _compare(f"pipelined {size}: send / floor, rate", *pair, "per_s", least=0.7)
        batch = rows.get("asyncvmm_send_all", name, loop)
        about = f"pipelined {size}: send_all of 16 / floor, rate"
        yield _compare(about, batch, pair[1], "per_s", least=0.7)
    large, small = (
        rows.get("asyncvmm_reserve", f"pipelined_{size}", loop) for size in ("36MiB", "16KiB")
    )
    yield _compare("reserve: 36 MiB / 16 KiB, rate", large, small, "per_s", least=0.8)
    yield _gap(rows, loop, 1.0)


def _compare(
    about: str,
    ours: Row | None,
    base: Row | None,
    name: str,
    *,
    least: float | None = None,
    most: float | None = None,
    floor: Row | None = None,
) -> Verdict:
    """Judge the median over the rounds of ours / base, beside that of the floor / base."""
    needed = f">= {least:g}" if least is not None else f"<= {most:.3g}"
    found = ratios(ours, base, name) if ours and base else []
    if not ours or not base or not found:
        return Verdict(about, needed, "", "not run")
    middle = statistics.median(found)
    word = _word(_within(middle, least, most))
    seen = (
        f"{middle:.3g} ({min(found):.3g}-{max(found):.3g}): {ours[name]:,.4g} / {base[name]:,.4g}"
    )
    depths = ours.get("depth"), base.get("depth")
    if ours["workload"] != base["workload"] and depths[0] != depths[1]:
        seen += f", {depths[0]} / {depths[1]} in flight"
    floors = ratios(floor, base, name) if floor and floor is not base else []
    if floors:
        reached = statistics.median(floors)
        seen += f"; the floor {reached:.3g}"
        if word == "missed" and not _within(reached, least, most):
            word = "impossible"
    return Verdict(about, needed, seen, word)


def _within(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _broadcast(rows: Rows, loop: str) -> Verdict:
    """Judge what one more consumer costs the producer, in CPU time per hand-off.

    One message each way costs it what a ping-pong does.
    """
    about = "broadcast: CPU of one consumer more / of one message each way, producer's"
    one, eight = (rows.get("asyncvmm", f"fanout_{n}_broadcast", loop) for n in (1, 8))
    message = rows.get("ping_pong", "closed_16KiB", loop)
    if not one or not eight or not message:
        return Verdict(about, "<= 1", "", "not run")
    extra = (eight["producer_cpu_us"] - one["producer_cpu_us"]) / 7
    ratio = extra / message["producer_cpu_us"]
    seen = f"{ratio:.3g}: {extra:.3g} / {message['producer_cpu_us']:.3g} us"
    return Verdict(about, "<= 1", seen, _word(ratio <= 1))


def _compete(rows: Rows, loop: str) -> Iterator[Verdict]:
    """Judge whether the rate grows as the consumers do, or all cores are busy."""
    one = rows.get("asyncvmm", "fanout_1_compete", loop)
    for count in (2, 4, 8):
        about = f"compete: rate with {count} consumers / with one"
        many = rows.get("asyncvmm", f"fanout_{count}_compete", loop)
        if not one or not many:
            yield Verdict(about, f">= {0.8 * count:g}", "", "not run")
            continue
        busy = many["cpu_us"] * many["per_s"] / (rows.cores * 1e6)
        plain = _compare(about, many, one, "per_s", least=0.8 * count)
        full = busy >= 0.85
        word = _word(plain.word == "met" or full)
        note = f", cores {busy:.0%} busy with it"
        yield Verdict(about, f"{plain.needed} or cores full", plain.seen + note, word)


def _gap(rows: Rows, loop: str, most: float) -> Verdict:
    """Judge the worst loop gap p99 of both sides in every workload.

    ``asyncvmm_reserve_filled`` is left out: it writes its payload on the loop itself.  A gap is
    nobody's doing if two loops that only exchange messages have such a one in the same workload.
    """
    about = "loop gap p99 in the worst workload, either side"
    found = [
        (row[f"{side}gap_p99_ms"], row["transport"], row["workload"], side or "producer_",
         row.get(f"{side}gap_busy_p99_ms") or 0.0)
        for row in rows.all(MEASURED)
        for side in ("", "consumer_")
        if row["loop"] == loop and row.get(f"{side}gap_p99_ms") is not None
    ]  # fmt: skip
    if not found:
        return Verdict(about, f"< {most:g} ms", "", "not run")
    worst = max(found)
    seen = _told(worst)
    if worst[0] < most:
        return Verdict(about, f"< {most:g} ms", seen, "met")
    bare = {row["workload"]: row for row in rows.all(("ping_pong",)) if row["loop"] == loop}
    if worst[2] in bare:
        seen += f"; bare messages there {_either(bare[worst[2]]):.3g} ms"
    ours = [each for each in found if each[0] >= most and _either(bare.get(each[2])) < most]
    if ours and max(ours) != worst:
        seen += f"; where those have less than {most:g}: {_told(max(ours))}"
    return Verdict(about, f"< {most:g} ms", seen, "missed" if ours else "impossible")


def _told(gap: tuple[float, str, str, str, float]) -> str:
    whole, transport, workload, side, busy = gap
    worked = f", at work {busy:.3g} ms" if busy else ""
    return f"{whole:.3g} ms{worked}: {transport} {workload} {side.rstrip('_')}"


def _either(row: Row | None) -> float:
    return max(row.get(f"{side}gap_p99_ms") or 0.0 for side in ("", "consumer_")) if row else 0.0


def _clean(rows: Rows) -> Verdict:
    """Judge that everything arrived, whole, the way it was meant to go."""
    mine = rows.all(OURS)
    sums = {name: sum(r.get(name) or 0 for r in mine) for name in ("wrong", "fallbacks", "lost")}
    seen = ", ".join(f"{value} {name}" for name, value in sums.items())
    checked = f"{seen} in {sum(r.get('handed_over') or 0 for r in mine):,} hand-offs"
    return Verdict("nothing wrong, nothing fell back", "0", checked, _word(not any(sums.values())))


def _word(met: bool) -> str:
    return "met" if met else "missed"
