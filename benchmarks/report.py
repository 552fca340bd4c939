"""The figures as one JSON object, or as a table beside what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.cycles import CycleFigures, Growth
from benchmarks.sizes import Row
from benchmarks.workload import HEAD_DIM, KV_HEADS, LAYERS, MIB

ACQUIRE_P50_SECONDS_TARGET = 1.5e-3
ACQUIRE_P99_SECONDS_TARGET = 5e-3
PUBLISH_NONE_TARGET = 0.9
PUBLISH_DIGEST_TARGET = 0.5
PUBLISH_TARGET_FROM_BYTES = 256 * MIB
MEMORY_GROWTH_TARGET = 0.01
_GIGABYTE = 1e9
_NO_TARGET = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the figures were measured on."""

    processors: int
    """Processors that the benchmark may use."""
    load_before: float
    """Average number of running processes in the minute before; more than a little disturbs the figures."""


def as_json(rows: Sequence[Row], cycles: CycleFigures | None, machine: Machine) -> str:
    """Return everything as one JSON object."""
    figures = {
        "rows": [asdict(row) for row in rows],
        "cycles": None if cycles is None else asdict(cycles),
        "machine": asdict(machine),
    }
    return json.dumps(figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    title: str
    text: Callable[[Row], str]
    passes: Callable[[Row], bool | None] = lambda _: None


def _ratio(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _at_least(value: float, target: float, row: Row) -> bool | None:
    return value >= target if row.bytes >= PUBLISH_TARGET_FROM_BYTES else None


_COLUMNS = (
    _Column(title="MiB", text=lambda row: f"{row.bytes / MIB:g}"),
    _Column(title="tokens", text=lambda row: str(row.tokens)),
    _Column(title="pages", text=lambda row: row.page_kind),
    _Column(title="memcpy GB/s", text=lambda row: f"{row.memcpy_bytes_per_second / _GIGABYTE:.1f}"),
    _Column(
        title="publish none",
        text=lambda row: _ratio(row.publish_none_ratio),
        passes=lambda row: _at_least(row.publish_none_ratio, PUBLISH_NONE_TARGET, row),
    ),
    _Column(
        title="publish digest",
        text=lambda row: _ratio(row.publish_digest_ratio),
        passes=lambda row: _at_least(row.publish_digest_ratio, PUBLISH_DIGEST_TARGET, row),
    ),
    _Column(title="publish full", text=lambda row: _ratio(row.publish_full_ratio)),
    _Column(
        title="acquire p50 ms",
        text=lambda row: f"{row.acquire_p50_seconds * 1e3:.2f}",
        passes=lambda row: row.acquire_p50_seconds <= ACQUIRE_P50_SECONDS_TARGET,
    ),
    _Column(
        title="acquire p99 ms",
        text=lambda row: f"{row.acquire_p99_seconds * 1e3:.2f}",
        passes=lambda row: row.acquire_p99_seconds <= ACQUIRE_P99_SECONDS_TARGET,
    ),
    _Column(title="read", text=lambda row: _ratio(row.read_ratio)),
    _Column(title="gRPC stream", text=lambda row: _ratio(row.grpc_stream_ratio)),
    _Column(title="Redis", text=lambda row: _ratio(row.redis_ratio)),
)


def as_table(rows: Sequence[Row], cycles: CycleFigures | None, machine: Machine) -> str:
    """Return everything as lines to read, each figure that has a target marked `pass` or `FAIL`."""
    lines = [
        f"{LAYERS} layers, {KV_HEADS} KV heads, head dimension {HEAD_DIM}, bfloat16, HND",
        f"{machine.processors} processors, load {machine.load_before:.2f} before",
        "publish, read, gRPC stream and Redis: time of a memcpy of the same bytes / their time (1 is memcpy speed)",
    ]
    if rows:
        lines += ["", *_grid([[column.title for column in _COLUMNS], *(_cells(row) for row in rows), _targets()])]
    if cycles is not None:
        lines += ["", *_cycle_lines(cycles)]
    return "\n".join(lines)


def _targets() -> list[str]:
    from_mebibytes = PUBLISH_TARGET_FROM_BYTES // MIB
    targets = {
        "MiB": "target",
        "publish none": f">= {PUBLISH_NONE_TARGET:g} from {from_mebibytes}",
        "publish digest": f">= {PUBLISH_DIGEST_TARGET:g} from {from_mebibytes}",
        "acquire p50 ms": f"<= {ACQUIRE_P50_SECONDS_TARGET * 1e3:g}",
        "acquire p99 ms": f"<= {ACQUIRE_P99_SECONDS_TARGET * 1e3:g}",
    }
    return [targets.get(column.title, _NO_TARGET) for column in _COLUMNS]


def _cells(row: Row) -> list[str]:
    return [_marked(column.text(row), column.passes(row)) for column in _COLUMNS]


def _marked(text: str, passes: bool | None) -> str:  # noqa: FBT001 - the verdict is what this is about
    return text if passes is None else f"{text} {'pass' if passes else 'FAIL'}"


def _grid(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _cycle_lines(cycles: CycleFigures) -> list[str]:
    processes: dict[str, Growth] = {
        "bridge": cycles.bridge,
        "producer": cycles.producer,
        "consumer": cycles.consumer,
    }
    filled = [] if cycles.filling_cycles is None else [cycles.filling_cycles]
    looks = [f"MiB after {count:,}" for count in (cycles.settling_cycles, *filled, cycles.cycles)]
    ratios = ["last / first", *(["last / second"] if filled else [])]
    grid = [["private memory", *looks, *ratios], *([name, *_growth_cells(each)] for name, each in processes.items())]
    in_use = _marked(f"{cycles.arena_bytes_in_use} bytes", not cycles.arena_bytes_in_use)
    size, milliseconds = cycles.payload_bytes / MIB, cycles.seconds_per_cycle * 1e3
    return [
        f"{cycles.cycles:,} cycles of publish, acquire and release of {size:g} MiB, {milliseconds:.2f} ms each",
        *_grid(grid),
        f"arena in use at the end: {in_use}",
    ]


def _growth_cells(growth: Growth) -> list[str]:
    filled = [] if growth.filled_bytes is None else [growth.filled_bytes]
    sizes = [f"{size_bytes / MIB:.1f}" for size_bytes in (growth.settled_bytes, *filled, growth.end_bytes)]
    ratios = [growth.ratio, *([] if growth.filled_ratio is None else [growth.filled_ratio])]
    return [*sizes, *(_marked(f"{ratio:.4f}", abs(ratio - 1) <= MEMORY_GROWTH_TARGET) for ratio in ratios)]
