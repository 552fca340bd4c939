"""The simulator bites: bugs that are planted on purpose are found."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS, planted
from tests.sim.world import run_world

SEEDS_UNTIL_FOUND_MAX = 300
MILD = frozenset({"replicas of an earlier start are used"})
"""Bugs that need a node to live long enough after it has started again."""

SLOW = frozenset(
    {
        "a check holds no lease of its own",
        "a client that has ended is answered",
        "a renewal acknowledges a residue",
        "lifting a quarantine forgives",
        "replicas of an earlier start are used",
    }
)
"""Bugs that few seeds find; `make test-slow` looks for them."""


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=pytest.mark.slow) if bug in SLOW else bug for bug in BUGS])
def test_a_planted_bug_is_found(bug: str) -> None:
    """Something happens that must not; that the replacement itself broke would be no finding."""
    with planted(bug):
        problems = (run_world(seed, rough=bug not in MILD).problem for seed in range(SEEDS_UNTIL_FOUND_MAX))
        problem = next(filter(None, problems), "")
    assert problem
    assert not problem.startswith(("TypeError", "AttributeError", "NameError")), problem
