"""What the facade does, with both ends in one process: nothing less than the async one."""

from __future__ import annotations

import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import asyncvmm
from asyncvmm import TensorSpec, blocking, tickets
from asyncvmm.testing import open_pair
from asyncvmm.tickets import FeatureItem, FeatureRequest, FeatureTransport
from asyncvmm.tickets.transport import OnFull
from tests.blocking.conftest import loop_threads
from tests.blocking.ends import SECONDS, Doing, number_of, open_both, send, until

pytestmark = pytest.mark.usefixtures("each_loop")

SPEC = {"x": TensorSpec((4,), "float32")}


def refusals(caught: pytest.ExceptionInfo[asyncvmm.DeliveryError]) -> list[tuple[Any, str]]:
    """Return who refused, and why."""
    outcome = caught.value.outcome
    assert isinstance(outcome, asyncvmm.Outcome)
    return list(outcome.refused)


# -- sending -------------------------------------------------------------------------------------


def test_an_owner_goes_there_and_its_acknowledgement_comes_back(name: str) -> None:
    """Bytes, key, metadata and outcome are those of the async twins."""
    with open_both(name) as (exporter, (consumer,)):
        ack = exporter.send({"x": torch.arange(3)}, key="k", metadata={"n": [1]}, timeout=SECONDS)
        assert (ack.key, ack.done(), ack.outcome) == ("k", False, None)
        with consumer.receive(SECONDS) as batch:
            assert batch[0].key == "k"
            assert batch.metadata == {"n": [1]}
            assert batch[0]["x"].tolist() == [0, 1, 2]
        assert ack.result(SECONDS) == asyncvmm.Outcome(released=(0,))
        assert ack.done()
        assert ack.outcome == asyncvmm.Outcome(released=(0,))
        exporter.drain(SECONDS)
        assert exporter.statistics().acknowledged == 1
        assert exporter.statistics().slots.free == 8
        assert consumer.statistics().released == 1
        assert str(exporter.explain())


def test_a_send_without_room_runs_out_of_time_and_publishes_nothing(name: str) -> None:
    """Kills the planted bug of a send that goes on after its caller was told TimeoutError."""
    with open_both(name, slots=1) as (exporter, (consumer,)):
        first = send(exporter, 1)
        for late in (0, 0.01):
            with pytest.raises(TimeoutError, match=r"room; statistics\(\)"):
                send(exporter, 2, timeout=late)
        with pytest.raises(asyncvmm.WouldBlock):
            exporter.send_nowait({"x": torch.ones(4)})
        assert exporter.statistics().waiting == 0
        assert number_of(consumer.receive(SECONDS)) == 1
        first.result(SECONDS)
        assert exporter.statistics().published == 1
        third = send(exporter, 3, timeout=0)  # what can be done without waiting is done
        assert number_of(consumer.receive(SECONDS)) == 3
        third.result(SECONDS)
        exporter.send_nowait({"x": torch.full((4,), 4.0)}, key=4)
        assert number_of(consumer.receive(SECONDS)) == 4


def test_a_reservation_is_written_in_place(name: str) -> None:
    """Published it is an owner like any other; unpublished its chunk comes back."""
    with open_both(name, slots=1) as (exporter, (consumer,)):
        with exporter.reserve(SPEC, key=7, timeout=SECONDS) as owner:
            assert (list(owner), len(owner), owner.nbytes) == (["x"], 1, 256)
            assert (owner.slot, owner.generation) == (0, 1)
            owner["x"].fill_(7.0)
            ack = owner.publish(metadata=[1])
            with pytest.raises(asyncvmm.ReleasedError):
                owner.publish()
        for full in (exporter.reserve(SPEC, timeout=0.01), exporter.reserve_nowait(SPEC)):
            with pytest.raises((TimeoutError, asyncvmm.WouldBlock)), full:
                pass
        assert number_of(consumer.receive(SECONDS)) == 7
        ack.result(SECONDS)
        with pytest.raises(KeyError), exporter.reserve(SPEC) as owner:
            raise KeyError
        assert exporter.statistics().slots.free == 1
        with pytest.raises(asyncvmm.LocalProtocolError), full, full:
            pass
        assert exporter.statistics().slots.free == 1


