"""Ten minutes of mixed sizes leave the arena in pieces that are large enough; `docs/quotas.md` has the figures."""

from __future__ import annotations

import pytest

from tests.sim.fragmentation import Outcome, Replay, Trace

SEEDS = range(3)
pytestmark = pytest.mark.timeout(600)  # Some seconds of work, on a machine that may be busy.


def together(load: float, *, soft_watermark: float = 0.85) -> Outcome:
    """Replay some traces and join what became of them."""
    outcome = Outcome()
    for seed in SEEDS:
        outcome.add(Replay(Trace(seed=seed, load=load, soft_watermark=soft_watermark)).run())
    return outcome


@pytest.mark.parametrize(("load", "refused_share_max"), [(0.6, 0.01), (0.8, 0.05)])
def test_few_slots_are_refused_for_want_of_one_piece(load: float, refused_share_max: float) -> None:
    """Although the largest is an eighth of the arena, and nothing is ever moved."""
    outcome = together(load)
    assert outcome.asked > 1000 * len(SEEDS)
    assert outcome.refused_share <= refused_share_max, outcome.line()
    assert outcome.wasted_bytes <= 0.001 * outcome.asked_bytes


def test_the_soft_watermark_saves_reservations_from_evicting_and_from_pieces() -> None:
    """Without it most reservations evict, and many more are refused."""
    without, with_it = together(0.8, soft_watermark=1.0), together(0.8)
    assert with_it.refused_share < without.refused_share / 2
    assert with_it.evicting < without.evicting / 4
