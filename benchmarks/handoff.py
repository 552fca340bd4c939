"""Measures handing a cache over between two processes of one host: `python -m benchmarks.handoff`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from benchmarks.cycles import measure_cycles
from benchmarks.report import Machine, as_json, as_table
from benchmarks.sizes import default_sizes, measure_sizes
from benchmarks.workload import MIB, TOKEN_BYTES

CYCLES = 10_000
QUICK_CYCLES = 200
CYCLES_MIN = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status, which says nothing about targets."""
    options = _parser().parse_args(arguments)
    # A copy with more threads than processors that are idle collapses, on either side of the comparison.
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    cycle_count = options.cycles if options.cycles is not None else QUICK_CYCLES if options.quick else CYCLES
    sizes_bytes = options.sizes if options.sizes is not None else default_sizes(quick=options.quick)
    # The cycles come first, because the larger sizes leave their mark on this process' memory.
    _progress(f"{cycle_count} cycles" if cycle_count else "no cycles")
    cycles = measure_cycles(cycle_count) if cycle_count else None
    rows = []
    for row in measure_sizes(sizes_bytes):
        _progress(f"{row.bytes / MIB:g} MiB measured")
        rows.append(row)
    machine = Machine(processors=len(os.sched_getaffinity(0)), load_before=load_before)
    print((as_json if options.json else as_table)(rows, cycles, machine))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="1 and 4 MiB and few cycles, to see that it works")
    parser.add_argument("--sizes", type=_sizes, metavar="MIB,...", help="sizes of the caches in MiB, such as 1,64,1024")
    parser.add_argument(
        "--cycles", type=_cycles, metavar="N", help=f"handoffs to watch memory over; 0 for none ({CYCLES})"
    )
    return parser


def _sizes(text: str) -> list[int]:
    sizes_bytes = [round(float(part) * MIB) for part in text.split(",")]
    if any(size < TOKEN_BYTES or size % TOKEN_BYTES for size in sizes_bytes):
        raise argparse.ArgumentTypeError(
            f"each size must be a positive multiple of {TOKEN_BYTES / MIB:g} MiB, one token"
        )
    return sizes_bytes


def _cycles(text: str) -> int:
    cycles = int(text)
    if cycles and cycles < CYCLES_MIN:
        raise argparse.ArgumentTypeError(f"must be 0 or at least {CYCLES_MIN}")
    return cycles


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
