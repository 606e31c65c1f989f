"""A reserved address range, and the system calls on it.

The calls go through ctypes and not through :mod:`mmap` for three reasons: they let go of the GIL
for as long as they run; a range can be reserved first and filled piece by piece; and a range ends
when the last object that holds it is gone, never under a live view.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from asyncvmm._errors import BackendError
from asyncvmm._fds import Single

P = ParamSpec("P")
T = TypeVar("T")

PAGE = os.sysconf("SC_PAGE_SIZE")

READ = 1
WRITE = 2
# Numbers of Linux's <sys/mman.h>, the same on x86-64 and arm64.
_PROT_NONE = 0
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_c_mmap = _libc.mmap
_c_mmap.restype = ctypes.c_void_p
_c_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_c_munmap = _libc.munmap
_c_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_c_madvise = _libc.madvise
_c_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def pages(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages, in bytes."""
    return -(-nbytes // PAGE) * PAGE


def checked(call: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function``; an OSError becomes a BackendError that names ``call``."""
    try:
        return function(*args, **kwargs)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        raise BackendError(
            f"{call} failed with {code} ({error.strerror}){_ADVICE.get(code, '')}",
            call=call,
            code=code,
        ) from error


_ADVICE = {
    "EMFILE": "; raise the open-file limit (ulimit -n) or close some files",
    "ENFILE": "; the machine's table of open files is full",
    "EFBIG": "; raise the file-size limit (ulimit -f)",
    "ENOMEM": "; make room, raise the address-space limit (ulimit -v) or vm.max_map_count",
}


class Mapping(Single):
    """One reserved address range of ``nbytes``; it is unmapped when its last holder lets go.

    The pages of a segment are placed into the range and taken out again; in between, touching an
    address there is a fault and never somebody else's memory.  A child made by ``os.fork`` has
    its own copy of the range, so what it unmaps harms nobody.
    """

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = 0
        self.address = checked("mmap", _reserve, None, nbytes, 0)

    def place(self, start: int, nbytes: int, fd: int, protection: int) -> None:
        """Show the first ``nbytes`` of ``fd`` at ``start``; on an error the range stays empty."""
        try:
            checked("mmap", _mmap, self.address + start, nbytes, protection, _PLACED, fd)
        except BackendError as error:
            # Kernels before 6.12 may have dropped the reservation on the way; NOREPLACE takes it
            # back if so, and answers EEXIST if not.
            try:
                _reserve(self.address + start, nbytes, _MAP_FIXED_NOREPLACE)
            except OSError as second:
                if second.errno != errno.EEXIST:
                    error.add_note(f"the range could not be reserved again either: {second}")
            raise

    def vacate(self, start: int, nbytes: int) -> None:
        """Take the pages at ``start`` out; the range stays reserved."""
        checked("mmap", _reserve, self.address + start, nbytes, _MAP_FIXED)

    def populate(self, start: int, nbytes: int) -> None:
        """Make every page of a new, empty range present and writable without another fault."""
        checked("madvise", _populate, self.address + start, nbytes)

    def fill(self, start: int, nbytes: int, byte: int) -> None:
        """Overwrite a range with ``byte``; the caller knows that pages are there."""
        ctypes.memset(self.address + start, byte, nbytes)

    # The call is bound early: at interpreter exit this module's names may be gone first.
    def __del__(self, _munmap: Callable[[int, int], int] = _c_munmap) -> None:
        if self.address and _munmap(self.address, self.nbytes) != 0:
            raise BackendError(f"{self!r} was not unmapped", call="munmap", code="")

    def __repr__(self) -> str:
        return f"Mapping({self.address:#x}, {self.nbytes})"


_PLACED = _MAP_SHARED | _MAP_FIXED


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _c_mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        raise _last_error()
    return found


def _reserve(address: int | None, nbytes: int, flags: int) -> int:
    """Reserve addresses without memory: nothing is charged for them, touching them is a fault."""
    flags |= _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    return _mmap(address, nbytes, _PROT_NONE, flags, -1)


def _populate(address: int, nbytes: int) -> None:
    if _c_madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    error = _last_error()
    if error.errno != errno.EINVAL:
        raise error
    # An older kernel.  The pages are allocated and zero: writing zeros only faults them in.
    ctypes.memset(address, 0, nbytes)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
