"""Which nodes are asked for bytes before the owner, and how long they may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.cost.sources import (
    GAIN_MAX,
    HOLDERS_ASKED_MAX,
    TRIAL_SECONDS_MIN,
    Candidate,
    before_owner,
    holders_seconds,
)

seconds = st.floats(1e-6, 1e4)


def asked(owner: float | None, *holders: float | None) -> list[str]:
    """Return who is asked before the owner; holders are called by their places."""
    candidates = [Candidate(node_id=str(place), seconds=time) for place, time in enumerate(holders)]
    return [one.node_id for one in before_owner(Candidate(node_id="owner", seconds=owner), candidates)]


@pytest.mark.parametrize(
    ("owner", "holders", "expected"),
    [
        (None, (0.001, None), []),
        (1.0, (), []),
        (1.0, (0.9, 2.0), []),
        (1.0, (0.2, 0.1), ["1", "0"]),
        (0.1, (0.05,), ["0"]),
        (0.1, (None,), []),
        (1.0, (None, None), ["0"]),
        (1.0, (0.5, None), ["1", "0"]),
        (1.0, (0.1, None), ["0"]),
        (1.0, (0.3, 0.2, 0.1), ["2", "1"]),
    ],
)
def test_the_rule_by_example(owner: float | None, holders: tuple[float | None, ...], expected: list[str]) -> None:
    """The owner first where it is not measured or quick enough; then the cheapest, and one trial where it matters."""
    assert asked(owner, *holders) == expected


@given(st.none() | seconds, st.lists(st.none() | seconds, max_size=20))
def test_whoever_comes_first_has_a_reason(owner: float | None, holders: list[float | None]) -> None:
    """Each that is asked before the owner is clearly cheaper, or the only trial; they are few, the cheapest."""
    before = [holders[int(place)] for place in asked(owner, *holders)]
    assert len(before) <= HOLDERS_ASKED_MAX
    assert owner is not None or not before
    measured = [time for time in before if time is not None]
    assert measured == sorted(measured)
    assert len(before) - len(measured) <= 1
    if owner is not None:
        assert all(time <= owner * GAIN_MAX for time in measured)
        assert len(before) == len(measured) or owner > TRIAL_SECONDS_MIN
        if measured:
            assert measured[0] == min(time for time in holders if time is not None)


@given(seconds, st.none() | st.floats(0, 1e5))
def test_holders_cost_no_more_than_the_owner_and_leave_it_its_time(owner: float, left: float | None) -> None:
    """At worst everything takes twice as long as from the owner alone, or as little as a trial is worth."""
    longest = holders_seconds(owner, left)
    assert 0 < longest <= max(owner, TRIAL_SECONDS_MIN)
    if left is not None and left > owner:
        assert 2 * longest + owner <= left * (1 + 1e-9)
