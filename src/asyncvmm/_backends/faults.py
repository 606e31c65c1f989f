"""What the driver's answers mean to whoever reads the error."""

from __future__ import annotations

from typing import Any

from asyncvmm._errors import BackendError, DeviceLostError

_HINTS = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible to this process; check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "there is no GPU of that number; check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_INITIALIZED": (
        "CUDA does not work in a child that was forked after CUDA was started; "
        "start processes with spawn"
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver library and the kernel module differ",
    "CUDA_ERROR_ILLEGAL_ADDRESS": (
        "an earlier kernel of this process, or of another under MPS, touched memory it may not, "
        "such as a write through a read-only view; the process must be restarted"
    ),
}

_LOST = frozenset(
    {
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_MPS_RPC_FAILURE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    }
)
"""After these the driver answers nothing else until the process is started anew."""


def failure(name: str, code: Any) -> BackendError:
    """Return the error that says what the call ``name`` answered."""
    hint = _HINTS.get(code.name)
    kind = BackendError
    if code.name in _LOST:
        kind, hint = DeviceLostError, hint or "the process must be restarted"
    return kind(
        f"{name} answered {code.name} ({int(code)})" + (f": {hint}" if hint else ""),
        call=name,
        code=code.name,
    )
