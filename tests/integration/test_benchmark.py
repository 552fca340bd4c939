"""The benchmark runs to its end and says what it promises to say; how fast anything was is not asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines import find_redis_server

ROOT = Path(__file__).parents[2]
RUN_SECONDS_MAX = 100
MIB = 1 << 20
CYCLES = 20
FIGURES = (
    "publish_none_ratio",
    "publish_digest_ratio",
    "publish_full_ratio",
    "acquire_p50_seconds",
    "acquire_p99_seconds",
    "read_ratio",
    "grpc_stream_ratio",
)


def run_benchmark(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.handoff", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False)


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    """Return what one quick run printed."""
    done = run_benchmark("--quick", "--cycles", str(CYCLES), "--json")
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_every_size_has_a_row(quick: dict[str, Any]) -> None:
    """A quick run measures the two smallest sizes."""
    assert [row["bytes"] for row in quick["rows"]] == [MIB, 4 * MIB]


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_are_positive_numbers(quick: dict[str, Any], figure: str) -> None:
    """Each figure of each size is there."""
    assert all(row[figure] > 0 for row in quick["rows"])


def test_redis_is_null_only_without_a_server(quick: dict[str, Any]) -> None:
    """Without a redis-server the ratio is null, and otherwise a positive number."""
    ratios = [row["redis_ratio"] for row in quick["rows"]]
    if find_redis_server() is None:
        assert ratios == [None, None]
    else:
        assert all(ratio > 0 for ratio in ratios)


def test_the_median_does_not_exceed_the_99th_percentile(quick: dict[str, Any]) -> None:
    """The two acquire times come from the same samples."""
    assert all(row["acquire_p50_seconds"] <= row["acquire_p99_seconds"] for row in quick["rows"])


def test_cycles_report_memory_and_an_empty_arena(quick: dict[str, Any]) -> None:
    """The memory of three processes is watched, and nothing stays in the arena."""
    cycles = quick["cycles"]
    assert cycles["cycles"] == CYCLES
    assert cycles["arena_bytes_in_use"] == 0
    for process in ("bridge", "producer", "consumer"):
        growth = cycles[process]
        assert growth["ratio"] == growth["end_bytes"] / growth["settled_bytes"] > 0


def test_a_size_that_is_no_whole_number_of_tokens_is_refused() -> None:
    """The cache's size follows from its tokens, so not every size can be had."""
    done = run_benchmark("--sizes", "0.3")
    assert done.returncode == 2
    assert "multiple of 0.125 MiB" in done.stderr
