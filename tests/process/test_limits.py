"""At the open-file limit, and as another user."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import asyncvmm
from asyncvmm.testing import Process, ProcessRaisedError
from tests.patience import PROMPTLY
from tests.process import steps
from tests.process.harness import Peers, until
from tests.process.patterns import features, note

NOBODY = 65534


async def flows(exporter: asyncvmm.Exporter, consumer: Process, owner: int = 1) -> None:
    """Show that a batch goes through."""
    ack = await exporter.send(features(owner, 0, 500), key=owner, metadata=note(owner, 0, 500))
    assert await consumer.call(steps.take, 1) == [owner]
    await consumer.call(steps.give_back)
    assert (await ack).complete


# -- the consumer at its limit -------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_a_consumer_at_its_limit_is_told_the_limit_and_can_connect_later(
    peers: Peers, left: int
) -> None:
    """No descriptor left for its socket, for the pidfd, or for the pool (field report 33).

    Kills: a lost descriptor that is noticed as something else, or not at all, and descriptors
    that stay open after the error.
    """
    async with asyncvmm.open_exporter("pool", device="cpu", pool_bytes="64KiB") as exporter:
        consumer = peers.start()
        limit = await consumer.call(steps.use_up_descriptors, left)
        before = consumer.counters().descriptors
        with pytest.raises(ProcessRaisedError) as caught:
            await consumer.call(steps.connect, "pool", 0)
        assert caught.value.kind == "DescriptorLimitError"
        assert caught.value.facts == {"limit": limit, "used": limit}
        assert f"{limit} of {limit}" in caught.value.text
        assert consumer.counters().descriptors == before
        await until(lambda: not exporter.statistics().consumers)
        await consumer.call(steps.give_descriptors_back)
        await consumer.call(steps.connect, "pool", 0)
        await flows(exporter, consumer)


async def test_three_descriptors_are_enough_for_a_pool_of_any_number_of_segments(
    peers: Peers,
) -> None:
    """Socket, pidfd, and one descriptor at a time while mapping; none per batch (report 33).

    Kills: descriptors of segments that stay open once mapped, and one more per batch.
    """
    options: dict[str, Any] = {"pool_bytes": 4096, "max_pool_bytes": 6 * 4096, "slots": 8}
    async with asyncvmm.open_exporter("pool", device="cpu", **options) as exporter:
        loans = []
        for _ in range(6):
            loan = exporter.reserve({"x": asyncvmm.TensorSpec((4096,), "uint8")})
            await loan.__aenter__()
            loans.append(loan)
        assert exporter.statistics().segments == 6
        for loan in loans:
            await loan.__aexit__(None, None, None)
        consumer = peers.start()
        await consumer.call(steps.use_up_descriptors, 3)
        await consumer.call(steps.connect, "pool", 0)
        assert consumer.counters().mappings == 6
        before = consumer.counters().descriptors
        for owner in range(20):
            await flows(exporter, consumer, owner)
        assert consumer.counters().descriptors == before
        await consumer.call(steps.leave)


# -- the exporter at its limit -------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_an_exporter_at_its_limit_says_so_and_goes_on(peers: Peers, left: int) -> None:
    """Those who are attached go on; a newcomer is told the numbers, and may come in later.

    With none left it cannot accept, with one it cannot watch over the newcomer's life, with two it
    cannot duplicate the pool's.  Kills: a newcomer that waits, or is hung up on, without a reason;
    a rank that stays taken; an exporter that never accepts again, whose loop stands still, or
    that logs each refusal.
    """
    host = peers.start()
    await host.call(steps.open_exporter, "pool", 2)
    async with asyncvmm.connect("pool", device="cpu", rank=0) as attached:
        limit = await host.call(steps.use_up_descriptors, left)
        for _ in range(3):
            async with asyncio.timeout(PROMPTLY):
                with pytest.raises(asyncvmm.ExporterLimitError, match=f"of {limit} open") as caught:
                    await asyncvmm.connect("pool", device="cpu", rank=1, wait=True).__aenter__()
            error = caught.value
            assert (error.reason, error.limit) == ("descriptor_limit", limit)
            assert 0 <= error.limit - error.used <= left
        await until(lambda: len(host.printed) > 0)
        if left < 2:
            assert len(host.printed) == 1
        else:
            await until(lambda: any("EMFILE" in line for line in host.printed))
        await host.call(steps.send, [1])
        (await attached.receive()).release()
        await host.call(steps.give_descriptors_back)
        async with asyncvmm.connect("pool", device="cpu", rank=1) as second:
            (await second.receive()).release()
    await host.call(steps.leave)


async def test_who_may_reconnect_waits_for_an_exporter_at_its_limit(peers: Peers) -> None:
    """Kills: a consumer that gives up for a limit that is met for a moment."""
    host = peers.start()
    await host.call(steps.open_exporter, "pool", 1)
    async with asyncvmm.connect("pool", device="cpu", rank=0, reconnect=True) as consumer:
        await host.call(steps.leave)
        await host.call(steps.open_exporter, "pool", 1)
        await host.call(steps.use_up_descriptors, 0)
        receiving = asyncio.ensure_future(consumer.receive())
        await until(lambda: len(host.printed) > 0)
        await host.call(steps.give_descriptors_back)
        await host.call(steps.send, [1])
        async with asyncio.timeout(PROMPTLY):
            (await receiving).release()
    await host.call(steps.leave)


# -- another user --------------------------------------------------------------------------------

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def shared_name(kind: str, folder: Path) -> str:
    """Return a name that other users can reach."""
    if kind == "abstract":
        return f"@asyncvmm-test-{os.getpid()}"
    folder.chmod(0o755)
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    return str(shared / "pool")


@needs_root
@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_another_user_is_refused_and_costs_nothing(
    peers: Peers, folder: Path, kind: str
) -> None:
    """The kernel's word decides, before any descriptor is sent (field report 54).

    Kills: a node that others may open, an identity taken from the hello, a refused connection
    that still takes the rank.
    """
    name = shared_name(kind, folder)
    async with asyncvmm.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter:
        stranger, friend = peers.start(), peers.start()
        await stranger.call(steps.become, NOBODY, NOBODY)
        for _ in range(3):
            with pytest.raises(ProcessRaisedError) as caught:
                await stranger.call(steps.connect, name, 0)
            assert caught.value.kind == "AccessDeniedError"
        assert f"user {NOBODY}" in caught.value.text
        assert caught.value.facts.get("uid") == (NOBODY if kind == "abstract" else -1)
        assert exporter.statistics().consumers == ()
        await friend.call(steps.connect, name, 0)
        await flows(exporter, friend)


@needs_root
async def test_the_user_is_the_one_that_a_process_runs_as(peers: Peers, folder: Path) -> None:
    """Both ends have changed users, as a server started by root does (field report 54).

    Kills: an exporter that knows itself by another user than the kernel tells its peers.
    """
    name = shared_name("abstract", folder)
    ends = host, consumer = peers.start(), peers.start()
    for end in ends:
        await end.call(steps.become_effectively, NOBODY)
    await host.call(steps.open_exporter, name, 1)
    await consumer.call(steps.connect, name, 0)
    with pytest.raises(asyncvmm.AccessDeniedError):
        async with asyncvmm.connect(name, device="cpu", rank=0, allow_uids=[NOBODY]):
            pass
    for end in reversed(ends):
        await end.call(steps.leave)


@needs_root
@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_another_user_comes_in_where_it_is_allowed(
    peers: Peers, folder: Path, kind: str
) -> None:
    """By number or by group, under any umask, and then no other user does (field report 54).

    Kills: a node that the allowed users cannot open, and one that lets in whoever can open it.
    """
    name = shared_name(kind, folder)
    access: dict[str, Any] = {"allow_uids": [NOBODY - 1], "allow_gids": [NOBODY - 2]}
    host = peers.start()
    await host.call(steps.set_umask, 0o077)
    await host.call(steps.open_exporter, name, 1, access)
    for owner, (uid, gid) in enumerate(((NOBODY - 1, NOBODY), (NOBODY, NOBODY - 2))):
        friend = peers.start()
        await friend.call(steps.become, uid, gid)
        await friend.call(steps.connect, name, 0)
        sending = host.begin(steps.send, [owner], 0, 1000, True)
        assert await friend.call(steps.take, 1) == [owner]
        await friend.call(steps.give_back)
        await sending
        await friend.call(steps.leave)
    stranger = peers.start()
    await stranger.call(steps.become, NOBODY, NOBODY)
    with pytest.raises(ProcessRaisedError) as caught:
        await stranger.call(steps.connect, name, 0)
    assert (caught.value.kind, caught.value.facts["uid"]) == ("AccessDeniedError", NOBODY)
    assert await host.call(steps.consumers) == []
    await host.call(steps.leave)
    shared = folder / "shared"
    assert kind == "abstract" or os.listdir(shared) == []


@needs_root
@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_an_exporter_of_another_user_is_told_nothing(
    peers: Peers, folder: Path, kind: str
) -> None:
    """Whoever takes the name first could pass for the exporter, and be told the secret.

    Kills: a hello, and with it the secret, that is said before the kernel's word for the user was
    looked at, and a list of users that is not asked.
    """
    name = shared_name(kind, folder)
    options: dict[str, Any] = {"device": "cpu", "rank": 0, "secret": "sesame"}
    stranger, host = peers.start(), peers.start()
    await stranger.call(steps.become, NOBODY, NOBODY)
    await stranger.call(steps.eavesdrop, name.replace("@", "\0"))
    for _ in range(2):
        with pytest.raises(asyncvmm.AccessDeniedError, match=f"allow_uids=.{NOBODY}") as caught:
            await asyncvmm.connect(name, **options).__aenter__()
        assert caught.value.uid == NOBODY
        assert NOBODY not in caught.value.allowed
    assert await stranger.call(steps.heard, 2) == [b"", b""]
    await host.call(steps.become, NOBODY, NOBODY)
    name += "-2"
    await host.call(steps.open_exporter, name, 1, {"allow_uids": [0], "secret": "sesame"})
    async with asyncvmm.connect(name, allow_uids=[NOBODY], **options) as consumer:
        await host.call(steps.send, [1])
        (await consumer.receive()).release()
    await host.call(steps.leave)


@needs_root
async def test_both_ends_may_be_confined_to_namespaces_of_their_own(
    peers: Peers, folder: Path
) -> None:
    """Without capabilities, not to be traced, each in a pid namespace (field report 32).

    Descriptors come by the socket alone, so nothing of this matters; a death is seen all the same.
    Kills: a liveness that goes by pid, which is 0 from another namespace.
    """
    name = shared_name("path", folder)
    host, consumer, successor = (peers.start(namespace=True) for _ in range(3))
    for peer in (host, consumer, successor):
        await peer.call(steps.confine, NOBODY, NOBODY)
    await host.call(steps.open_exporter, name, 1)
    await consumer.call(steps.connect, name, 0)
    for owner in range(3):
        sending = host.begin(steps.send, [owner], 0, 1000, True)
        assert await consumer.call(steps.take, 1) == [owner]
        await consumer.call(steps.give_back)
        await sending
    assert await host.call(steps.consumers) == [[0, 0, "open"]]
    sending = host.begin(steps.send, [7], 0, 1000, True)
    await consumer.call(steps.take, 1)
    await consumer.killed()
    with pytest.raises(ProcessRaisedError, match=r"DeliveryError.*lost: \[0\]"):
        await sending
    await successor.call(steps.connect, name, 0)
    await host.killed()
    with pytest.raises(ProcessRaisedError, match="PeerLostError"):
        await successor.call(steps.take, 1)
    os.unlink(name)


def test_no_descriptor_is_taken_out_of_another_process() -> None:
    """Neither by name nor by number of the system call (field report 32)."""
    package = Path(asyncvmm.__file__).parent
    for file in package.rglob("*.py"):
        text = file.read_text()
        assert "getfd" not in text.replace("F_GETFD", "")
        assert "syscall" not in text


@needs_root
async def test_another_users_name_cannot_be_taken(peers: Peers, folder: Path) -> None:
    """Kills: a stale look at a node of another user that ends in its removal (report 6)."""
    name = shared_name("path", folder)
    async with asyncvmm.open_exporter(name, device="cpu", pool_bytes="64KiB") as exporter:
        stranger, friend = peers.start(), peers.start()
        await stranger.call(steps.become, NOBODY, NOBODY)
        with pytest.raises(ProcessRaisedError) as caught:
            await stranger.call(steps.open_exporter, name, 1)
        assert caught.value.kind in {"AccessDeniedError", "NameInUseError"}
        await friend.call(steps.connect, name, 0)
        await flows(exporter, friend)


async def test_a_secret_is_asked_for_and_never_told(peers: Peers) -> None:
    """Kills: a wrong secret that is let in, and one that shows in an error or a log."""
    options: dict[str, Any] = {"pool_bytes": "64KiB", "secret": "open sesame"}
    async with asyncvmm.open_exporter("pool", device="cpu", **options) as exporter:
        consumer = peers.start()
        for secret in ("", "open sesam", "open sesame!"):
            with pytest.raises(ProcessRaisedError) as caught:
                await consumer.call(steps.connect, "pool", 0, {"secret": secret})
            assert caught.value.kind == "AccessDeniedError"
            assert "sesame" not in caught.value.text
        await consumer.call(steps.connect, "pool", 0, {"secret": "open sesame"})
        await flows(exporter, consumer)
