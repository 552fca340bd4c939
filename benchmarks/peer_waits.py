"""Measures who waits for what between two nodes: `python -m benchmarks.peer_waits`.

How long the first byte takes over a link that has been used before, and how many bytes cross the network when several
consumers ask for one payload at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.peers import PULL_SECONDS_MAX, TRANSPORTS
from benchmarks.processes import running_bridge
from benchmarks.timing import percentile
from benchmarks.workload import FALLBACK_TEXT, GEOMETRY, LAYERS, MIB, MODEL, slot_bytes_of, token_ids
from kvbridge import Bridge, connect
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.link.grpc_peer import GrpcPeer
from kvbridge.link.port import Opened

CONSUMERS = 8
CROWD_BYTES = 64 * MIB
FIRST_BYTES = MIB
REPETITIONS = 50
_OWNER = "owner"
_SECONDS_MAX = 10.0
_PULLED = re.compile(r'^kvbridge_payload_bytes_total{direction="pulled"} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """An owner, and a node that pulls from it."""

    owner_target: str
    """Where the owner takes calls."""
    puller_target: str
    """Where consumers find the other node."""
    metrics_port: int
    """Where that shows what it has pulled."""
    there: Bridge
    """The owner, for producers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status, which says nothing about targets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_waits", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [measure(transport, options.repetitions) for transport in TRANSPORTS]
    print(json.dumps(rows) if options.json else _table(rows))
    return 0


def measure(transport: str, repetitions: int) -> dict[str, Any]:
    """Return the figures of one way that bytes can take."""
    with ExitStack() as stack:
        nodes = _two_nodes(stack, transport)
        seconds = asyncio.run(_first_bytes(nodes, _publish(nodes.there, "first", FIRST_BYTES), repetitions))
        before = _pulled_bytes(nodes)
        crowd_seconds = _crowd(stack, nodes, _publish(nodes.there, "crowd", CROWD_BYTES))
        return {
            "transport": transport,
            "first_byte_p50_seconds": median(seconds),
            "first_byte_p90_seconds": percentile(seconds, 90),
            "crowd_consumers": CONSUMERS,
            "crowd_transfers": (_pulled_bytes(nodes) - before) / CROWD_BYTES,
            "crowd_seconds": crowd_seconds,
        }


def _two_nodes(stack: ExitStack, transport: str) -> Nodes:
    bulk = ("--bulk-listen", "127.0.0.1:0") if transport == "tcp" else ()
    arena_bytes = 2 * slot_bytes_of(CROWD_BYTES)
    metrics_port = _free_port()
    owner = stack.enter_context(running_bridge(arena_bytes, "--node-id", _OWNER, "--listen", "127.0.0.1:0", *bulk))
    flags = ("--node-id", "puller", "--peers", f"{_OWNER}={owner.tcp_target}")
    puller = stack.enter_context(running_bridge(arena_bytes, *flags, "--metrics-listen", f"127.0.0.1:{metrics_port}"))
    there = stack.enter_context(connect(owner.target))
    return Nodes(owner_target=owner.tcp_target, puller_target=puller.target, metrics_port=metrics_port, there=there)


def _publish(there: Bridge, key: str, size_bytes: int) -> str:
    ids = token_ids(size_bytes)
    heads, dim = GEOMETRY.groups[0].kv_heads, GEOMETRY.groups[0].head_dim_k
    tensor = torch.ones(heads, len(ids), dim, dtype=torch.bfloat16)
    with there.publish(key, model=MODEL, geometry=GEOMETRY, tokens=ids, text=FALLBACK_TEXT) as slot:
        for layer in range(LAYERS):
            slot.write(layer, tensor, tensor)
    assert slot.handoff_reference is not None, (slot.reason, slot.detail)
    return slot.handoff_reference


class _FirstByte:
    """Notes when the first bytes are here; a `Sink`."""

    def __init__(self, count: int) -> None:
        self._memory = memoryview(bytearray(count))
        self._position = 0
        self.at = 0.0

    @property
    def remaining_bytes(self) -> int:
        return self._memory.nbytes - self._position

    def write(self, chunk: memoryview) -> None:
        self._memory[self._position : self._position + chunk.nbytes] = chunk
        self.advance(chunk.nbytes)

    def room(self) -> list[memoryview]:
        return [self._memory[self._position :]] if self.remaining_bytes else []

    def advance(self, nbytes: int) -> None:
        self.at = self.at or time.perf_counter()
        self._position += nbytes


async def _first_bytes(nodes: Nodes, reference: str, repetitions: int) -> list[float]:
    """Return how long the first byte of each pull took; the very first pull, which connects, is not among them."""
    peer = GrpcPeer(_OWNER, nodes.owner_target, client_name="node.benchmark.0123456789abcdef")
    try:
        opened = await peer.open("default", HandoffReference.parse(reference).payload, seconds_max=_SECONDS_MAX)
        assert isinstance(opened, Opened), opened
        seconds = []
        for _ in range(1 + repetitions):
            sink = _FirstByte(FIRST_BYTES)
            began_at = time.perf_counter()
            await peer.pull(opened.lease_token, sink, seconds_max=_SECONDS_MAX)
            seconds.append(sink.at - began_at)
        await peer.release(opened.lease_token, seconds_max=_SECONDS_MAX)
    finally:
        await peer.close()
    return seconds[1:]


def _crowd(stack: ExitStack, nodes: Nodes, reference: str) -> float:
    """Let all consumers ask for a payload at once, and return how long that took."""
    bridges = [stack.enter_context(connect(nodes.puller_target)) for _ in range(CONSUMERS)]
    ids = token_ids(CROWD_BYTES)

    def ask(bridge: Bridge) -> None:
        with bridge.acquire(reference, model=MODEL, tokens=ids, timeout=PULL_SECONDS_MAX) as handoff:
            assert handoff.kv is not None, (handoff.reason, handoff.detail)

    with ThreadPoolExecutor(CONSUMERS) as pool:
        began_at = time.perf_counter()
        list(pool.map(ask, bridges))
        return time.perf_counter() - began_at


def _pulled_bytes(nodes: Nodes) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{nodes.metrics_port}/metrics", timeout=_SECONDS_MAX) as answer:
        [count] = _PULLED.findall(answer.read().decode())
    return float(count)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'by':>5} {'first byte p50 ms':>18} {'p90 ms':>8} {f'transfers for {CONSUMERS}':>16} {'seconds':>8}"]
    for row in rows:
        first = f"{row['first_byte_p50_seconds'] * 1e3:>18.2f} {row['first_byte_p90_seconds'] * 1e3:>8.2f}"
        lines.append(f"{row['transport']:>5} {first} {row['crowd_transfers']:>16.2f} {row['crowd_seconds']:>8.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
