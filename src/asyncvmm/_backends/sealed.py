"""One segment of host memory: a memfd that nobody can resize, and only its maker can write.

A memfd has no name, so nothing outlives the processes and nobody can delete another's memory
(field report 6).  Its size is sealed, so nobody can turn a reader's next access into a bus error,
and unless the pool is writable nobody but its maker can write it (field report 52).

One memfd for a whole pool would save descriptors, but such a pool could never shrink.  Probed on
Linux 6.18: F_SEAL_FUTURE_WRITE, which keeps a peer from writing, refuses ``fallocate(PUNCH_HOLE)``
and ``madvise(MADV_REMOVE)`` with EPERM, through our own writable mapping too; without it both
work.  So a segment is a memfd, and its pages return when its last descriptor and its last mapping,
on either side, are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from asyncvmm._backends.limits import check_room
from asyncvmm._backends.mapping import READ, WRITE, Mapping, checked
from asyncvmm._errors import BackendError, PoolMemoryError
from asyncvmm._fds import OwnedFd
from asyncvmm._types import SegmentInfo

_F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1; not in fcntl before Python 3.13
_SEALS = {
    "F_SEAL_SEAL": fcntl.F_SEAL_SEAL,
    "F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK,
    "F_SEAL_GROW": fcntl.F_SEAL_GROW,
}


def _seals(writable: bool) -> dict[str, int]:
    return _SEALS if writable else {**_SEALS, "F_SEAL_FUTURE_WRITE": _F_SEAL_FUTURE_WRITE}


def commit(mapping: Mapping, segment: SegmentInfo, *, writable: bool) -> OwnedFd:
    """Make the segment's memfd, all of it in memory, placed and sealed.  All or nothing."""
    size = segment.nbytes
    with contextlib.ExitStack() as undo:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        fd = OwnedFd(checked("memfd_create", os.memfd_create, "asyncvmm-pool", flags))
        undo.callback(fd.close)
        checked("ftruncate", os.ftruncate, fd.fileno(), size)
        with _memory_refusals(size):
            checked("posix_fallocate", os.posix_fallocate, fd.fileno(), 0, size)
        mapping.place(segment.start, size, fd.fileno(), READ | WRITE)
        undo.callback(mapping.vacate, segment.start, size)
        # Allocated is not yet mapped: without this the first copy runs at a third of its speed.
        with _memory_refusals(size):
            mapping.populate(segment.start, size)
        # Last, because F_SEAL_FUTURE_WRITE lets no mapping be made writable after it.
        seals = sum(_seals(writable).values())
        checked("F_ADD_SEALS", fcntl.fcntl, fd.fileno(), fcntl.F_ADD_SEALS, seals)
        undo.pop_all()
    return fd


@contextlib.contextmanager
def _memory_refusals(asked: int) -> Iterator[None]:
    """Turn "there is no memory" into what ``check_room`` would have said a moment later."""
    try:
        yield
    except BackendError as error:
        if error.code not in ("ENOMEM", "ENOSPC"):
            raise
        check_room(asked)
        # Every limit that can be read would allow it: none of them is the one that refused.
        raise PoolMemoryError(asked, 0, f"the kernel ({error.call}: {error.code})") from error


def check_file(fd: int, segment: SegmentInfo, *, writable: bool) -> None:
    """Refuse what could shrink under a reader, or be written behind its back (report 52)."""
    what = f"the descriptor of segment {segment.index}"
    status = checked("fstat", os.fstat, fd)
    if status.st_size != segment.nbytes:
        raise BackendError(
            f"{what} is a file of {status.st_size:,} bytes (mode {status.st_mode:#o}), "
            f"not a memfd of {segment.nbytes:,}",
            call="fstat",
            code="size",
        )
    try:
        found = checked("F_GET_SEALS", fcntl.fcntl, fd, fcntl.F_GET_SEALS)
    except BackendError as error:
        if error.code != "EINVAL":  # the answer for all but memfds: they alone have seals
            raise
        found = 0
    missing = [name for name, seal in _seals(writable).items() if not found & seal]
    if missing:
        raise BackendError(
            f"{what} lacks {', '.join(missing)}: its maker could take its pages away or change "
            f"them under a reader; only an asyncvmm exporter's memfd is mapped",
            call="F_GET_SEALS",
            code="unsealed",
        )
