"""In debug mode: refuse what is sent from another thread than the loop's.

Nothing of an exporter is locked, so two threads in it lose slots or bytes, some time later and
somewhere else.  A look at each call would cost everybody; a wrapper costs nothing when off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from asyncvmm._errors import LocalProtocolError
from asyncvmm._exporter.several import Several

P = ParamSpec("P")
T = TypeVar("T")


def stay(exporter: Several) -> None:
    """Refuse to take room and to publish in any thread but this one, from now on."""
    core, name = exporter._core, exporter.name
    # Whatever takes a slot, or waits for one, comes through one of the first four before anything
    # has changed.
    core.reserve = _here(core.reserve, name)  # type: ignore[method-assign]  # see above
    core.reserve_all = _here(core.reserve_all, name)  # type: ignore[method-assign]  # see above
    exporter._acquire = _here(exporter._acquire, name)  # type: ignore[method-assign]  # see above
    exporter._acquire_all = _here(exporter._acquire_all, name)  # type: ignore[method-assign]  # see above
    exporter._publish = _here(exporter._publish, name)  # type: ignore[method-assign]  # see above


def _here(call: Callable[P, T], name: str) -> Callable[P, T]:
    home = threading.current_thread()

    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        here = threading.current_thread()
        if here is not home:
            raise LocalProtocolError(
                f"the exporter {name!r} belongs to the event loop of thread {home.name!r} and was "
                f"called from thread {here.name!r}; hand the call to that loop "
                f"(asyncio.run_coroutine_threadsafe, loop.call_soon_threadsafe), or use "
                f"asyncvmm.blocking, whose exporters any thread may call"
            )
        return call(*args, **kwargs)

    return checked
