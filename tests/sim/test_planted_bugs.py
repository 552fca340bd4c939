"""The simulator bites: bugs that are planted on purpose are found."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS, planted
from tests.sim.world import run_world

SEEDS_UNTIL_FOUND_MAX = 300


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    """Within some worlds something happens that must not."""
    with planted(bug):
        found = any(run_world(seed).problem for seed in range(SEEDS_UNTIL_FOUND_MAX))
    assert found
