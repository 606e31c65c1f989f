"""Start the processes, and end with them."""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from typing import Any

from examples.multimodal.roles import ROLES, play

NEEDED = (5, 24)
"""The first transformers whose models take ``mm_encoder_outputs``; older ones ignore them."""


def version_of(package: str) -> tuple[int, ...]:
    """Return the first two numbers of a package's version; none if it is not there."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in found.split(".")[:2])


def main() -> int:
    """Run one process for each role; return 0 if all ended well."""
    parser = argparse.ArgumentParser(prog="python -m examples.multimodal")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--carrier", choices=("stream", "ticket"), default="stream")
    options = parser.parse_args()
    if (found := version_of("transformers")) < NEEDED:
        had = ".".join(map(str, found)) or "none"
        wanted = ".".join(map(str, NEEDED))
        print(
            f"this example needs transformers {wanted} or newer, which takes features that were "
            f"encoded elsewhere (here: {had}): pip install 'asyncvmm[models]'",
            file=sys.stderr,
        )
        return 2

    # What is forked must not have looked for GPUs in the way that initialises CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # One process imports what is slow to import, and the others are forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"examples.multimodal.{role}" for role in ROLES])
    name, device, ranks = f"multimodal-{os.getpid()}", options.device, options.ranks
    queues = [context.Queue() for _ in range(ranks)] if options.carrier == "ticket" else []
    roles: list[tuple[str, tuple[Any, ...]]] = [
        ("encoder", (name, device, ranks, queues)),
        ("whole", (name, device, ranks)),
        *(("rank", (name, device, rank, *queues[rank : rank + 1])) for rank in range(ranks)),
    ]
    processes = [context.Process(target=play, args=role, name=role[0]) for role in roles]
    for process in processes:
        process.start()
    running = list(processes)
    while running:
        wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in processes):  # the others would wait for it
            for process in running:
                process.terminate()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
