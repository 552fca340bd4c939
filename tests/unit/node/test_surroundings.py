"""What holds around a handoff, and where conversations fall in a canary."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.gate import AcquireTerms
from kvbridge.node.surroundings import canary_share
from tests import builders

TERMS = AcquireTerms(
    reference=PayloadReference(key="k", generation=0),
    model=builders.model_tag(),
    tokens=None,
    affinity="conversation",
)
labels = st.text(max_size=30)


@given(labels, labels, builders.names, builders.names, st.integers(0, 9))
def test_a_conversation_falls_in_one_place_whatever_else_changes(
    route: str, affinity: str, key: str, other_key: str, number: int
) -> None:
    """Only route and affinity decide, or the key where there is no affinity; the place lies in [0, 1)."""
    one = replace(TERMS, affinity=affinity, reference=PayloadReference(key=key, generation=0))
    other = replace(
        one,
        depth=number,
        edge="edge",
        reference=PayloadReference(key=other_key if affinity else key, generation=number),
        model=builders.model_tag(name="other"),
    )
    share = canary_share(route, one)
    assert share == canary_share(route, other)
    assert 0 <= share < 1


def test_conversations_fall_evenly() -> None:
    """Each tenth of the range gets about a tenth of them, so that a share of N percent is one."""
    shares = [canary_share("r", replace(TERMS, affinity=f"conversation-{number}")) for number in range(10_000)]
    tenths = Counter(int(share * 10) for share in shares)
    assert len(tenths) == 10
    assert all(abs(count - 1_000) < 150 for count in tenths.values())


def test_routes_draw_their_canaries_independently() -> None:
    """Whoever is among the first on one route is not for that reason among the first on the next."""
    affinities = [f"conversation-{number}" for number in range(2_000)]
    first = {
        route: {a for a in affinities if canary_share(route, replace(TERMS, affinity=a)) < 0.1}
        for route in ("a", "b", "c")
    }
    for one, other in pairwise(first.values()):
        assert len(one & other) < len(one) / 3
