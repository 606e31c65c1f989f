"""Paths that are longer than a socket address: through a descriptor of their folder.

Both ends must come to the same node, so a long path is never put anywhere else: two containers
may see one folder under paths of different lengths.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from asyncvmm._errors import ArgumentError
from asyncvmm._fds import OwnedFd
from asyncvmm._io.names import ADDRESS_LIMIT, Address
from asyncvmm._io.packets import descriptor_limit


@contextmanager
def fitting(address: Address) -> Iterator[str]:
    """Give a socket address that the kernel takes, to bind or connect to inside the block.

    Raises OSError if the folder cannot be opened, ArgumentError if the path is too long for this
    process because it has no /proc, DescriptorLimitError if it may not open another descriptor.
    """
    folder, leaf = os.path.split(address.sockaddr)
    if address.kind == "abstract" or len(os.fsencode(address.sockaddr)) <= ADDRESS_LIMIT:
        yield address.sockaddr
        return
    try:
        opened = OwnedFd(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise descriptor_limit() from error
        raise
    with opened:
        short = f"/proc/self/fd/{opened.fileno()}"
        if not os.path.isdir(short):
            raise ArgumentError(
                f"the path {address.sockaddr!r} has {len(os.fsencode(address.sockaddr))} bytes, a "
                f"socket address {ADDRESS_LIMIT}, and without /proc nothing longer can be reached; "
                f"mount /proc or choose a shorter path"
            )
        yield f"{short}/{leaf}"
