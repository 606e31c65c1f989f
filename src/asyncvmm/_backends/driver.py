"""Each CUDA driver call once, checked, and named in its error.

The bindings are imported, and the driver started, by the first call and never by an import of
this package.  Rules for the bindings (13.0.3 to 13.5): enum members and never plain ints, names
from ``.name`` and never from ``str()``, 64-byte handles through ``getPtr()``.

The driver's calls keep no error behind, unlike the runtime's, so a trial that is refused is only
an answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from asyncvmm._backends.faults import failure
from asyncvmm._errors import BackendError

EVENT_HANDLE_BYTES = 64
"""Size of ``CUipcEventHandle``, fixed by the driver's header."""

SUCCESS = "CUDA_SUCCESS"
NOT_READY = "CUDA_ERROR_NOT_READY"
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

_loaded: Any = None


def import_bindings() -> Any:
    """Return the bindings, with the driver as it is.  Takes 20 to 40 ms the first time."""
    return importlib.import_module("cuda.bindings.driver")


def load() -> Any:
    """Return the bindings with the driver started, importing them on the first call."""
    global _loaded
    if _loaded is None:
        try:
            bindings = import_bindings()
        except ImportError as error:
            raise BackendError(
                f"the CUDA bindings cannot be imported ({error}); "
                f"install cuda-bindings>=13.0.3,<14 or use device='cpu'",
                call="import",
                code="no_bindings",
            ) from error
        _check("cuInit", _protected(bindings.cuInit, 0))
        _loaded = bindings
    return _loaded


def _protected(function: Callable[..., Any], *args: object) -> Any:
    """Call the bindings, which raise RuntimeError where the driver or one call is missing."""
    try:
        return function(*args)
    except RuntimeError as error:
        name = getattr(function, "__name__", "cuInit")
        raise BackendError(
            f"{name} cannot be called: there is no CUDA driver here, or one too old for it "
            f"({error}); install the NVIDIA driver or use device='cpu'",
            call=name,
            code="no_driver",
        ) from error


def _check(name: str, result: Any) -> Any:
    if result[0] != 0:
        raise failure(name, result[0])
    return result[1] if len(result) > 1 else None


def call(name: str, *args: object) -> Any:
    """Call one function of the driver by name; return what it returns besides the code."""
    return _check(name, _protected(getattr(_loaded or load(), name), *args))


# -- devices and contexts ------------------------------------------------------------------


def device_count() -> int:
    """Return how many GPUs this process may see."""
    return int(call("cuDeviceGetCount"))


def device_get(number: int) -> Any:
    """Return the device of that number in this process's own numbering."""
    return call("cuDeviceGet", number)


def device_uuid(number: int) -> str:
    """Return the GPU's UUID as ``GPU-...``, the same in every process."""
    found = call("cuDeviceGetUuid", device_get(number))
    return f"GPU-{uuid.UUID(bytes=bytes(found.bytes)[:16])}"


