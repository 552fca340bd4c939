"""The simulator bites: bugs that are planted on purpose are found."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS, planted
from tests.sim.world import run_world

SEEDS_UNTIL_FOUND_MAX = 300
MILD = frozenset({"replicas of an earlier start are used"})
"""Bugs that need a node to live long enough after it has started again."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    """Something happens that must not; that the replacement itself broke would be no finding."""
    with planted(bug):
        problems = (run_world(seed, rough=bug not in MILD).problem for seed in range(SEEDS_UNTIL_FOUND_MAX))
        problem = next(filter(None, problems), "")
    assert problem
    assert not problem.startswith(("TypeError", "AttributeError", "NameError")), problem
