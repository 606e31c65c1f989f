"""A result file becomes tables, plots, a page and verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import main
from benchmarks.merge import merge
from benchmarks.progress import Bar
from benchmarks.report import read
from benchmarks.rows import REQUIRED, SCHEMA, Row, row
from benchmarks.setting import KIB, MIB
from benchmarks.table import plain
from benchmarks.targets import judge
from benchmarks.workloads import WORKLOADS


def made(transport: str, workload: str, loop: str = "uvloop", **numbers: Any) -> Row:
    """Make a row of two rounds, the second ten times the first."""
    device = numbers.pop("device", "cpu")
    rounds = [numbers, {k: v if k.startswith("gap_") else v * 10 for k, v in numbers.items()}]
    nbytes = WORKLOADS[workload].payload.total
    return row(transport, workload, device, loop, rounds, nbytes=nbytes, consumers=1)


def result(*rows: Row, device: str = "cpu", consumer_device: str = "") -> dict[str, Any]:
    """Make what a run would have written."""
    return {
        "schema": SCHEMA,
        "machine": {
            "date": "2026-11-30", "commit": "0" * 40, "cpu": "some", "cores": 2,
            "kernel": "6.18", "python": "3.12.3", "gpus": [], "versions": {},
        },
        "options": {"device": device, "consumer_device": consumer_device or device},
        "skipped": [{"transport": "ucxx", "workload": "", "reason": "not installed <here>"}],
        "rows": list(rows),
    }  # fmt: skip


def verdict(found: dict[str, Any], about: str) -> tuple[str, str]:
    """Return what was seen of one target, and the verdict."""
    (one,) = [v for v in judge(found) if v.about.startswith(about)]
    return one.seen, one.word


def test_a_row_has_medians_spreads_sums_and_the_rounds() -> None:
    """Kills: ratios of medians in place of medians of ratios need the rounds; sums of rates."""
    found = row(
        "floor", "closed_16KiB", "cpu", "none",
        [{"per_s": 1.0, "wrong": 1}, {"per_s": 9.0, "wrong": 2}, {"per_s": 3.0, "wrong": 0}],
    )  # fmt: skip
    assert set(REQUIRED) <= set(found)
    assert found["per_s"] == 3.0
    assert found["spread"]["per_s"] == [1.0, 9.0]
    assert found["wrong"] == 3
    assert [each["per_s"] for each in found["rounds"]] == [1.0, 9.0, 3.0]
    assert found["gap_p99_ms"] is None


@pytest.mark.parametrize(
    ("ours", "base", "word"), [(24.0, 10.0, "met"), (26.0, 10.0, "missed"), (25.0, 10.0, "met")]
)
def test_a_ratio_at_most(ours: float, base: float, word: str) -> None:
    """Kills: the ratio upside down, or the comparison."""
    rows = [
        made("asyncvmm", "closed_16KiB", p50_us=ours),
        made("ping_pong", "closed_16KiB", p50_us=base),
    ]
    seen, said = verdict(result(*rows), "closed 16 KiB: send / add_reader")
    assert said == word
    assert seen.startswith(f"{ours / base:.3g} ")


def test_ratios_are_taken_round_by_round() -> None:
    """Kills: dividing the medians, which pairs what was not measured side by side."""
    ours = row("asyncvmm", "closed_16KiB", "cpu", "uvloop", [{"p50_us": v} for v in (1, 3, 60)])
    base = row("ping_pong", "closed_16KiB", "cpu", "uvloop", [{"p50_us": v} for v in (1, 1, 30)])
    seen, _ = verdict(result(ours, base), "closed 16 KiB: send / add_reader")
    assert seen.startswith("2 (1-3)")


def test_each_loop_is_compared_with_itself() -> None:
    """Kills: taking the first row of a transport whatever its loop."""
    rows = [
        made(transport, "closed_16KiB", loop, p50_us=value)
        for transport, loop, value in (
            ("ping_pong", "uvloop", 10.0), ("ping_pong", "asyncio", 100.0),
            ("asyncvmm", "uvloop", 20.0), ("asyncvmm", "asyncio", 300.0),
        )
    ]  # fmt: skip
    words = {
        v.about[-9:]: v.word for v in judge(result(*rows)) if v.about.startswith("closed 16 KiB")
    }
    assert words == {" (uvloop)": "met", "(asyncio)": "missed"}


def test_the_worst_gap_counts_on_either_side() -> None:
    rows = [
        made("asyncvmm", "closed_16KiB", gap_p99_ms=0.2),
        made("asyncvmm_reserve", "closed_36MiB", gap_p99_ms=2.5),
    ]
    seen, word = verdict(result(*rows), "loop gap")
    assert (seen, word) == ("2.5 ms: asyncvmm_reserve closed_36MiB producer", "missed")


@pytest.mark.parametrize(
    ("bare", "word", "more"),
    [
        ({"fanout_8_broadcast": 9.0, "closed_36MiB": 3.0}, "impossible", ""),
        (
            {"fanout_8_broadcast": 9.0, "closed_36MiB": 1.0},
            "missed",
            "; where those have less than 2: 2.5 ms: asyncvmm_reserve closed_36MiB producer",
        ),
    ],
)
def test_a_gap_that_bare_messages_have_too_is_nobodys(
    bare: dict[str, float], word: str, more: str
) -> None:
    """Kills: a worst gap that excuses those of all other workloads."""
    rows = [
        made("asyncvmm", "fanout_8_broadcast", gap_p99_ms=7.0, gap_busy_p99_ms=0.5),
        made("asyncvmm_reserve", "closed_36MiB", gap_p99_ms=2.5),
        *(made("ping_pong", workload, gap_p99_ms=gap) for workload, gap in bare.items()),
    ]
    there = "; bare messages there 9 ms"
    assert verdict(result(*rows), "loop gap") == (
        f"7 ms, at work 0.5 ms: asyncvmm fanout_8_broadcast producer{there}{more}", word,
    )  # fmt: skip


@pytest.mark.parametrize(("floor", "word"), [(19.0, "impossible"), (21.0, "missed")])
def test_what_the_floor_itself_misses_is_impossible(floor: float, word: str) -> None:
    """Kills: a miss excused by a floor that was fast enough."""
    rows = [
        made("asyncvmm", "closed_36MiB", per_s=12.0),
        made("asyncvmm_reserve_filled", "closed_36MiB", per_s=15.0),
        made("floor_loop", "closed_36MiB", per_s=floor),
        made("torch_mp", "closed_36MiB", "none", per_s=1.0),
    ]
    seen, said = verdict(result(*rows), "closed_36MiB: reserve, written / torch_mp")
    assert said == word
    assert seen.endswith(f"; the floor {floor:g}")


@pytest.mark.parametrize("bad", ["wrong", "fallbacks", "lost"])
def test_nothing_may_be_wrong(bad: str) -> None:
    good = made("asyncvmm", "closed_16KiB", per_s=1.0, wrong=0, fallbacks=0, lost=0)
    assert verdict(result(good), "nothing wrong")[1] == "met"
    spoilt = made("asyncvmm", "closed_64KiB") | {bad: 1}
    assert verdict(result(good, spoilt), "nothing wrong")[1] == "missed"


def test_on_a_gpu_large_payloads_must_be_three_times_ahead() -> None:
    rows = []
    for workload in ("closed_16KiB", "closed_2MiB"):
        assert WORKLOADS[workload].payload.total in (16 * KIB, 2 * MIB)
        rows.append(made("asyncvmm", workload, per_s=20.0, p50_us=4.0, device="cuda:0"))
        rows.append(made("torch_mp", workload, "none", per_s=10.0, p50_us=10.0, device="cuda:0"))
    found = result(*rows, device="cuda:0")
    assert verdict(found, "closed_16KiB: asyncvmm / torch_mp, rate")[1] == "met"
    assert verdict(found, "closed_16KiB: asyncvmm / torch_mp, p50")[1] == "met"
    assert verdict(found, "closed_2MiB: asyncvmm / torch_mp, rate")[1] == "missed"
    assert verdict(found, "closed_2MiB: asyncvmm / torch_mp, p50")[1] == "missed"


def test_what_was_not_run_is_said_to_be_so() -> None:
    failed = made("ping_pong", "closed_16KiB", p50_us=1.0) | {"failed": "it hung"}
    rows = [made("asyncvmm", "closed_16KiB", p50_us=1.0), failed]
    words = {v.word for v in judge(result(*rows)) if not v.about.startswith("nothing wrong")}
    assert words == {"not run"}


@pytest.mark.slow
def test_a_report_of_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    curve = [float(i) for i in range(101)]
    rows = [
        made(transport, workload, per_s=rate, gbytes_per_s=1.0, p50_us=3.0, gap_p99_ms=0.5)
        | {"quantiles_us": curve}
        for transport, rate in (("asyncvmm", 5.0), ("floor_loop", 10.0))
        for workload in ("closed_16KiB", "pipelined_16KiB", "pipelined_2MiB", "fanout_2_broadcast")
    ]
    rows.append(row("zmq", "closed_16KiB", "cpu", "uvloop", [], failed="it died"))
    file = tmp_path / "out.json"
    file.write_text(json.dumps(result(*rows)))
    assert main(["report", str(file)]) == 0
    said = capsys.readouterr().out
    for text in ("closed_16KiB", "floor_loop", "0.50", "targets", "it died", "not installed"):
        assert text in said
    folder = tmp_path / "out"
    plots = {"latency", "rate-over-size", "rate-over-consumers", "loop-gap"}
    assert {path.stem for path in folder.glob("*.png")} == plots
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(plots)
    assert "not installed &lt;here&gt;" in page
    assert "http" not in page  # self-contained


def test_parts_of_a_run_become_one(tmp_path: Path) -> None:
    """Kills: a row twice, or the older of two; a skip for each part."""
    parts = [
        result(made("floor", "closed_16KiB", per_s=1.0), made("floor", "connect", per_s=2.0)),
        result(made("floor", "closed_16KiB", per_s=3.0), made("zmq", "closed_16KiB", per_s=4.0)),
    ]
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, part in zip(files, parts, strict=True):
        file.write_text(json.dumps(part))
    out = tmp_path / "out.json"
    assert main(["merge", *map(str, files), "--json", str(out)]) == 0
    found = read(out)
    firsts = {
        (row["transport"], row["workload"]): row["spread"]["per_s"][0] for row in found["rows"]
    }
    assert len(found["rows"]) == 3
    assert firsts == {
        ("floor", "closed_16KiB"): 3.0, ("floor", "connect"): 2.0, ("zmq", "closed_16KiB"): 4.0,
    }  # fmt: skip
    assert found["skipped"] == parts[0]["skipped"]
    assert found["machine"] == parts[0]["machine"]


@pytest.mark.parametrize("name", ["commit", "cores"])
def test_parts_of_different_runs_are_not_joined(name: str) -> None:
    one, other = result(), result()
    other["machine"][name] = "another"
    with pytest.raises(ValueError, match=f"differ in {name}"):
        merge([one, other])
    with pytest.raises(ValueError, match="differ in options"):
        merge([one, result(device="cuda:0")])


def test_a_result_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text('{"schema": 0, "rows": []}')
    with pytest.raises(SystemExit, match="schema 0"):
        main(["targets", str(file)])


def test_a_bar_says_what_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    with Bar(2) as bar:
        bar.step("closed_16KiB: floor, round 1")
        bar.note("ucxx: skipped, it is not installed: pip install 'asyncvmm[bench]'")
        bar.done()
    assert "pip install 'asyncvmm[bench]'" in capsys.readouterr().err.replace("\n", " ")


def test_plain_tables_line_up() -> None:
    text = plain("title", ("name", "n"), [("a", "10"), ("bcdefg", "9")])
    assert text == "title\nname     n\na       10\nbcdefg   9\n\n"


@pytest.mark.parametrize(
    "given",
    ["--rounds 0", "--rounds 1.5", "--seconds -1", "--seconds nan", "--patience 0", "--device gpu",
     "--cores a", "--cores 0-", "--cores 4095"],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kills: a run that measures nothing, and says so by nothing or by a division by zero."""
    with pytest.raises(SystemExit):
        main(["run", "--transports", "plain_copy", "--workloads", "reuse", *given.split(),
              "--json", str(tmp_path / "out.json")])  # fmt: skip
    assert given.split()[1] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [None, "", "x", "[]", "{}"])
@pytest.mark.parametrize("command", ["report", "targets"])
def test_what_is_no_result_file_is_named(command: str, text: str | None, tmp_path: Path) -> None:
    """Kills: a traceback for a file that is not there, or not a result."""
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=r"result\.json (is no result file|has schema None)"):
        main([command, str(path)])
