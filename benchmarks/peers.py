"""Measures pulling a cache from another node: `python -m benchmarks.peers`.

Two nodes on this machine, over the loopback. A memcpy and a plain TCP socket that carries as many bytes take turns with
each pull, so that all three see the same machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import memcpy
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
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for size_mib in options.sizes:
        for transport in TRANSPORTS:
            rows.append(_measure(size_mib * MIB, options.repetitions, transport))
            print(f"{size_mib} MiB by {transport} measured", file=sys.stderr, flush=True)
    print(json.dumps(rows) if options.json else _table(rows))
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _measure(size_bytes: int, repetitions: int, transport: str) -> dict[str, Any]:
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    with two_nodes(size_bytes, transport) as (here, there), plain_socket(target) as socket_work:
        works = {"pull": pull(here, there, size_bytes), "socket": socket_work}
        pairs = interleave(memcpy(source, target), works, repetitions=repetitions)
    pulls, sockets = pairs["pull"], pairs["socket"]
    return {
        "bytes": size_bytes,
        "transport": transport,
        "pull_seconds": median(pulls.work_seconds),
        "pull_bytes_per_second": size_bytes / median(pulls.work_seconds),
        "pull_ratio_to_memcpy": pulls.ratio,
        "pull_ratio_to_socket": median(sockets.work_seconds) / median(pulls.work_seconds),
        "socket_bytes_per_second": size_bytes / median(sockets.work_seconds),
        "memcpy_bytes_per_second": size_bytes / median(pulls.memcpy_seconds),
    }


@contextmanager
def two_nodes(size_bytes: int, transport: str) -> Iterator[tuple[Bridge, Bridge]]:
    """Run an owner and a node that pulls from it by a transport, and connect to both."""
    bulk = ("--bulk-listen", "127.0.0.1:0") if transport == "tcp" else ()
    arena_bytes = _PAYLOADS_HELD * slot_bytes_of(size_bytes)
    with running_bridge(arena_bytes, "--node-id", "owner", "--listen", "127.0.0.1:0", *bulk) as owner:
        peers = ("--node-id", "puller", "--peers", f"owner={owner.tcp_target}")
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
def plain_socket(target: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Iterator[Work]:
    """Run a process that sends as many bytes as `target` has over TCP; the work receives them into `target`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = multiprocessing.get_context("spawn").Process(target=_send, args=(port, target.nbytes), daemon=True)
        sender.start()
        connection, _ = listener.accept()
        try:
            yield timed(lambda: _receive(connection, target.data))
        finally:
            connection.close()
            sender.join()


def _send(port: int, nbytes: int) -> None:
    content = np.ones(nbytes, np.uint8).data
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1):
            connection.sendall(content)


def _receive(connection: socket.socket, target: memoryview) -> None:
    connection.sendall(b"?")
    position = 0
    while position < target.nbytes:
        position += connection.recv_into(target[position : position + _PIECE_BYTES])


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'MiB':>6} {'by':>5} {'pull ms':>9} {'GB/s':>7} {'to memcpy':>10} {'to socket':>10} {'socket GB/s':>12}"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    speeds = (row["pull_bytes_per_second"] / 1e9, row["pull_ratio_to_memcpy"], row["pull_ratio_to_socket"])
    return (
        f"{row['bytes'] / MIB:>6.0f} {row['transport']:>5} {row['pull_seconds'] * 1e3:>9.2f} "
        "{:>7.2f} {:>10.3f} {:>10.3f} ".format(*speeds)
        + f"{row['socket_bytes_per_second'] / 1e9:>12.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