def test_an_acknowledgement_says_who_did_not_release(name: str) -> None:
    """DeliveryError, with the outcome; and TimeoutError while nothing is known."""
    with open_both(name) as (exporter, (consumer,)):
        ack = send(exporter, 1)
        with pytest.raises(TimeoutError, match="owner 1 to be let go of"):
            ack.result(0.01)
        with pytest.raises(TimeoutError, match="all owners"):
            exporter.drain(0.01)
        with (
            blocking.open_exporter(f"{name}-lonely", device="cpu", pool_bytes="4KiB") as lonely,
            pytest.raises(TimeoutError, match="1 attached consumers"),
        ):
            lonely.wait_attached(1, 0.01)
        consumer.receive(SECONDS)  # and drop it unread
        for _ in range(2):
            with pytest.raises(asyncvmm.DeliveryError) as caught:
                ack.result(SECONDS)
            assert refusals(caught) == [(0, "dropped unread")]


def test_a_closed_exporter_says_so(name: str) -> None:
    """An acknowledgement that nobody will give, and every method, raise ClosedError."""
    with open_both(name, close_timeout=0) as (exporter, (consumer,)):
        ack = send(exporter, 1)
        batch = consumer.receive(SECONDS)
        with pytest.warns(asyncvmm.OwnersOutstandingWarning):
            exporter.close()
        with pytest.raises(asyncvmm.ClosedError):
            ack.result()
        assert number_of(batch) == 1
    exporter.close()  # again is a no-op
    uses: list[Any] = [
        lambda: send(exporter, 1),
        lambda: exporter.send_nowait({"x": torch.ones(1)}),
        lambda: exporter.reserve(SPEC),
        lambda: exporter.reserve_nowait(SPEC),
        exporter.statistics,
        exporter.explain,
        exporter.drain,
        lambda: exporter.wait_attached(1),
    ]
    for use in uses:
        with pytest.raises(asyncvmm.ClosedError):
            use()


def test_an_opening_is_entered_once(name: str) -> None:
    """As the async ones are."""
    opening = blocking.open_exporter(name, device="cpu", pool_bytes="64KiB")
    with opening, pytest.raises(asyncvmm.LocalProtocolError), opening:
        pass


# -- receiving -----------------------------------------------------------------------------------


@pytest.mark.parametrize("competing", [False, True])
def test_a_poll_returns_each_batch_once_and_then_none(name: str, competing: bool) -> None:
    """Kills: a batch that is there and not found, found twice, or found out of order."""
    with open_both(name, competing=competing) as (exporter, (consumer,)):
        assert consumer.poll() is None
        assert consumer.poll() is None
        sent = 0
        for burst in (1, 3, 1, 4):
            acks = [send(exporter, sent + i) for i in range(burst)]
            sent += burst
            until(lambda: exporter.statistics().consumers[0].holding >= 1)
            found: list[int] = []
            while len(found) < burst:
                batch = consumer.poll()
                if batch is not None:
                    found.append(number_of(batch))
            assert found == list(range(sent - burst, sent))
            assert consumer.poll() is None
            for ack in acks:
                assert ack.result(SECONDS).complete


def test_what_a_poll_found_wanting_is_handed_over_when_it_comes(name: str) -> None:
    """So the next poll need not ask the loop's thread.

    Kills the planted bug of a wish that nobody notes.
    """
    with open_both(name) as (exporter, (consumer,)):
        assert consumer.poll() is None
        assert consumer.poll() is None  # the first one had to ask
        send(exporter, 1)
        until(lambda: bool(consumer._handed))
        assert consumer.statistics().unread == 0
        batch = consumer.poll()
        assert batch is not None
        assert number_of(batch) == 1


