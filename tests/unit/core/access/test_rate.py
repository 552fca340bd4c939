"""The bucket of tokens: never more than the burst at once, and never more than the rate in the long run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.access.rate import TokenBucket


def bucket(*, per_second: float = 2.0, burst: int = 3) -> TokenBucket:
    """Return a full bucket at time 0."""
    return TokenBucket(per_second=per_second, burst=burst, now=0.0)


def test_a_burst_is_taken_at_once_and_then_the_wait_is_told() -> None:
    """At two tokens in a second the next one is there in half of one."""
    tokens = bucket()
    assert [tokens.take(now=0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert tokens.taken(now=0.0) == 3
    assert tokens.take(now=0.25) == pytest.approx(0.25)
    assert tokens.take(now=0.5) == 0.0


def test_a_pause_fills_it_to_the_burst_and_no_further() -> None:
    """An hour of silence is no reason to take thousands."""
    tokens = bucket()
    assert [tokens.take(now=3600.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_change_keeps_what_is_in_it_as_far_as_there_is_room() -> None:
    """Neither does a new rate give tokens away, nor does it take those that fit."""
    tokens = bucket(burst=10)
    tokens.change(per_second=4.0, burst=2, now=0.0)
    assert [tokens.take(now=0.0) for _ in range(3)] == [0.0, 0.0, 0.25]
    tokens.change(per_second=1.0, burst=100, now=0.0)
    assert tokens.take(now=0.0) == 1.0
    assert (tokens.per_second, tokens.burst) == (1.0, 100)
    assert repr(tokens) == "<TokenBucket: 0 of 100, 1 per second>"


@given(
    per_second=st.floats(0.001, 1000.0),
    burst=st.integers(1, 50),
    pauses=st.lists(st.floats(0.0, 10.0), max_size=60),
)
def test_no_more_calls_than_burst_and_rate_allow(per_second: float, burst: int, pauses: list[float]) -> None:
    """From the start up to any moment; and whoever waits as long as it is told gets its token."""
    tokens = bucket(per_second=per_second, burst=burst)
    now = 0.0
    for taken, pause in enumerate(pauses, 1):
        now += pause
        wait = tokens.take(now=now)
        if wait:
            now += wait
            assert tokens.take(now=now) == 0.0
        assert taken <= burst + per_second * now + 0.001
