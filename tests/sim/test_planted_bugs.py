"""The simulator bites: bugs that are planted on purpose are found."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS, planted
from tests.sim.world import run_world

SEEDS_UNTIL_FOUND_MAX, SEEDS_UNTIL_FOUND_MAX_SLOW = 300, 600
MILD = frozenset({"replicas of an earlier start are used"})
"""Bugs that need a node to live long enough after it has started again."""

CROWDED = frozenset(
    {
        "what a holder sends is not compared",
        "a holder's lease is kept",
        "a holder's lease is given back twice",
        "a holder's answer that nobody waits for is forgotten",
        "a replica of another start of its owner is lent on",
        "the owner is not asked when a holder has failed",
    }
)
"""Bugs that show where several nodes want the same."""
SLOW = frozenset(
    {
        "a check holds no lease of its own",
        "a client that has ended is answered",
        "a renewal acknowledges a residue",
        "a holder's answer that nobody waits for is forgotten",
        "a replica of another start of its owner is lent on",
        "lifting a quarantine forgives",
        "replicas of an earlier start are used",
    }
)
"""Bugs that few seeds find; `make test-slow` looks for them."""


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=pytest.mark.slow) if bug in SLOW else bug for bug in BUGS])
def test_a_planted_bug_is_found(bug: str) -> None:
    """Something happens that must not; that the replacement itself broke would be no finding."""
    with planted(bug):
        seeds, crowded = range(SEEDS_UNTIL_FOUND_MAX_SLOW if bug in SLOW else SEEDS_UNTIL_FOUND_MAX), bug in CROWDED
        problems = (run_world(seed, rough=bug not in MILD | CROWDED, crowded=crowded).problem for seed in seeds)
        problem = next(filter(None, problems), "")
    assert problem
    assert not problem.startswith(("TypeError", "AttributeError", "NameError")), problem
