"""What the host offers: each check is a trial of the real thing where there is one."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import ExitStack, closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asyncvmm._backends.limits import tightest
from asyncvmm._backends.memfd import HostConsumerRegion, HostExporterRegion
from asyncvmm._errors import AsyncVMMError
from asyncvmm._io.listener import Listener
from asyncvmm._io.liveness import identify
from asyncvmm._io.names import resolve
from asyncvmm._io.packets import PACKET_LIMIT
from asyncvmm.cli.doctor.line import BOTH, GPU, HOST, Line, Stopwatch, in_bytes, in_words

PROC = Path("/proc")
TRIAL_BYTES = 16 << 20
POOL_BYTES = 256 << 20
"""What ``open_exporter`` makes unless told otherwise."""

FEW_FILES = 1024
"""A consumer costs its exporter two descriptors and one per segment; a server has its own."""

FEWEST_FILES = 32
ROUNDS = 200


def torch_version() -> Line:
    """Which torch is installed."""
    try:
        import torch
    except ImportError as error:
        return Line("torch", "missing", str(error), "pip install torch", BOTH)
    return Line("torch", "ok", str(torch.__version__))


def torch_cuda() -> Line:
    """Whether that torch can use a GPU here."""
    try:
        import torch
    except ImportError as error:
        return Line("torch with CUDA", "missing", str(error), "pip install torch", GPU)
    if torch.version.cuda is None:
        return Line(
            "torch with CUDA", "missing", "this torch was built without CUDA",
            "pools live in host memory; for GPU memory install a torch built for CUDA", GPU,
        )  # fmt: skip
    figure = f"built for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        return Line(
            "torch with CUDA", "missing", f"{figure}, sees no GPU",
            "see the lines about the driver; CUDA_VISIBLE_DEVICES may hide the GPU", GPU,
        )  # fmt: skip
    return Line("torch with CUDA", "ok", f"{figure}, sees {torch.cuda.device_count()}")


def memfd() -> Line:
    """Make a sealed pool in host memory, map it read-only as a consumer does, and read it."""
    with ExitStack() as undo:
        creating = Stopwatch()
        exporter = HostExporterRegion.create(TRIAL_BYTES, TRIAL_BYTES, 1)
        undo.callback(exporter.close)
        created = str(creating)
        consumer = HostConsumerRegion(exporter.info)
        undo.callback(consumer.close)
        mapping = Stopwatch()
        consumer.map(exporter.segments()[0], exporter.export(0))  # checks every seal
        mapped = str(mapping)
    figure = f"{in_bytes(TRIAL_BYTES)} made and sealed in {created}, mapped read-only in {mapped}"
    return Line("memfd and sealing", "ok", figure)


def memory(proc: Path = PROC) -> Line:
    """How much memory this process can still get, and who sets the limit."""
    room = tightest(proc)
    name = "memory"
    if room is None:
        return Line(
            name, "degraded", "no limit can be read",
            "mount /proc and the control groups, or keep pools well below what there is",
        )  # fmt: skip
    figure = f"{in_bytes(room.available)} left in {room.where}"
    if room.available < POOL_BYTES:
        return Line(
            name, "degraded", figure,
            f"a pool of the default {in_bytes(POOL_BYTES)} is refused: raise that limit, or give "
            f"pool_bytes= less than what is left",
        )  # fmt: skip
    return Line(name, "ok", figure)


def open_files(proc: Path = PROC) -> Line:
    """How many files this process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir(proc / "self" / "fd"))
        in_use = f"{used} in use"
    except OSError:
        used, in_use = 0, "how many are in use cannot be read"
    figure = f"{soft:,} (at most {hard:,}), {in_use}"
    advice = "raise it (ulimit -n, LimitNOFILE=, --ulimit nofile=)"
    if soft - used < FEWEST_FILES:
        return Line("open-file limit", "missing", figure, advice, BOTH)
    if soft < FEW_FILES:
        return Line(
            "open-file limit", "degraded", figure,
            f"{advice}: an exporter needs two for each consumer and one more for each segment",
        )  # fmt: skip
    return Line("open-file limit", "ok", figure)


def pidfd() -> Line:
    """Whether the kernel tells of a peer's death by a descriptor of its process."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        identity = identify(near)
        if identity.pidfd is not None:
            identity.pidfd.close()
    return _PIDFD[identity.source]


_PIDFD = {
    "peerpidfd": Line("pidfd", "ok", "SO_PEERPIDFD: the socket itself names the process"),
    "pidfd_open": Line(
        "pidfd", "degraded", "pidfd_open only",
        "deaths are seen, except across pid namespaces; Linux 6.5 or later sees those too",
    ),
    "eof": Line(
        "pidfd", "degraded", "none: the end of the socket only",
        "a death is seen late where a forked child keeps the socket; a seccomp profile may forbid "
        "pidfd_open, or the kernel is older than 5.3",
    ),
}  # fmt: skip


def socket_folder() -> Line:
    """Take a name in the private folder, and give it back."""
    name = f"asyncvmm-doctor-{os.getpid()}"
    try:
        address = resolve(name)
        with closing(Listener.bind(address)):
            pass
    except (AsyncVMMError, OSError) as error:
        return Line(
            "socket folder", "missing", str(error),
            "correct it, point XDG_RUNTIME_DIR to a folder of this user, or give exporters an "
            "abstract name (@...) or a path", BOTH,
        )  # fmt: skip
    return Line("socket folder", "ok", os.path.dirname(address.sockaddr))


def sockets() -> Line:
    """Send the largest packet there is, and measure a round trip of a small one."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        try:
            near.send(bytes(PACKET_LIMIT), socket.MSG_DONTWAIT)
            far.recv(PACKET_LIMIT)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.EAGAIN):
                raise
            return Line(
                "packets", "degraded", f"{in_bytes(PACKET_LIMIT)} are refused ({error.strerror})",
                "large batches travel in several packets; raise net.core.wmem_default to 212992",
            )  # fmt: skip
        begun = Stopwatch()
        for _ in range(ROUNDS):
            near.send(bytes(256))
            far.send(far.recv(256))
            near.recv(256)
        seconds = begun.seconds / ROUNDS
    figure = f"{in_bytes(PACKET_LIMIT)} in one, {in_words(seconds)} there and back in one process"
    return Line("packets", "ok", figure)


def uvloop_version() -> Line:
    """Whether the faster event loop is there."""
    try:
        import uvloop  # noqa: F401 - whether it can be imported is the question

        return Line("uvloop", "ok", f"uvloop {version('uvloop')}")
    except (ImportError, PackageNotFoundError) as error:
        return Line(
            "uvloop", "degraded", str(error),
            "asyncio's own loop does, more slowly for small owners; pip install uvloop",
        )  # fmt: skip


CHECKS = (
    ("torch", torch_version, BOTH),
    ("torch with CUDA", torch_cuda, GPU),
    ("memfd and sealing", memfd, HOST),
    ("memory", memory, ()),
    ("open-file limit", open_files, BOTH),
    ("pidfd", pidfd, ()),
    ("socket folder", socket_folder, BOTH),
    ("packets", sockets, BOTH),
    ("uvloop", uvloop_version, ()),
)
"""Each with its name, and the kinds of device that cannot do without it."""
