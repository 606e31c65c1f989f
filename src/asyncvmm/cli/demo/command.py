"""``asyncvmm demo``: its options, its progress bar, and its exit status."""

from __future__ import annotations

import secrets
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncvmm.cli import ends, loops, traces
from asyncvmm.cli.loops import LoopChoice

if TYPE_CHECKING:
    from asyncvmm.cli.demo.plan import Plan
    from asyncvmm.cli.demo.report import Report


class RouteChoice(StrEnum):
    """Who gets each batch."""

    BROADCAST = "broadcast"
    COMPETE = "compete"


def demo(
    device: Annotated[
        str, typer.Option(help="Where the encoder runs and the pool lies: auto, cpu or cuda:N.")
    ] = "auto",
    route: Annotated[
        RouteChoice, typer.Option(help="Every rank gets each batch, or exactly one does.")
    ] = RouteChoice.BROADCAST,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="How many rank processes.")] = 2,
    batches: Annotated[int, typer.Option(min=1, help="How many requests to stream.")] = 64,
    images: Annotated[
        Path | None, typer.Option(help="A folder of images; made-up frames without it.")
    ] = None,
    rank_devices: Annotated[
        str | None,
        typer.Option(help="The ranks' GPUs: cuda:1, or cuda:1,cuda:2; else the encoder's device."),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Let the encoder write straight into the pool.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write every owner's timeline there, for ui.perfetto.dev.")
    ] = None,
    loop: Annotated[LoopChoice, typer.Option(help="The event loop.")] = LoopChoice.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Stream features of a small vision transformer to rank processes, and check every result.

    Exit status 0 means that each result equals the same computation done in one process, to the
    last bit, and that every slot came back.
    """
    with ends.in_one_line(), traces.joined(trace) as part:
        from asyncvmm.cli.demo import plan, report

        exporter_device, each_rank = plan.resolve_devices(device, rank_devices, ranks)
        done = _carry_out(
            plan.Plan(
                name=f"@asyncvmm-demo-{secrets.token_hex(8)}",  # no file, so none left if killed
                device=exporter_device,
                rank_devices=each_rank,
                route=route.value,
                batches=batches,
                images=images,
                in_place=in_place,
                loop=loop,
                trace=part,
            )
        )
        report.tell(done, as_json=as_json)
        raise typer.Exit(0 if done.passed else ends.FAILED)


def _carry_out(plan: Plan) -> Report:
    """Stream, then compute the reference, with a bar for both on a terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    from asyncvmm.cli.demo import exporter_side, images, model, reference, report

    model.use_one_thread()
    source = images.Folder(plan.images) if plan.images else images.Frames()
    encoder = model.build_encoder(plan.device)
    exporter_side.encode(encoder, images.request(source, 0))  # the first call is a slow one
    bar = Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    with bar:
        streaming = bar.add_task("streaming", total=plan.batches)
        streamer = exporter_side.Streamer(plan, source, encoder, lambda: bar.advance(streaming))
        streamed = loops.run(streamer.run(), plan.loop)
        checking = bar.add_task("checking", total=plan.batches)
        expected = reference.digests(plan, source, encoder, lambda: bar.advance(checking))
    return report.summarize(plan, streamed, reference.compare(expected, streamed.results))
