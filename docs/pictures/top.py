"""Stop one rank of a small stream, look at it with ``asyncvmm top``, and draw what it shows.

python docs/pictures/top.py                 # writes top.svg beside this file
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import torch
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

import asyncvmm
from asyncvmm.cli.observing import Watch
from asyncvmm.cli.top.screen import screen

HERE = Path(__file__).parent
NAME = "@asyncvmm-picture"
SLOTS = 8
WARM = 200
"""Owners that flow before the second rank stops."""


async def stream() -> None:
    """Send owners to two ranks until one of them stops and the pool is full; draw that."""
    ranks = [
        await asyncio.create_subprocess_exec(sys.executable, __file__, str(rank))
        for rank in range(2)
    ]
    try:
        async with asyncvmm.open_exporter(
            NAME, device="cpu", pool_bytes="8MiB", slots=SLOTS, route=asyncvmm.Broadcast(2)
        ) as exporter:
            await exporter.wait_attached(2)
            with contextlib.closing(Watch([NAME])) as watch:
                for number in range(WARM):
                    await exporter.send(features(), key=f"request-{number}")
                await exporter.drain()
                await asyncio.to_thread(watch.look, 1.0)
                ranks[1].send_signal(signal.SIGSTOP)
                sending = asyncio.create_task(fill(exporter))
                while exporter.explain().waited < 1.5:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0.05)
                draw(await asyncio.to_thread(watch.look, 1.0))
            sending.cancel()
            ranks[1].send_signal(signal.SIGCONT)
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            await rank.wait()


async def fill(exporter: asyncvmm.Exporter) -> None:
    """Send until nothing fits any more, and wait then."""
    for number in range(WARM, WARM + SLOTS + 1):
        await exporter.send(features(), key=f"request-{number}")


def features() -> dict[str, torch.Tensor]:
    """Return what one request carries."""
    return {"image_0": torch.ones(196, 768), "grid": torch.ones(3)}


def draw(observers: object) -> None:
    """Write the picture, without the fonts that the format would fetch from elsewhere."""
    console = Console(width=118, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115 - lives as long as the console
    console.print(screen(observers))  # type: ignore[arg-type]  # what look() returned
    console.file.close()
    plain = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    text = console.export_svg(title="asyncvmm top", theme=MONOKAI, code_format=plain)
    (HERE / "top.svg").write_text(text, encoding="utf-8")


async def read(rank: int) -> None:
    """Be one rank."""
    async with asyncvmm.connect(NAME, rank=rank, wait=True) as consumer:
        async for batch in consumer:
            batch.release()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with contextlib.suppress(asyncvmm.PeerLostError):
            asyncio.run(read(int(sys.argv[1])))
    else:
        asyncio.run(stream())
