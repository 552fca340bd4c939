"""Whether memory stays flat over many handoffs: publish, acquire, release, and again under another key."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import pairwise

import kvbridge
from benchmarks.consumer import Consumer, running_consumer
from benchmarks.processes import RunningBridge, private_resident_bytes, running_bridge
from benchmarks.sizes import publish
from benchmarks.workload import MIB, Tensors, token_ids, warm_tensors

PAYLOAD_BYTES = MIB
ARENA_BYTES = 256 * MIB
"""Room for 64 slots, because clients return what they release in the background, some cycles later."""
REMEMBERED_MAX = 512
"""What the bridge remembers of handoffs and ended payloads at most: full before the first look, unlike the defaults."""
MEMORY_FLAGS = tuple(
    word
    for name in (
        "tombstones",
        "answers-remembered",
        "journal-records",
        "provenance-payloads",
        "provenance-handoffs",
    )
    for word in (f"--{name}-max", str(REMEMBERED_MAX))
)
PAYLOADS_MAX = 16
"""Payloads that may wait for their releases when a new batch of cycles begins."""
CYCLES_BETWEEN_WAITS = 32
SETTLING_CYCLES_MAX = 1000
"""Cycles before the first look: by then every thread has run and every cache has had its first use."""
EMPTYING_SECONDS_MAX = 10.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The private resident memory of one process."""

    settled_bytes: int
    """After the settling cycles."""
    filled_bytes: int | None
    """Once the bridge remembers as many ended payloads as it may; absent if there were too few cycles for that."""
    end_bytes: int
    """After all cycles."""
    ratio: float
    """The end over the settled value; 1 is flat."""
    filled_ratio: float | None
    """The end over the filled value: what grows here grows without a limit; absent as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleFigures:
    """What many handoffs have left behind."""

    cycles: int
    """Handoffs in all."""
    settling_cycles: int
    """Handoffs before the first look at memory."""
    filling_cycles: int | None
    """Handoffs before the second look, which is when memories that have a limit are full; absent if there was none."""
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
        running_bridge(ARENA_BYTES, *MEMORY_FLAGS) as node,
        kvbridge.connect(node.target) as bridge,
        running_consumer(node.target) as consumer,
    ):
        settling_cycles = min(SETTLING_CYCLES_MAX, max(cycles // 10, 1))
        filling_cycles = node.limit("tombstones_max") + settling_cycles
        looks = [settling_cycles, *([filling_cycles] if filling_cycles < cycles else []), cycles]
        started_at = time.perf_counter()
        resident_bytes = _look_after(
            looks,
            _Handing(node, bridge, consumer),
            {"bridge": node.pid, "producer": os.getpid(), "consumer": consumer.pid},
        )
        seconds = time.perf_counter() - started_at
        return CycleFigures(
            cycles=cycles,
            settling_cycles=settling_cycles,
            filling_cycles=filling_cycles if filling_cycles < cycles else None,
            payload_bytes=PAYLOAD_BYTES,
            seconds_per_cycle=seconds / cycles,
            arena_bytes_in_use=_bytes_left_in_use(node),
            **{name: _growth(found) for name, found in resident_bytes.items()},
        )


class _Handing:
    """One handoff after the other, each under a key of its own."""

    def __init__(self, node: RunningBridge, bridge: kvbridge.Bridge, consumer: Consumer) -> None:
        self._node = node
        self._bridge = bridge
        self._consumer = consumer
        self._tensors: Tensors = warm_tensors(PAYLOAD_BYTES, seed=0)
        self._ids = token_ids(PAYLOAD_BYTES)

    def run(self, numbers: range) -> None:
        for number in numbers:
            if number % CYCLES_BETWEEN_WAITS == 0:
                self._node.wait_for_releases(PAYLOADS_MAX)
            key = f"cycle/{number}"
            publication = publish(self._bridge, key, self._tensors, self._ids, hold=True)
            self._consumer.take(key, PAYLOAD_BYTES)
            publication.release()


def _look_after(looks: list[int], handing: _Handing, pids: dict[str, int]) -> dict[str, list[int]]:
    """Return the memory of each process after each of these numbers of cycles."""
    found: dict[str, list[int]] = {name: [] for name in pids}
    for done, look in pairwise([0, *looks]):
        handing.run(range(done, look))
        for name, pid in pids.items():
            found[name].append(private_resident_bytes(pid))
    return found


def _growth(found_bytes: list[int]) -> Growth:
    settled_bytes, *filled, end_bytes = found_bytes
    filled_bytes = filled[0] if filled else None
    return Growth(
        settled_bytes=settled_bytes,
        filled_bytes=filled_bytes,
        end_bytes=end_bytes,
        ratio=end_bytes / settled_bytes,
        filled_ratio=None if filled_bytes is None else end_bytes / filled_bytes,
    )


def _bytes_left_in_use(node: RunningBridge) -> int:
    """Return what is still in use once the clients have had time to return their last references."""
    ends_at = time.monotonic() + EMPTYING_SECONDS_MAX
    while True:
        arena = node.arena()
        in_use_bytes = arena.size_bytes - arena.free_bytes
        if not in_use_bytes or time.monotonic() >= ends_at:
            return in_use_bytes
        time.sleep(_POLL_SECONDS)
