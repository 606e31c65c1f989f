"""The command: ``python -m benchmarks run | merge | report | targets | list``."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.progress import Bar, Progress, Quiet
from benchmarks.table import show
from benchmarks.targets import Verdict
from benchmarks.workloads import WORKLOADS, Workload


def main(arguments: list[str] | None = None) -> int:
    """Do what the arguments ask for; return the exit status."""
    options = _parser().parse_args(arguments)
    return int(options.do(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure")
    run.add_argument("--transports", default="all", help="names with commas (see list)")
    run.add_argument("--workloads", default="all", help="names with commas, or * patterns")
    run.add_argument(
        "--device", type=_device, default="cpu", help="where payloads live: cpu or cuda:N"
    )
    run.add_argument(
        "--consumer-device", type=_device, default="", help="where they are used; the same"
    )
    run.add_argument("--loop", choices=("uvloop", "asyncio", "both"), default="uvloop")
    run.add_argument("--rounds", type=_count, default=3)
    run.add_argument("--seconds", type=_seconds, default=0.2, help="per lane and round")
    run.add_argument("--patience", type=_seconds, default=30.0, help="seconds until a lane is out")
    run.add_argument(
        "--cores", type=_cores, default=(), help="what the sides may use, in turn: 0-7:8-15; all"
    )
    run.add_argument("--json", type=Path, required=True, help="the result file")
    run.set_defaults(do=_run)
    merge = commands.add_parser("merge", help="join the result files of a run taken in parts")
    merge.add_argument("results", type=Path, nargs="+")
    merge.add_argument("--json", type=Path, required=True, help="the result file")
    merge.set_defaults(do=_merge)
    report = commands.add_parser("report", help="show a result file, and write plots and a page")
    report.add_argument("result", type=Path)
    report.add_argument("--no-plots", action="store_true", help="tables only")
    report.add_argument("--out", type=Path, help="folder for plots and page; OUT without .json")
    report.set_defaults(do=_report)
    targets = commands.add_parser("targets", help="say which targets a result file meets")
    targets.add_argument("result", type=Path)
    targets.set_defaults(do=_targets)
    trace = commands.add_parser("trace", help="count the driver calls of a hand-off on a GPU")
    trace.add_argument("--device", type=_device, default="cuda:0")
    trace.add_argument("--consumer-device", type=_device, default="")
    trace.add_argument("--json", type=Path, required=True)
    trace.set_defaults(do=_trace)
    commands.add_parser("list", help="name transports and workloads").set_defaults(do=_list)
    return parser


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no time: seconds, more than 0")


def _cores(text: str) -> tuple[frozenset[int], ...]:
    allowed = os.sched_getaffinity(0)
    sets = []
    for part in text.split(":"):
        ends = [re.fullmatch(r"(\d+)(?:-(\d+))?", span) for span in part.split(",")]
        if None in ends:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of cores: 0-7:8-15, 0,2:1,3")
        cores = frozenset(
            core for end in ends if end for core in range(int(end[1]), int(end[2] or end[1]) + 1)
        )
        if not cores or cores - allowed:
            raise argparse.ArgumentTypeError(f"{part!r} is not of the cores {sorted(allowed)}")
        sets.append(cores)
    return tuple(sets)


def _device(text: str) -> str:
    if re.fullmatch(r"cpu|cuda:\d+|", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cpu or cuda:N")
    return text


def _check_there(*devices: str) -> None:
    """Refuse a GPU that is not there, before each transport fails of it in its own words."""
    asked = [device for device in devices if device.startswith("cuda")]
    if not asked:
        return
    import torch

    count = torch.cuda.device_count()
    for device in asked:
        if int(device.removeprefix("cuda:")) >= count:
            raise SystemExit(
                f"{device} was asked for, and torch {torch.__version__} sees {count} CUDA devices "
                f"here, numbered from 0; without a GPU, give --device cpu"
            )


def _run(options: argparse.Namespace) -> int:
    from benchmarks.conductor import Conductor, Options
    from benchmarks.machine import machine
    from benchmarks.rows import SCHEMA

    _check_there(options.device, options.consumer_device)
    asked = Options(
        transports=_transports(options.transports),
        workloads=_workloads(options.workloads),
        loops=["uvloop", "asyncio"] if options.loop == "both" else [options.loop],
        device=options.device,
        consumer_device=options.consumer_device,
        rounds=options.rounds,
        seconds=options.seconds,
        patience=options.patience,
        cores=options.cores,
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.touch()  # a place that cannot be written is found out now
    head = {
        "schema": SCHEMA,
        "machine": machine(),
        "options": {
            "device": asked.device,
            "consumer_device": asked.consumer_device or asked.device,
            "rounds": asked.rounds,
            "seconds": asked.seconds,
            "cores": [sorted(cores) for cores in asked.cores],
        },
    }
    signal.signal(signal.SIGTERM, _terminated)
    with ExitStack() as stack:
        conductor = Conductor(asked, _progress(len(asked.workloads), stack))
        for _ in conductor.run():  # what is done is kept if the rest is not reached
            result = head | {"skipped": conductor.skipped, "rows": conductor.rows}
            options.json.write_text(dumps(result))
    return 0


def _progress(total: int, stack: ExitStack) -> Progress:
    if sys.stderr.isatty():
        with suppress(ImportError):
            return stack.enter_context(Bar(total))
    return Quiet()


def _terminated(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # through the context managers that end the lanes


def dumps(result: dict[str, Any]) -> str:
    """Return a result file's text: a line for each row, so that files can be compared."""
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def _merge(options: argparse.Namespace) -> int:
    from benchmarks.merge import merge
    from benchmarks.report import read

    options.json.write_text(dumps(merge([read(path) for path in options.results])))
    return 0


