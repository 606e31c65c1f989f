"""Both ends in this process, blocking, and ways to look at them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any, TypeVar

import torch

from asyncvmm import Broadcast, Compete, blocking
from tests.patience import PROMPTLY

T = TypeVar("T")

SECONDS = PROMPTLY
"""For a wait; far more than any takes, so that a hang fails and nothing else."""


@contextmanager
def open_both(
    name: str, consumers: int = 1, *, competing: bool = False, **options: Any
) -> Iterator[tuple[blocking.Exporter, list[blocking.Consumer]]]:
    """Open an exporter with so many consumers; the consumers leave first."""
    settings = {"pool_bytes": "64KiB", "slots": 8, "device": "cpu", **options}
    route = Compete() if competing else Broadcast(consumers)
    port = settings.get("_port")
    with ExitStack() as stack:
        exporter = stack.enter_context(blocking.open_exporter(name, route=route, **settings))
        found = [
            stack.enter_context(
                blocking.connect(
                    name,
                    device="cpu",
                    rank=None if competing else rank,
                    _port=port,
                    timeout=SECONDS,
                )
            )
            for rank in range(consumers)
        ]
        exporter.wait_attached(consumers, SECONDS)
        yield exporter, found


def send(exporter: blocking.Exporter, number: int, **options: Any) -> blocking.Acknowledgement:
    """Send an owner that says its number."""
    options.setdefault("timeout", SECONDS)
    return exporter.send({"x": torch.full((4,), float(number))}, key=number, **options)


def number_of(batch: Any) -> int:
    """Return the number that a batch says, let it go, and check that its bytes say the same."""
    with batch:
        (owner,) = batch
        assert owner["x"].tolist() == [float(owner.key)] * 4
        return int(owner.key)


def until(condition: Callable[[], bool]) -> None:
    """Look at something again and again that no event tells of."""
    deadline = monotonic() + SECONDS
    pause = threading.Event()
    while not condition():
        assert monotonic() < deadline, "never came true"
        pause.wait(0.001)


class Doing(threading.Thread):
    """A call in another thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Make the call."""
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def value(self) -> Any:
        """Return or raise what came of it."""
        self.join(SECONDS)
        assert not self.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self._value
