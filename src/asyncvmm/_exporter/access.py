"""Who may connect: the kernel's word for the peer, never the peer's own."""

from __future__ import annotations

import os
from collections.abc import Iterable

from asyncvmm._errors import ArgumentError


class Access:
    """The same user by default; more users, groups, or a shared secret where asked for."""

    __slots__ = ("gids", "secret", "uids")

    def __init__(
        self, uids: Iterable[int] = (), gids: Iterable[int] = (), secret: bytes | str = b""
    ) -> None:
        self.uids = frozenset((os.getuid(), *uids))
        self.gids = frozenset(gids)
        self.secret = secret.encode() if isinstance(secret, str) else bytes(secret)
        if len(self.secret) > 1024:
            raise ArgumentError(f"a secret may have at most 1,024 bytes, got {len(self.secret):,}")

    def allows(self, uid: int, gid: int) -> bool:
        """Say whether a process of this user and group may connect."""
        return uid in self.uids or gid in self.gids
