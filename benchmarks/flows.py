"""The producer's side of the workloads: the only code between two time stamps."""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.contents import CHECKED
from benchmarks.transports.base import Producer

WAITED = 1e-3
"""Seconds.  A hand-off that takes longer than this was held back by its transport."""


@dataclass
class Flow:
    """What one stretch of hand-offs took, in seconds."""

    count: int = 0
    elapsed: float = 0.0
    latencies: array[float] = field(default_factory=lambda: array("d"))
    """From the call that hands over until its memory may be used again."""
    settled: array[float] = field(default_factory=lambda: array("d"))
    """When that was (CLOCK_MONOTONIC), for comparison with the consumer's stamps."""
    waits: int = 0
    longest_wait: float = 0.0
    device_peak: int = 0
    """Bytes in use on the producer's GPU, by everybody, when most was out."""


async def stream(
    producer: Producer, first: int, depth: int, *, seconds: float = 0.0, count: int = 0
) -> Flow:
    """Hand over for some time or up to ``count``, with at most ``depth`` in flight.

    The oldest is awaited first, so its latency is that of all before it, too.
    """
    if producer.together > 1 and depth > 1:
        return await _stream_together(producer, first, depth, seconds=seconds, count=count)
    flow = Flow()
    clock = time.perf_counter
    pending: deque[tuple[float, Any]] = deque()
    latencies, settled = flow.latencies, flow.settled
    number = first
    last = first + count if count else 0
    begin = now = clock()
    end = begin + seconds
    while number < last if last else now < end:
        if len(pending) == depth:
            started, ticket = pending.popleft()
            await producer.settled(ticket)
            now = clock()
            latencies.append(now - started)
            settled.append(now)
        started = clock()
        pending.append((started, await producer.hand_over(number)))
        number += 1
        if depth > len(pending):
            now = clock()
    await _settle(producer, pending, 0, flow)
    flow.elapsed = clock() - begin
    flow.count = number - first
    return flow


async def _stream_together(
    producer: Producer, first: int, depth: int, *, seconds: float, count: int
) -> Flow:
    """Do the same for a producer that hands over several in one call, once so many fit."""
    flow = Flow()
    clock = time.perf_counter
    pending: deque[tuple[float, Any]] = deque()
    number = first
    begin = now = clock()
    while number < first + count if count else now < begin + seconds:
        several = min(producer.together, depth)
        if count:
            several = min(several, first + count - number)
        await _settle(producer, pending, depth - several, flow)
        now = clock()
        for ticket in await producer.hand_over_all(range(number, number + several)):
            pending.append((now, ticket))
        number += several
    await _settle(producer, pending, 0, flow)
    flow.elapsed = clock() - begin
    flow.count = number - first
    return flow


async def _settle(
    producer: Producer, pending: deque[tuple[float, Any]], most: int, flow: Flow
) -> None:
    """Await the oldest until at most so many are in flight."""
    while len(pending) > most:
        started, ticket = pending.popleft()
        await producer.settled(ticket)
        now = time.perf_counter()
        flow.latencies.append(now - started)
        flow.settled.append(now)


async def bursts(producer: Producer, first: int, burst: int, *, seconds: float) -> Flow:
    """Hand over bursts as fast as the transport takes them, then wait for the last of each."""
    flow = Flow()
    clock = time.perf_counter
    begin = clock()
    number = first
    while number == first or clock() - begin < seconds:
        tickets = []
        for _ in range(burst):
            started = clock()
            tickets.append((started, await producer.hand_over(number)))
            waited = clock() - started
            flow.waits += waited > WAITED
            flow.longest_wait = max(flow.longest_wait, waited)
            number += 1
        if producer.setting.on_gpu:
            free, total = torch.cuda.mem_get_info(producer.setting.device)
            flow.device_peak = max(flow.device_peak, total - free)
        for started, ticket in tickets:
            await producer.settled(ticket)
            flow.latencies.append(clock() - started)
    flow.elapsed = clock() - begin
    flow.count = number - first
    return flow


async def check(producer: Producer, first: int, depth: int, count: int) -> Flow:
    """Hand over checked payloads by the same code as timed ones."""
    return await stream(producer, first | CHECKED, depth, count=count)
