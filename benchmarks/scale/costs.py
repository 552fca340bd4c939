"""Prints what handoffs and nodes cost on paper: `python -m benchmarks.scale.costs`, the tables of docs/scale.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from benchmarks.scale.background import background, calls_of_an_order, order_bytes
from benchmarks.scale.messages import handoffs, realistic, total

NODES = (2, 10, 100, 1000)
TOKENS = (500, 2000, 8000, 32_000)
LIVE_PAYLOADS = 60
_MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all tables and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.costs", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, metavar="N")
    parser.add_argument("--live-payloads", type=int, default=LIVE_PAYLOADS, metavar="P", help="of one node")
    parser.add_argument("--per-second", type=float, default=1.0, metavar="X", help="publications of one node")
    options = parser.parse_args(arguments)
    tables = (
        _by_kind(options.nodes),
        _by_tokens(),
        _call_by_call(),
        _by_nodes(options.nodes, options.live_payloads, options.per_second),
        f"An order that quarantines a payload has {order_bytes()} bytes.",
    )
    print("\n\n".join(tables))
    return 0


def _by_kind(nodes: Sequence[int]) -> str:
    costs = {count: handoffs(realistic(), count) for count in nodes}
    rows = []
    for kind in costs[nodes[0]]:
        sums = [total(costs[count][kind]) for count in nodes]
        rows.append([kind, *(f"{one.count:,}, {one.control_bytes / 1000:.1f} kB" for one in sums)])
    return _table(["calls, control bytes", *(f"N = {count:,}" for count in nodes)], rows)


def _by_tokens() -> str:
    rows = []
    for count in TOKENS:
        costs = {kind: total(calls) for kind, calls in handoffs(realistic(count=count), 2).items()}
        tensors = costs["by reference"].tensor_bytes
        control = [costs[kind].control_bytes for kind in ("local", "by reference")]
        shares = [f"{one / 1000:.1f} kB" for one in control] + [f"{control[1] / tensors:.1e}"]
        rows.append([f"{count:,}", f"{tensors / _MIB:,.1f} MiB", *shares])
    return _table(["tokens", "tensors", "control, local", "control, by reference", "control / tensors"], rows)


def _call_by_call() -> str:
    seen: dict[str, tuple[str, ...]] = {}
    for calls in handoffs(realistic(), 3).values():
        for call in calls:
            seen.setdefault(call.method, (f"{call.request_bytes:,}", f"{call.response_bytes:,}"))
    return _table(["call", "request", "response, tensors apart"], [[name, *sizes] for name, sizes in seen.items()])


def _by_nodes(nodes: Sequence[int], live_payloads: int, per_second: float) -> str:
    rows = []
    for count in nodes:
        one = background(realistic(), nodes=count, live_payloads=live_payloads, published_per_second=per_second)
        rows.append(
            [
                f"{count:,}",
                f"{one.pings:.0f}, {one.ping_bytes / 1000:.2f} kB",
                f"{one.round_seconds:.1f} s",
                f"{one.redis_commands:.0f} + {one.redis_writes:.1f}",
                f"{count * (one.redis_commands + one.redis_writes):,.0f}",
                f"{one.dns_connections:.0f}",
                f"{2 * one.connections:,}",
                f"{calls_of_an_order(count):,}",
            ]
        )
    heads = [
        "N",
        "pings/s",
        "all pinged in",
        "redis: commands/s of a node",
        "of all",
        "dns: connections/s",
        "connections, both ways",
        "calls of one order",
    ]
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
