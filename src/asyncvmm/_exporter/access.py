"""Who may connect: the kernel's word for the peer, never the peer's own."""

from __future__ import annotations

import os
from collections.abc import Iterable

from asyncvmm._core.wire import check_secret
from asyncvmm._types import check_ids


class Access:
    """The same user by default; more users, groups, or a shared secret where asked for."""

    __slots__ = ("gids", "secret", "uids")

    def __init__(
        self, uids: Iterable[int] = (), gids: Iterable[int] = (), secret: bytes | str = b""
    ) -> None:
        self.uids = frozenset((os.geteuid(), *check_ids(uids, "allow_uids")))
        self.gids = frozenset(check_ids(gids, "allow_gids"))
        self.secret = check_secret(secret)

    @property
    def shared(self) -> bool:
        """Whether anybody but this user may connect."""
        return len(self.uids) > 1 or bool(self.gids)

    def allows(self, uid: int, gid: int) -> bool:
        """Say whether a process of this user and group may connect."""
        return uid in self.uids or gid in self.gids