def test_a_competitor_takes_nothing_before_it_asks(name: str) -> None:
    """What it polled for in vain stays free to go to another that lives on.

    Kills the planted bug of a batch that counts as begun because somebody polled once.
    """
    with open_both(name, competing=True) as (exporter, (consumer,)):
        assert consumer.poll() is None
        assert consumer.poll() is None
        send(exporter, 1)
        until(lambda: consumer.statistics().unread == 1)
        assert exporter.statistics().consumers[0].untaken == 1
        batch = consumer.poll()
        assert batch is not None
        until(lambda: exporter.statistics().consumers[0].untaken == 0)
        assert number_of(batch) == 1


def test_receive_waits_as_long_as_it_is_told(name: str) -> None:
    """TimeoutError says how long; a batch that is there is had with no time at all."""
    with open_both(name) as (exporter, (consumer,)):
        for late in (0, 0.01):
            with pytest.raises(TimeoutError, match=f"within {late} s"):
                consumer.receive(late)
        receiving = Doing(consumer.receive)
        until(lambda: consumer.statistics().waiting == 1)
        send(exporter, 1)
        assert number_of(receiving.value()) == 1
        send(exporter, 2)
        until(lambda: consumer.statistics().unread == 1)
        assert number_of(consumer.receive(0)) == 2


def test_who_waits_gets_the_batch_that_another_thread_polled_for(name: str) -> None:
    """Kills the planted bug of a batch that is kept for a poll that may never come again."""
    with open_both(name) as (exporter, (consumer,)):
        receiving = Doing(consumer.receive)
        until(lambda: consumer.statistics().waiting == 1)
        assert consumer.poll() is None
        assert consumer.poll() is None
        send(exporter, 1)
        assert number_of(receiving.value()) == 1


def test_iteration_ends_with_the_exporters_goodbye(name: str) -> None:
    """What was sent before comes first; after that polling and receiving raise EndOfStream."""
    with blocking.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter:
        consumer = blocking.connect(name, device="cpu", rank=0).__enter__()
        for number in range(3):
            send(exporter, number)
        numbers = Doing(lambda: [number_of(batch) for batch in consumer])
    assert numbers.value() == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(asyncvmm.EndOfStream):
            consumer.poll()
        with pytest.raises(asyncvmm.EndOfStream):
            consumer.receive(SECONDS)
    assert list(consumer) == []
    consumer.close()


@pytest.mark.parametrize("orderly", [True, False])
def test_a_poll_learns_of_the_end_with_nobody_waiting(name: str, orderly: bool) -> None:
    """Kills the planted bug of an end that is told to receivers only: the loop polls for ever."""

    def fail() -> None:
        with blocking.open_exporter(name, device="cpu", pool_bytes="64KiB"):
            consumers.append(blocking.connect(name, device="cpu", rank=0).__enter__())
            assert consumers[0].poll() is None
            assert consumers[0].poll() is None
            if not orderly:
                raise ZeroDivisionError

    def poll() -> bool:
        return bool(consumers[0].poll())

    consumers: list[blocking.Consumer] = []
    with nullcontext() if orderly else pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(asyncvmm.EndOfStream if orderly else asyncvmm.PeerLostError):
        until(poll)
    consumers[0].close()


def test_a_closed_consumer_says_so(name: str) -> None:
    """Also to those who waited when it was closed."""
    with open_both(name) as (_, (consumer,)):
        waiting = [Doing(consumer.receive) for _ in range(2)]
        until(lambda: consumer.statistics().waiting == 2)
        consumer.close()
        for each in waiting:
            with pytest.raises(asyncvmm.ClosedError):
                each.value()
        consumer.close()
        for use in (consumer.poll, consumer.receive, consumer.statistics, consumer.__next__):
            with pytest.raises(asyncvmm.ClosedError):
                use()


