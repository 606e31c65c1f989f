"""What a poll costs a loop that polls in every step, counted: nothing that the kernel sees."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.blocking import steps
from tests.blocking.ends import SECONDS, number_of, open_both, send, until
from tests.process.harness import Peers
from tests.process.harness import until as until_

POLLS = 1000


def test_an_empty_poll_is_one_python_call_and_no_other(name: str) -> None:
    """No call into C, so no system call and no clock, and no word to the loop's thread.

    Kills the planted bugs of a poll that asks the loop's thread, and of one that takes the lock
    before it knows that there is something to take.
    """
    seen = Counter[str]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        seen[event] += 1

    with open_both(name) as (exporter, (consumer,)):
        for _ in range(2):  # the first one has to ask
            assert consumer.poll() is None
        poll, lock, thread = consumer.poll, consumer._taking, consumer._thread
        used: Any = None  # whatever is done with it raises
        try:
            consumer._taking = consumer._thread = used
            sys.setprofile(count)
            for _ in range(POLLS):
                poll()
        finally:
            sys.setprofile(None)
            consumer._taking, consumer._thread = lock, thread
        assert seen == {"call": POLLS, "return": POLLS, "c_call": 1}  # the last ends the count
        send(exporter, 1)
        until(lambda: bool(consumer._handed))
        batch = consumer.poll()
        assert batch is not None
        assert number_of(batch) == 1


async def test_an_empty_poll_makes_no_system_call(peers: Peers, name: str) -> None:
    """Ten thousand polls, in a thread that a single one would end.

    Kills: a poll that reads a descriptor, asks for the time or its process, or waits for a lock.
    """
    peer = peers.start()
    said = await peer.call(steps.poll_strictly, name, 10_000, True)
    if "strict mode" in said:
        pytest.skip(said)
    assert said == "found nothing"


async def test_the_kernel_ends_a_thread_that_makes_a_system_call(peers: Peers, name: str) -> None:
    """Kills the planted bug of a test that watches nothing."""
    peer = peers.start()
    polling = peer.begin(steps.poll_strictly, name, 10, False)
    tid = (await peer.at("polling"))["tid"]
    await until_(lambda: polling.done() or not Path(f"/proc/{peer.pid}/task/{tid}").exists())
    if polling.done():
        assert "strict mode" in await polling


def test_a_batch_that_was_waited_for_costs_no_round_trip(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that polls in vain and then finds a batch never asks the loop's thread.

    Kills the planted bug of a queue that is filled on demand only.
    """
    with open_both(name) as (exporter, (consumer,)):
        acks = []
        for number in range(20):
            while consumer.poll() is not None:
                pass
            assert consumer.poll() is None
            acks.append(send(exporter, number))
            until(lambda: bool(consumer._handed))
            calls: list[Any] = []
            with monkeypatch.context() as patch:
                patch.setattr(consumer, "_run", calls.append)
                batch = consumer.poll()
            assert batch is not None
            assert number_of(batch) == number
            assert calls == []
        for ack in acks:
            assert ack.result(SECONDS).complete
