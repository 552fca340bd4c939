"""Measures pulling a cache from another node: `python -m benchmarks.peers`.

Two nodes on this machine, over the loopback or, with `--veth`, over a link between two network namespaces. A memcpy and
a plain TCP socket that carries as many bytes the same way take turns with each pull, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import memcpy
from benchmarks.hosts import LOOPBACK, Hosts, veth
from benchmarks.processes import running_bridge
from benchmarks.timing import Work, interleave, timed
from benchmarks.workload import FALLBACK_TEXT, GEOMETRY, LAYERS, MIB, MODEL, slot_bytes_of, tokens_of
from kvbridge import Bridge, connect

SIZES_MIB = (1, 64, 256)
REPETITIONS = 7
TRANSPORTS = ("grpc", "tcp")
PULL_SECONDS_MAX = 120.0
_PIECE_BYTES = 1 << 20
_PAYLOADS_HELD = 3
"""Room for so many payloads in each arena: those before make way when they must."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status, which says nothing about targets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--sizes", type=_sizes, default=SIZES_MIB, metavar="MIB,...", help="sizes in MiB")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    parser.add_argument("--veth", action="store_true", help="over a link of its own; takes root and iproute2")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    with ExitStack() as stack:
        hosts = stack.enter_context(veth()) if options.veth else LOOPBACK
        for size_mib in options.sizes:
            rows += _measure(hosts, size_mib * MIB, options.repetitions)
            print(f"{size_mib} MiB measured", file=sys.stderr, flush=True)
    print(json.dumps(rows) if options.json else _table(rows))
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _measure(hosts: Hosts, size_bytes: int, repetitions: int) -> list[dict[str, Any]]:
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    with ExitStack() as stack:
        works = {"socket": stack.enter_context(plain_socket(hosts, target))}
        for transport in TRANSPORTS:
            works[transport] = pull(*stack.enter_context(two_nodes(hosts, size_bytes, transport)), size_bytes)
        pairs = interleave(memcpy(source, target), works, repetitions=repetitions)
    seconds = {name: median(taken.work_seconds) for name, taken in pairs.items()}
    return [
        {
            "bytes": size_bytes,
            "transport": transport,
            "pull_seconds": seconds[transport],
            "pull_bytes_per_second": size_bytes / seconds[transport],
            "pull_ratio_to_memcpy": pairs[transport].ratio,
            "pull_ratio_to_socket": seconds["socket"] / seconds[transport],
            "pull_ratio_to_grpc": seconds["grpc"] / seconds[transport],
            "socket_bytes_per_second": size_bytes / seconds["socket"],
        }
        for transport in TRANSPORTS
    ]


@contextmanager
def two_nodes(hosts: Hosts, size_bytes: int, transport: str) -> Iterator[tuple[Bridge, Bridge]]:
    """Run an owner on the far host and a node on the near one that pulls from it, and connect to both."""
    bulk = ("--bulk-listen", f"{hosts.far}:0") if transport == "tcp" else ()
    arena_bytes = _PAYLOADS_HELD * slot_bytes_of(size_bytes)
    listen = ("--node-id", "owner", "--listen", f"{hosts.far}:0", *bulk, *hosts.flags)
    with running_bridge(arena_bytes, *listen, at=hosts.at_far) as owner:
        peers = ("--node-id", "puller", "--peers", f"owner={hosts.far}:{owner.tcp_port}", *hosts.flags)
        with (
            running_bridge(arena_bytes, *peers) as puller,
            connect(owner.target) as there,
            connect(puller.target) as here,
        ):
            yield here, there


def pull(here: Bridge, there: Bridge, size_bytes: int) -> Work:
    """Return a work that publishes at one node, untimed, and acquires at the other until the lease is there."""
    tokens = tokens_of(size_bytes)
    heads, dim = GEOMETRY.groups[0].kv_heads, GEOMETRY.groups[0].head_dim_k
    tensor = torch.ones(heads, tokens, dim, dtype=torch.bfloat16)
    ids = list(range(tokens))
    numbers = count()

    def work() -> float:
        key = f"benchmark/{next(numbers)}"
        with there.publish(key, model=MODEL, geometry=GEOMETRY, tokens=ids, text=FALLBACK_TEXT) as slot:
            for layer in range(LAYERS):
                slot.write(layer, tensor, tensor)
        reference = slot.handoff_reference
        assert reference is not None, (slot.reason, slot.detail)
        handoffs = []
        seconds = timed(
            lambda: handoffs.append(here.acquire(reference, model=MODEL, tokens=ids, timeout=PULL_SECONDS_MAX))
        )()
        assert handoffs[0].kv is not None, (handoffs[0].reason, handoffs[0].detail)
        handoffs[0].release()
        return seconds

    return work


@contextmanager
def plain_socket(hosts: Hosts, target: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Iterator[Work]:
    """Run a process on the far host that sends as many bytes as `target` has; the work receives them there."""
    with socket.create_server((hosts.near, 0)) as listener:
        port = listener.getsockname()[1]
        command = [*hosts.at_far, sys.executable, "-m", "benchmarks.raw_sender", hosts.near, str(port)]
        with subprocess.Popen([*command, str(target.nbytes)]):
            connection, _ = listener.accept()
            with connection:
                yield timed(lambda: _receive(connection, target.data))


def _receive(connection: socket.socket, target: memoryview) -> None:
    connection.sendall(b"?")
    position = 0
    while position < target.nbytes:
        position += connection.recv_into(target[position : position + _PIECE_BYTES])


def _table(rows: Sequence[dict[str, Any]]) -> str:
    header = f"{'MiB':>6} {'by':>5} {'pull ms':>9} {'GB/s':>7} {'to memcpy':>10} {'to socket':>10} {'to gRPC':>8}"
    return "\n".join([f"{header} {'socket GB/s':>12}", *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['bytes'] / MIB:>6.0f} {row['transport']:>5} {row['pull_seconds'] * 1e3:>9.2f} "
        f"{row['pull_bytes_per_second'] / 1e9:>7.2f} {row['pull_ratio_to_memcpy']:>10.3f} "
        f"{row['pull_ratio_to_socket']:>10.3f} {row['pull_ratio_to_grpc']:>8.2f} "
        f"{row['socket_bytes_per_second'] / 1e9:>12.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
