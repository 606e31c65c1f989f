"""Opening both ends from code that is not async."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from asyncvmm._consumer.opening import connect as async_connect
from asyncvmm._errors import LocalProtocolError
from asyncvmm._exporter.exporter import Exporter as AsyncExporter
from asyncvmm._exporter.opening import open_exporter as async_open_exporter
from asyncvmm._io.busy import BUSY_POLL_SECONDS
from asyncvmm._tensors import DevicePort
from asyncvmm.blocking._consumer import Consumer
from asyncvmm.blocking._exporter import Exporter
from asyncvmm.blocking._redeeming import AnyConsumer
from asyncvmm.blocking._thread import LoopThread, let_go, seconds, take

P = ParamSpec("P")
OpenedT = TypeVar("OpenedT")
FacadeT = TypeVar("FacadeT", Consumer, Exporter)


def _with_arguments_of(
    opening: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the arguments of another one, for readers and for type checkers."""

    def give(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        theirs = inspect.signature(opening)
        parameters = [itself, *theirs.parameters.values()]
        init.__dict__["__signature__"] = theirs.replace(parameters=parameters)
        return init

    return give


class _Opening(Generic[OpenedT, FacadeT]):
    def __init__(
        self, opening: AbstractAsyncContextManager[OpenedT, None], timeout: float | None
    ) -> None:
        seconds(timeout)
        self._opening = opening
        self._timeout = timeout
        self._facade: FacadeT | None = None

    def _wrap(self, opened: OpenedT, thread: LoopThread) -> FacadeT:
        raise NotImplementedError

    async def _open(self, thread: LoopThread) -> None:
        # Noted here and not by the caller, who may have been interrupted meanwhile.
        self._facade = self._wrap(await self._opening.__aenter__(), thread)

    def __enter__(self) -> FacadeT:
        if self._facade is not None:
            raise LocalProtocolError("this can be entered once; call it again")
        try:
            thread = take(self)
            thread.run(lambda: self._open(thread), self._timeout, "the other end")
            assert self._facade is not None
            return self._facade
        except BaseException:
            if self._facade is None:
                let_go(self)
            else:
                self._facade.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._facade is not None
        try:
            self._facade.__exit__(kind, error, trace)
        except BaseException:
            self._facade.close()  # it may not have begun; again is a no-op
            raise


class connect(_Opening[AnyConsumer, Consumer]):
    """Attach to an exporter: ``with blocking.connect("vision", rank=0) as consumer``.

    The arguments and errors are those of :class:`asyncvmm.connect`.  With ``wait=True`` entering
    waits for the exporter, for at most ``timeout`` seconds (TimeoutError after that).
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        device: str = "auto",
        rank: int | None = None,
        member: str | None = None,
        prefetch: int = 2,
        wait: bool = False,
        reconnect: bool = False,
        writable: bool = False,
        secret: bytes | str = b"",
        allow_uids: Iterable[int] = (),
        busy_poll: float = BUSY_POLL_SECONDS,
        trace: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        _port: DevicePort | None = None,
    ) -> None:
        # The two kinds of consumer are one here, so their types are not told apart.
        attach: Callable[..., AbstractAsyncContextManager[AnyConsumer, None]] = async_connect
        opening = attach(
            name,
            device=device,
            rank=rank,
            member=member,
            prefetch=prefetch,
            wait=wait,
            reconnect=reconnect,
            writable=writable,
            secret=secret,
            allow_uids=allow_uids,
            busy_poll=busy_poll,
            trace=trace,
            _port=_port,
        )
        super().__init__(opening, timeout)

    def _wrap(self, opened: AnyConsumer, thread: LoopThread) -> Consumer:
        return Consumer(opened, thread, self)


class open_exporter(_Opening[AsyncExporter, Exporter]):
    """Open an exporter: ``with blocking.open_exporter("vision") as exporter``.

    The arguments and errors are those of :class:`asyncvmm.open_exporter`, and so is what leaving
    the block does.
    """

    @_with_arguments_of(async_open_exporter)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(async_open_exporter(*args, **options), None)

    def _wrap(self, opened: AsyncExporter, thread: LoopThread) -> Exporter:
        return Exporter(opened, thread, self, self._opening.__aexit__)