def _report(options: argparse.Namespace) -> int:
    from benchmarks.report import read, tables
    from benchmarks.targets import judge

    result = read(options.result)
    verdicts = judge(result)
    tables(result)
    _show(verdicts)
    if options.no_plots:
        return 0
    try:
        from benchmarks.plots import draw

        images = draw(result)
    except ImportError as error:
        sys.stderr.write(f"no plots: {error}; pip install 'asyncvmm[bench]'\n")
        images = {}
    from benchmarks.page import page

    folder: Path = options.out or options.result.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        (folder / f"{name}.png").write_bytes(image)
    (folder / "index.html").write_text(page(result, images, verdicts))
    sys.stdout.write(f"{folder / 'index.html'}\n")
    return 0


def _targets(options: argparse.Namespace) -> int:
    from benchmarks.report import read
    from benchmarks.targets import judge

    _show(judge(read(options.result)))
    return 0


def _show(verdicts: list[Verdict]) -> None:
    rows = [(v.word, v.about, v.needed, v.seen) for v in verdicts]
    show("targets", ("verdict", "target", "needed", "seen"), rows, 4)


def _trace(options: argparse.Namespace) -> int:
    from benchmarks.machine import machine
    from benchmarks.trace import trace

    _check_there(options.device, options.consumer_device)
    found = trace(options.device, options.consumer_device or options.device)
    options.json.write_text(json.dumps({"machine": machine()} | found, indent=1) + "\n")
    return 0


def _list(_: argparse.Namespace) -> int:
    from benchmarks.transports import MODULES, UnavailableError, load

    transports = []
    for name in MODULES:
        try:
            transports.append((name, load(name).about))
        except UnavailableError as error:
            transports.append((name, f"not here: {error}"))
    show("transports", ("name", "what a hand-off is"), transports, 2)
    workloads = [(workload.name, workload.about) for workload in WORKLOADS.values()]
    show("workloads", ("name", "what is asked"), workloads, 2)
    return 0


def _transports(text: str) -> list[str]:
    from benchmarks.transports import MODULES

    names = list(MODULES) if text == "all" else text.split(",")
    unknown = [name for name in names if ":" not in name and name not in MODULES]
    if unknown:
        raise SystemExit(f"unknown transports {', '.join(unknown)}; there are {', '.join(MODULES)}")
    return names


def _workloads(text: str) -> list[Workload]:
    from fnmatch import fnmatchcase

    found: dict[str, Workload] = {}
    for pattern in ["*"] if text == "all" else text.split(","):
        matching = {n: w for n, w in WORKLOADS.items() if fnmatchcase(n, pattern)}
        if not matching:
            raise SystemExit(f"no workload is called {pattern}; there are {', '.join(WORKLOADS)}")
        found |= matching
    return list(found.values())
