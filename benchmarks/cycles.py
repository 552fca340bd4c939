"""Whether memory stays flat over many handoffs: publish, acquire, release, and again under another key."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import kvbridge
from benchmarks.consumer import Consumer, running_consumer
from benchmarks.processes import RunningBridge, private_resident_bytes, running_bridge
from benchmarks.sizes import publish
from benchmarks.workload import MIB, Tensors, token_ids, warm_tensors

PAYLOAD_BYTES = MIB
ARENA_BYTES = 64 * MIB
SETTLING_CYCLES_MAX = 1000
"""Cycles before the first look: by then every thread has run and every cache has had its first use."""
EMPTYING_SECONDS_MAX = 10.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The private resident memory of one process."""

    settled_bytes: int
    """After the settling cycles."""
    end_bytes: int
    """After all cycles."""
    ratio: float
    """The end over the settled value; 1 is flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleFigures:
    """What many handoffs have left behind."""

    cycles: int
    """Handoffs in all."""
    settling_cycles: int
    """Handoffs before the first look at memory."""
    payload_bytes: int
    """Bytes of tensors in each."""
    seconds_per_cycle: float
    """Mean time of one handoff, with the two processes taking turns."""
    bridge: Growth
    """Memory of the bridge."""
    producer: Growth
    """Memory of the producer."""
    consumer: Growth
    """Memory of the consumer."""
    arena_bytes_in_use: int
    """Bytes of the arena that are not free after everything was released."""


def measure_cycles(cycles: int) -> CycleFigures:
    """Hand over `cycles` payloads, at least two, with processes of their own for bridge and consumer."""
    with (
        running_bridge(ARENA_BYTES) as node,
        kvbridge.connect(node.target) as bridge,
        running_consumer(node.target) as consumer,
    ):
        handing = _Handing(bridge, consumer)
        settling_cycles = min(SETTLING_CYCLES_MAX, max(cycles // 10, 1))
        handing.run(range(settling_cycles))
        pids = {"bridge": node.pid, "producer": os.getpid(), "consumer": consumer.pid}
        settled = {name: private_resident_bytes(pid) for name, pid in pids.items()}
        started_at = time.perf_counter()
        handing.run(range(settling_cycles, cycles))
        seconds = time.perf_counter() - started_at
        growth = {name: _growth(settled[name], private_resident_bytes(pid)) for name, pid in pids.items()}
        return CycleFigures(
            cycles=cycles,
            settling_cycles=settling_cycles,
            payload_bytes=PAYLOAD_BYTES,
            seconds_per_cycle=seconds / (cycles - settling_cycles),
            arena_bytes_in_use=_bytes_left_in_use(node),
            **growth,
        )


class _Handing:
    """One handoff after the other, each under a key of its own."""

    def __init__(self, bridge: kvbridge.Bridge, consumer: Consumer) -> None:
        self._bridge = bridge
        self._consumer = consumer
        self._tensors: Tensors = warm_tensors(PAYLOAD_BYTES, seed=0)
        self._ids = token_ids(PAYLOAD_BYTES)

    def run(self, numbers: range) -> None:
        for number in numbers:
            key = f"cycle/{number}"
            publication = publish(self._bridge, key, self._tensors, self._ids, hold=True)
            self._consumer.take(key, PAYLOAD_BYTES)
            publication.release()


def _growth(settled_bytes: int, end_bytes: int) -> Growth:
    return Growth(settled_bytes=settled_bytes, end_bytes=end_bytes, ratio=end_bytes / settled_bytes)


def _bytes_left_in_use(node: RunningBridge) -> int:
    """Return what is still in use once the clients have had time to return their last references."""
    ends_at = time.monotonic() + EMPTYING_SECONDS_MAX
    while True:
        arena = node.arena()
        in_use_bytes = arena.size_bytes - arena.free_bytes
        if not in_use_bytes or time.monotonic() >= ends_at:
            return in_use_bytes
        time.sleep(_POLL_SECONDS)
