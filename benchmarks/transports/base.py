"""What a transport is: a producer's side and a consumer's side, each in a process of its own.

Both sides are written as coroutines.  A transport that blocks (``uses_loop = False``) never
suspends in them, and its processes then run no event loop at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch

from benchmarks.contents import Contents
from benchmarks.setting import Setting

Take = Callable[[int, Sequence[torch.Tensor]], None]
"""What a consumer calls with the number and the features of each hand-off.  It keeps neither."""


class Producer(ABC):
    """The side that has payloads.  Entering it opens what consumers connect to."""

    fallbacks = 0
    """Hand-offs that did not go the way the transport promises."""

    together = 1
    """How many it hands over in one call, if so many may be in flight."""

    def __init__(self, setting: Setting, contents: Contents, shared: Any) -> None:
        self.setting = setting
        self.contents = contents
        self.shared = shared

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Tell the consumers that it is over."""
        return

    @abstractmethod
    async def ready(self) -> None:
        """Wait until every consumer is connected."""

    @abstractmethod
    async def hand_over(self, number: int) -> Any:
        """Announce one payload, and make it present if the transport copies; return a ticket."""

    async def hand_over_all(self, numbers: Sequence[int]) -> Sequence[Any]:
        """Announce several payloads in one call; return a ticket for each."""
        return [await self.hand_over(number) for number in numbers]

    @abstractmethod
    async def settled(self, ticket: Any) -> None:
        """Wait until all consumers are done with it and its memory may be used again."""

    def facts(self) -> dict[str, Any]:
        """Return what else this transport knows about its run."""
        return {}


class Consumer(ABC):
    """The side that is handed payloads.  Entering it connects."""

    def __init__(self, setting: Setting, index: int, shared: Any) -> None:
        self.setting = setting
        self.index = index
        self.shared = shared

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Let go."""
        return

    @abstractmethod
    async def consume(self, take: Take) -> None:
        """Call ``take`` with each hand-off and acknowledge it; return when it is over."""


class Transport(ABC):
    """A transport's two sides, and what it can do."""

    name: ClassVar[str]
    about: ClassVar[str]
    """What it does for each hand-off, in a line."""
    producer: ClassVar[type[Producer]]
    consumer: ClassVar[type[Consumer]]
    uses_loop: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    delivers: ClassVar[bool] = True
    """False for what hands nothing over."""
    routes: ClassVar[tuple[str, ...]] = ("broadcast", "compete")
    """How it serves several consumers."""
    kinds: ClassVar[tuple[str, ...]] = ("flow", "fanout", "bursts", "reuse", "connect")
    """The kinds of workloads that make sense for it."""

    @classmethod
    def unusable(cls, setting: Setting) -> str:
        """Return why it cannot run with this setting, or nothing."""
        kind = setting.device.partition(":")[0]
        if kind not in cls.devices:
            return f"not for {kind} memory"
        route = "compete" if setting.compete else "broadcast"
        if setting.consumers > 1 and route not in cls.routes:
            return f"does not {route}"
        return ""

    @classmethod
    def share(cls, setting: Setting) -> Any:
        """Make what both sides inherit; most meet under ``setting.folder`` and need nothing."""
        return None

    @classmethod
    def clean(cls, setting: Setting) -> None:
        """Remove what its processes leave outside the folder if they are killed."""
        return
