"""The simulator's daily run: the same seeds every time, others every time, and every failpoint with every action."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.failpoints import Action, Failpoint, Strike
from tests.sim.running import fresh_seeds, run_all, words
from tests.sim.world import run_world

ROOT = Path(__file__).parents[2]
SEEDS_EACH = 25
FIXED_SEEDS = 500
FRESH_SEEDS = 200
SEEDS_UNTIL_STRUCK_MAX = 60


@pytest.mark.parametrize("chunk", range(FIXED_SEEDS // SEEDS_EACH))
def test_fixed_seeds(chunk: int) -> None:
    """Nothing that must not happen happens in any of the worlds that every run looks at."""
    total = run_all(range(chunk * SEEDS_EACH, (chunk + 1) * SEEDS_EACH))
    assert not total.failures, "\n".join(map(words, total.failures))
    assert total.answers["LEASED"]
    assert total.reads


def test_crowds() -> None:
    """Nor where several nodes bring the payloads of one over, from one another as well, and one of them lies."""
    total = run_all(range(SEEDS_EACH), crowded=True)
    assert not total.failures, "\n".join(words(failure, crowded=True) for failure in total.failures)
    assert total.answers["LEASED"]
    assert total.from_holders


@pytest.mark.parametrize("chunk", range(FRESH_SEEDS // SEEDS_EACH))
def test_fresh_seeds(chunk: int) -> None:
    """Nor in worlds that nobody has seen before."""
    del chunk
    total = run_all(fresh_seeds(SEEDS_EACH))
    assert not total.failures, "\n".join(map(words, total.failures))


@pytest.mark.parametrize(
    ("failpoint", "action"),
    [pytest.param(*each, id=f"{each[0]} {each[1]}") for each in itertools.product(Failpoint, Action)],
)
def test_every_failpoint_with_every_action(failpoint: Failpoint, action: Action) -> None:
    """Each strikes at the first visit in some world, and nothing that must not happen happens there."""
    strike = Strike(failpoint=failpoint, action=action)
    for seed in range(SEEDS_UNTIL_STRUCK_MAX):
        report = run_world(f"strike {seed}", seconds=8.0, strike=strike)
        assert not report.problem, words(report, strike)
        if report.fired.get(f"{failpoint} {action}"):
            return
    pytest.fail(f"nobody came by {failpoint} in {SEEDS_UNTIL_STRUCK_MAX} worlds")


@pytest.mark.parametrize("seed", [3, 17])
def test_a_run_is_a_function_of_its_seed(seed: int) -> None:
    """Two processes that hash differently see exactly the same happen."""
    traces = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim", "--seed", str(seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        traces.append(done.stdout)
    assert traces[0] == traces[1]
    assert traces[0].count("\n") > 50