def test_a_consumer_that_leaves_refuses_what_it_was_handed_and_did_not_read(name: str) -> None:
    """Kills the planted bug of a batch that stays in the queue of a closed consumer."""
    with open_both(name) as (exporter, (consumer,)):
        assert consumer.poll() is None
        assert consumer.poll() is None
        handed, unread = send(exporter, 1), send(exporter, 2)
        until(lambda: bool(consumer._handed))
        consumer.close()
        for ack in (handed, unread):
            with pytest.raises(asyncvmm.DeliveryError) as caught:
                ack.result(SECONDS)
            ((_, reason),) = refusals(caught)
            assert "unread" in reason or "without reading" in reason


def test_views_outlive_their_consumer_and_its_thread(name: str) -> None:
    """The slot goes back with the last view, from whichever thread (inv. 14)."""
    with open_both(name) as (exporter, (consumer,)):
        ack = send(exporter, 1)
        with consumer.receive(SECONDS) as batch:
            view = batch[0]["x"][1:]
        consumer.close()
        assert not ack.done()
        assert view.tolist() == [1.0] * 3
        del view, batch
        assert ack.result(SECONDS).complete


# -- errors and ends -----------------------------------------------------------------------------


def test_an_exception_in_a_consumers_block_releases_what_it_holds(name: str) -> None:
    """And passes through."""
    with open_both(name) as (exporter, (consumer,)):
        ack = send(exporter, 1)
        held: list[asyncvmm.Batch] = []

        def fail() -> None:
            with consumer:
                held.append(consumer.receive(SECONDS))
                held[0][0]["x"].sum()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert ack.result(SECONDS).complete


def test_an_exception_in_an_exporters_block_hangs_up_at_once(name: str) -> None:
    """Its consumers are told that it was lost, and not that all is well."""
    consumers: list[blocking.Consumer] = []

    def fail() -> None:
        with blocking.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter:
            consumers.append(blocking.connect(name, device="cpu", rank=0).__enter__())
            send(exporter, 1)
            held.append(consumers[0].receive(SECONDS))
            raise ZeroDivisionError

    held: list[asyncvmm.Batch] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    (consumer,), (batch,) = consumers, held
    with pytest.raises(asyncvmm.PeerLostError):
        consumer.receive(SECONDS)
    with pytest.raises(asyncvmm.PeerLostError):
        consumer.poll()
    assert number_of(batch) == 1  # what it holds stays readable (inv. 15)
    consumer.close()


def test_who_cannot_be_opened_leaves_no_thread(name: str) -> None:
    """Nobody under the name, the name taken, nobody in time: an error, and nothing else."""
    with pytest.raises(asyncvmm.ExporterNotFoundError), blocking.connect(name, rank=0):
        pass
    with pytest.raises(TimeoutError), blocking.connect(name, rank=0, wait=True, timeout=0.02):
        pass
    assert loop_threads() == []
    with open_both(name), pytest.raises(asyncvmm.NameInUseError):
        blocking.open_exporter(name, device="cpu", pool_bytes="64KiB").__enter__()


@pytest.mark.parametrize("bad", [-1, math.nan, True, "1"])
def test_a_bad_time_is_refused_before_anything_is_done(name: str, bad: Any) -> None:
    """Kills the planted bug of a limit that is looked at once something was sent."""
    with pytest.raises(asyncvmm.ArgumentError, match="is no time"):
        blocking.connect(name, rank=0, timeout=bad)
    with open_both(name) as (exporter, (consumer,)):
        ack = send(exporter, 1)
        uses: list[Any] = [
            lambda: consumer.receive(bad),
            lambda: send(exporter, 2, timeout=bad),
            lambda: exporter.reserve(SPEC, timeout=bad),
            lambda: ack.result(bad),
            lambda: exporter.drain(bad),
            lambda: exporter.wait_attached(1, bad),
        ]
        for use in uses:
            with pytest.raises(asyncvmm.ArgumentError, match="is no time"):
                use()
        assert exporter.statistics().published == 1
        assert number_of(consumer.receive(math.inf)) == 1


