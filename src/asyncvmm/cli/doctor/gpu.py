"""What the GPUs offer: each check asks the driver, or tries the real thing in two processes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from asyncvmm._backends import driver, handle_types
from asyncvmm._backends.cuda import CudaExporterRegion
from asyncvmm._backends.driver_memory import HandleType
from asyncvmm._errors import BackendError
from asyncvmm.cli.doctor import trial
from asyncvmm.cli.doctor.line import GPU, Line, Stopwatch, in_bytes, in_words

TRIAL_BYTES = 64 << 20
_WHY = {
    "no_bindings": "the bindings cannot be imported",
    "no_driver": "the driver's library (libcuda.so.1) is not there, or too old",
}
_INSTALL = "for GPU memory install the NVIDIA driver; pools live in host memory without it"


def bindings() -> Line:
    """Which bindings of the driver are installed."""
    try:
        found = version("cuda-bindings")
    except PackageNotFoundError:
        return Line(
            "cuda-bindings", "missing", "not installed",
            "pip install 'cuda-bindings>=13.0.3,<14'", GPU,
        )  # fmt: skip
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdecimal())
    if not (13, 0, 3) <= numbers < (14,):
        return Line(
            "cuda-bindings", "degraded", found,
            "only 13.0.3 up to 14 was tried: pip install 'cuda-bindings>=13.0.3,<14'",
        )  # fmt: skip
    return Line("cuda-bindings", "ok", found)


def driver_version() -> Line:
    """Whether there is a driver, for which CUDA, and which GPUs it shows."""
    try:
        driver.load()
        count = driver.device_count()
    except BackendError as error:
        return Line("driver", "missing", _WHY.get(error.code, str(error)), _INSTALL, GPU)
    if not count:
        return Line("driver", "missing", "it shows no GPU", "check CUDA_VISIBLE_DEVICES", GPU)
    number = int(driver.call("cuDriverGetVersion"))
    names = [_name(each) for each in range(count)]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Line("driver", "ok", f"CUDA {number // 1000}.{number % 1000 // 10}, {kinds}")


def _name(number: int) -> str:
    raw = driver.call("cuDeviceGetName", 128, driver.device_get(number))
    return bytes(raw).split(b"\0")[0].decode(errors="replace")


def virtual_memory(device: int) -> Line:
    """Reserve, create and map memory of the GPU."""
    making = Stopwatch()
    region = CudaExporterRegion.create(device, TRIAL_BYTES, 2 * TRIAL_BYTES, 1)
    made = str(making)
    try:
        growing = Stopwatch()
        region.grow(TRIAL_BYTES)
        grown = str(growing)
    finally:
        region.close()
    return Line(
        "virtual memory", "ok", f"{in_bytes(TRIAL_BYTES)} made in {made}, as much again in {grown}"
    )


def posix_handles(device: int) -> Line:
    """Export memory of the GPU as a descriptor."""
    advice = "FABRIC handles do as well; a virtual machine or an old driver may have no descriptors"
    return _handles(device, "posix", "POSIX descriptors", advice)


def fabric_handles(device: int) -> Line:
    """Export memory of the GPU as a FABRIC handle, which other hosts of a rack can map."""
    advice = "POSIX descriptors do on one host; only sharing between the hosts of a rack needs it"
    return _handles(device, "fabric", "FABRIC handles", advice)


def _handles(device: int, kind: HandleType, name: str, advice: str) -> Line:
    trying = Stopwatch()
    context = driver.context_retain(device)
    try:
        driver.context_push(context)
        try:
            refusal = handle_types.trial(device, kind)
        finally:
            driver.context_pop()
    finally:
        driver.context_release(device)
    if refusal is None:
        return Line(name, "ok", f"one granule made, exported and given back in {trying}")
    return Line(name, "missing", refusal.why, advice)


class TwoProcesses:
    """Two processes on one GPU, tried once; three lines come of it."""

    def __init__(self, device: int, kind: HandleType) -> None:
        self._device = device
        self._kind: HandleType = kind
        self._outcome: trial.Outcome | None = None

    def _tried(self) -> trial.Outcome:
        if self._outcome is None:
            self._outcome = trial.run(self._device, self._kind)
        return self._outcome

    def events(self) -> Line:
        """Record an event here, wait for it there, and the other way round."""
        outcome = self._tried()
        if not outcome.right:
            return Line(
                "interprocess events", "missing", "the other process read something else",
                "the memory arrives wrong here: report it with this output", GPU,
            )  # fmt: skip
        return Line(
            "interprocess events", "ok",
            f"hand-off and release in another process: {in_words(outcome.handoff)} in the middle "
            f"of {trial.ROUNDS}; shared and mapped there in {in_words(outcome.share)}",
        )  # fmt: skip

    def read_only(self) -> Line:
        """Have the other process write into the pool, which it may not."""
        answer = self._tried().read_only
        if not answer:
            return Line(
                "read-only import", "degraded", "a write of a consumer was let pass",
                "a consumer's stray write can change what others read; the driver is too old",
            )  # fmt: skip
        return Line("read-only import", "ok", f"a stray write there is refused ({answer})")

    def mps(self) -> Line:
        """Whether processes share the GPU at the same time or take turns."""
        try:
            shared = driver.device_attribute(self._device, "MPS_ENABLED")
        except (BackendError, AttributeError):
            shared = 0  # a driver or bindings that do not know the question
        if shared:
            return Line("MPS", "ok", "running: processes share the GPU at the same time")
        return Line(
            "MPS", "degraded", "not running: two processes on one GPU take turns (time-slicing)",
            "a hand-off between two busy processes on one GPU costs about 310 us instead of 85 to "
            "110: start nvidia-cuda-mps-control -d, or put consumers on other GPUs (75 to 95 us)",
        )  # fmt: skip


def peer_access() -> Line:
    """Which GPUs reach each other's memory."""
    count = driver.device_count()
    if count == 1:
        return Line("peer access", "ok", "one GPU: there is no other to reach")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not driver.can_access_peer(*pair)]
    if not apart:
        return Line("peer access", "ok", f"all {count} GPUs reach each other")
    named = ", ".join(f"{a} from {b}" for b, a in apart[:8]) + ", ..." * (len(apart) > 8)
    return Line(
        "peer access", "degraded",
        f"{len(apart)} of {len(pairs)} pairs do not: memory of {named}",
        "put a consumer on a GPU that reaches the exporter's; virtual machines and some boards "
        "forbid it (nvidia-smi topo -p2p r)",
    )  # fmt: skip