def device_attribute(number: int, name: str) -> int:
    """Return one attribute, named without its ``CU_DEVICE_ATTRIBUTE_`` prefix."""
    attribute = getattr(load().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", attribute, device_get(number)))


def can_access_peer(number: int, other: int) -> bool:
    """Say whether GPU ``number`` can reach the memory of GPU ``other``; opens no context."""
    return bool(call("cuDeviceCanAccessPeer", device_get(number), device_get(other)))


def context_retain(number: int) -> Any:
    """Return the device's primary context with one more reference."""
    return call("cuDevicePrimaryCtxRetain", device_get(number))


def context_release(number: int) -> None:
    """Give back one reference to the device's primary context."""
    call("cuDevicePrimaryCtxRelease", device_get(number))


def context_synchronize() -> None:
    """Block until the current context has nothing left to do."""
    call("cuCtxSynchronize")


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let the calling thread ask the driver while another one captures a graph.

    Measured on an H200: without it a query broke 20 of 20 captures, with it none.
    """
    before = capture_relaxed()
    try:
        yield
    finally:
        capture_again(before)


# -- streams and events --------------------------------------------------------------------


def stream_create() -> Any:
    """Return a new stream of the current context that the default stream does not wait for."""
    return call("cuStreamCreate", int(load().CUstream_flags.CU_STREAM_NON_BLOCKING))


def stream_destroy(stream: Any) -> None:
    """Destroy a stream; what was queued on it is still done."""
    call("cuStreamDestroy", stream)


def stream_synchronize(stream: Any) -> None:
    """Block until the stream has nothing left to do."""
    call("cuStreamSynchronize", stream)


def event_create(*, interprocess: bool) -> Any:
    """Return a new event without timing, in the current context."""
    flags = load().CUevent_flags
    wanted = int(flags.CU_EVENT_DISABLE_TIMING)
    if interprocess:
        wanted |= int(flags.CU_EVENT_INTERPROCESS)
    return call("cuEventCreate", wanted)


def event_destroy(event: Any) -> None:
    """Destroy an event, or this process's opening of another one's."""
    call("cuEventDestroy", event)


def event_handle(event: Any) -> bytes:
    """Return the 64 bytes with which another process opens the event."""
    found = call("cuIpcGetEventHandle", event)
    return ctypes.string_at(found.getPtr(), EVENT_HANDLE_BYTES)


def event_open(handle: bytes) -> Any:
    """Open another process's event in the current context."""
    found = load().CUipcEventHandle()
    ctypes.memmove(found.getPtr(), handle, EVENT_HANDLE_BYTES)
    return call("cuIpcOpenEventHandle", found)


def event_synchronize(event: Any) -> None:
    """Block until the event's last record is done.  Lets other threads run."""
    call("cuEventSynchronize", event)


# Those below run for every hand-off, so they take the shortest way.  Whoever calls them has a
# context or an event, so the driver has been loaded.


def context_current() -> int:
    """Return the calling thread's current context as a number; 0 if there is none."""
    code, context = _loaded.cuCtxGetCurrent()
    if code:
        raise failure("cuCtxGetCurrent", code)
    return int(context)


def context_push(context: Any) -> None:
    """Make ``context`` current on the calling thread until the matching pop."""
    code = _loaded.cuCtxPushCurrent(context)[0]
    if code:
        raise failure("cuCtxPushCurrent", code)


def context_pop() -> None:
    """Make current again what was before the last push."""
    code = _loaded.cuCtxPopCurrent()[0]
    if code:
        raise failure("cuCtxPopCurrent", code)


def capture_relaxed() -> Any:
    """Begin what :func:`relaxed_capture` does; return what :func:`capture_again` needs."""
    mode = _loaded.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    code, before = _loaded.cuThreadExchangeStreamCaptureMode(mode)
    if code:
        raise failure("cuThreadExchangeStreamCaptureMode", code)
    return before


def capture_again(before: Any) -> None:
    """Have the calling thread treat captures as it did before."""
    code = _loaded.cuThreadExchangeStreamCaptureMode(before)[0]
    if code:
        raise failure("cuThreadExchangeStreamCaptureMode", code)


def event_record(event: Any, stream: int) -> None:
    """Record the event behind what is queued on the stream."""
    code = _loaded.cuEventRecord(event, stream)[0]
    if code:
        raise failure("cuEventRecord", code)


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy between addresses of the current context; the host goes on at once."""
    code = _loaded.cuMemcpyAsync(target, source, nbytes, stream)[0]
    if code:
        raise failure("cuMemcpyAsync", code)


def stream_wait(stream: int, event: Any) -> None:
    """Have the stream wait for the event's last record; the host goes on at once."""
    code = _loaded.cuStreamWaitEvent(stream, event, 0)[0]
    if code:
        raise failure("cuStreamWaitEvent", code)


def event_done(event: Any) -> bool:
    """Say whether the event's last record is done; True if it was never recorded."""
    code = _loaded.cuEventQuery(event)[0]
    if not code:
        return True
    if code.name == NOT_READY:
        return False
    raise failure("cuEventQuery", code)
