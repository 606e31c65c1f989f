"""What every test gets: both event loops, the GPU gate, and the descriptor guard."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.limits import alarm, limited, seconds_of
from tests.patience import raise_limits

pytest_plugins = ["pytester"]

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

GUARDED = ("socket:", "/memfd:", "anon_inode:[eventfd]", "anon_inode:[pidfd]", "pidfd:")
"""How /proc/self/fd names what this library opens.  Since Linux 6.9 pidfds have a file system of
their own, hence two names."""

# The same examples in every run, so that a run fails for what was changed since the last and for
# nothing else; `--hypothesis-profile=default` looks for new ones.  An example may take as long as a
# busy machine needs.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

raise_limits()

descriptors_before = pytest.StashKey[Counter[str]]()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test on each loop."""
    return LOOPS


def cuda_device_count() -> int:
    """Count the CUDA devices, without importing torch for tests that need none."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def warm_up_cuda() -> None:
    """Have the driver open its own descriptors now, so that the guard does not blame a test."""
    import torch

    for index in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{index}")


def open_descriptors() -> Counter[str]:
    """Count this process's descriptors of the guarded kinds by what they refer to."""
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listdir itself had open
            continue
        if target.startswith(GUARDED):
            found[target] += 1
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason; give each coroutine a time limit."""
    gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if gpu and not cuda_device_count():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = limited(item.obj, seconds_of(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """End a function that hangs; coroutines are ended by their loops."""
    if pyfuncitem.get_closest_marker("asyncio") is not None:
        return (yield)
    with alarm(seconds_of(pyfuncitem)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Note which descriptors are open before any fixture."""
    if item.get_closest_marker("gpu") is not None and cuda_device_count():
        warm_up_cuda()
    item.stash[descriptors_before] = open_descriptors()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves descriptors open once all its fixtures are gone (inv. 12).

    Looked at after the event loop of the test was closed, so what the loop opens for itself
    does not count.
    """
    yield
    before = item.stash.get(descriptors_before, None)
    if before is None:  # skipped before its setup began
        return
    left = open_descriptors() - before
    if left:
        gc.collect()  # slow with torch loaded, so only when something looks wrong
        left = open_descriptors() - before
    if left:
        listing = ", ".join(f"{count} x {target}" for target, count in sorted(left.items()))
        pytest.fail(f"the test left descriptors open: {listing}", pytrace=False)
