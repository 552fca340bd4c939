"""Simulates many nodes with many payloads: `python -m benchmarks.scale`.

What decides is what decides in a real node: ledger, gate, cost model, lending, and what is announced. Only time, the
arenas' bytes and the wires are simulated. See docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale.running import answered, simulate
from benchmarks.scale.tally import Tally
from benchmarks.scale.workload import Scale, payload_bytes

NODES = 200
PAYLOADS = 100_000
_MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES, metavar="N")
    parser.add_argument("--payloads", type=int, default=PAYLOADS, metavar="N", help="published by all nodes together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--per-second", type=float, default=1.0, metavar="X", help="publications of one node")
    parser.add_argument("--remote-share", type=float, default=0.3, metavar="X", help="of all acquires")
    parser.add_argument(
        "--fan-out-exponent", type=float, default=3.0, metavar="X", help="nearer to 1: more popular ones"
    )
    parser.add_argument("--uplink-gbit", type=float, default=25.0, metavar="X", help="how fast a node sends")
    parser.add_argument(
        "--kept",
        type=Path,
        metavar="FOLDER",
        help="keep what is done there, and go on from it; of one version of the code only",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    scale = Scale(
        nodes=options.nodes,
        payloads=options.payloads,
        seed=options.seed,
        per_second=options.per_second,
        remote_share=options.remote_share,
        fan_out_exponent=options.fan_out_exponent,
        uplink_bytes_per_second=options.uplink_gbit * 1e9 / 8,
    )
    began_at = time.monotonic()
    tally = simulate(scale, workers=options.workers, shows_progress=True, kept=options.kept)
    figures = figures_of(scale, tally) | {"wall_seconds": time.monotonic() - began_at}
    print(json.dumps(figures, indent=2) if options.json else table(figures))
    return 0


def figures_of(scale: Scale, tally: Tally) -> dict[str, Any]:
    """Return what is worth knowing of a run."""
    seconds = max(scale.seconds, 1e-9)
    steady = tally.writes[: int(seconds)]
    return {
        "nodes": scale.nodes,
        "payloads": scale.payloads,
        "seed": scale.seed,
        "simulated_seconds": seconds,
        "acquires": tally.events["asked"],
        "answered": answered(tally),
        "events": dict(tally.events.most_common()),
        "calls": dict(tally.calls.most_common()),
        "payload_mib": payload_bytes() / _MIB,
        "tensor_gib_between_nodes": tally.tensor_bytes / (1 << 30),
        "uplink_busy_share_mean": sum(tally.uplink_busy_seconds) / scale.nodes / seconds,
        "uplink_busy_share_max": max(tally.uplink_busy_seconds) / seconds,
        "uplink_wait_seconds_max": tally.uplink_wait_seconds_max,
        "directory_writes_per_second_mean": float(steady.mean()) if len(steady) else 0.0,
        "directory_writes_per_second_max": int(steady.max()) if len(steady) else 0,
        "payloads_at_once_on_a_node_max": max(tally.live_max),
        "owners_pulled_from_mean": sum(tally.owners_called) / max(len(tally.owners_called), 1),
        "generation_max": tally.generation_max,
        "cpu_seconds": tally.cpu_seconds,
    }


def table(figures: dict[str, Any]) -> str:
    """Return figures as lines for people."""
    lines = []
    for name, value in figures.items():
        nested = value if isinstance(value, dict) else {"": value}
        for inner, figure in nested.items():
            shown = f"{figure:,.4g}" if isinstance(figure, float) else f"{figure:,}"
            lines.append(f"{(name + ': ' + inner) if inner else name:<60}{shown:>20}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