def test_arguments_are_those_of_the_async_twins(name: str) -> None:
    """Bad ones are refused where the async ones refuse them."""
    with pytest.raises(asyncvmm.ArgumentError):
        blocking.open_exporter(name, pool_bytes="many")
    opening: Any = blocking.open_exporter
    with pytest.raises(TypeError):
        opening(name, colour="red")
    with pytest.raises(asyncvmm.ArgumentError):
        blocking.connect(name, rank=-1)
    with open_both(name) as (exporter, _):
        wrong: Any = "text"
        with pytest.raises(asyncvmm.InvalidTensorError):
            exporter.send({"x": wrong})
        with pytest.raises(asyncvmm.RankError):
            exporter.send({"x": torch.ones(1)}, to=9)


# -- requests ------------------------------------------------------------------------------------


async def _prepare(
    exporter: asyncvmm.Exporter, requests: list[FeatureRequest], on_full: OnFull
) -> None:
    await FeatureTransport(exporter, on_full=on_full).prepare_for_dispatch(requests)


def test_requests_are_restored_and_abandoned_by_a_plain_loop(name: str) -> None:
    """Packed features, a single, and a host copy; twice is a no-op.

    Kills: a field that keeps its ticket, and an owner that an aborted request leaves out.
    """
    with open_both(name, pool_bytes="4KiB") as (exporter, (consumer,)):
        made = [
            FeatureRequest([FeatureItem("image", torch.full((n,), n)) for n in counts])
            for counts in ((3, 4), (5,), (2000,))
        ]
        exporter._run(lambda: _prepare(exporter._exporter, made, "host"))
        requests = pickle.loads(pickle.dumps(made))
        kinds = [[type(item.feature) for item in request.items] for request in requests]
        assert kinds == [[asyncvmm.Ticket] * 2, [asyncvmm.Ticket], [torch.Tensor]]
        for _ in range(2):
            blocking.restore_features(consumer, requests[::2], timeout=SECONDS)
            blocking.abandon_features(consumer, requests)
        assert [item.feature.tolist() for item in requests[0].items] == [[3] * 3, [4] * 4]
        assert requests[2].items[0].feature.tolist() == [2000] * 2000
        exporter.drain(SECONDS)
        assert consumer.statistics().released == 1
        with pytest.raises(asyncvmm.TicketError):
            blocking.restore_features(consumer, requests, timeout=SECONDS)
    with pytest.raises(asyncvmm.ClosedError):
        blocking.restore_features(consumer, requests)


async def test_the_two_kinds_of_consumers_are_not_taken_for_each_other() -> None:
    """ArgumentError says which function is for which, and no ticket is redeemed for nothing.

    Kills: an owner that is redeemed and released before the wrong kind of consumer is noticed.
    """
    async with open_pair() as pair:
        request = FeatureRequest([FeatureItem("image", torch.ones(3))])
        await FeatureTransport(pair.exporter).prepare_for_dispatch([request])
        with pytest.raises(asyncvmm.ArgumentError, match=r"asyncvmm\.tickets"):
            blocking.restore_features(pair.consumer, [request])  # type: ignore[arg-type]  # on purpose
        with pytest.raises(asyncvmm.ArgumentError, match=r"asyncvmm\.tickets"):
            blocking.abandon_features(pair.consumer, [request])  # type: ignore[arg-type]  # on purpose
        other: Any = blocking.Consumer.__new__(blocking.Consumer)
        with pytest.raises(asyncvmm.ArgumentError, match=r"asyncvmm\.blocking"):
            await tickets.restore_features(other, [request])
        with pytest.raises(asyncvmm.ArgumentError, match=r"asyncvmm\.blocking"):
            tickets.abandon_features(other, [request])
        await tickets.restore_features(pair.consumer, [request])
        assert torch.equal(request.items[0].feature, torch.ones(3))
