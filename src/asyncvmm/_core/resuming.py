"""The greetings of a consumer whose link broke and whose process did not end.

It holds owners of which nobody can hear any more, and what it said last may be lost.  So it comes
again, is told what it is believed to hold, and says what became of each.  Nothing new is
delivered on such a link.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from asyncvmm._ticket import Natural
from asyncvmm._types import MAX_SLOTS


class Resume(msgspec.Struct, array_like=True, frozen=True, tag=22):
    """Consumer: I was this peer of yours, and the link broke.

    Only the same process is believed, by the kernel's word for who it is.
    """

    exporter: Annotated[bytes, Meta(min_length=16, max_length=16)]
    peer: Natural
    secret: Annotated[bytes, Meta(max_length=1024)] = b""


class Resumed(msgspec.Struct, array_like=True, frozen=True, tag=23):
    """Exporter: you are, and this is what you hold as far as I know: slots and generations."""

    holds: Annotated[list[tuple[Natural, Natural]], Meta(max_length=MAX_SLOTS)]
