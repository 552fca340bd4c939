"""Estimates of checks by a clock that is turned by hand."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kvbridge.core.cost.curve import RATES_MIN
from kvbridge.core.descriptor import PayloadDescriptor, Verification, seal
from kvbridge.node.check_costs import CheckCosts
from tests import builders

DIGEST, FULL = Verification.DIGEST, Verification.FULL
A, B = ("default", 1), ("default", 2)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def described(tokens: int = 10) -> PayloadDescriptor:
    """Return a descriptor of so many tokens."""
    spec = builders.spec(capacity_tokens=tokens, tokens=builders.tokens(tokens))
    return seal(spec, generation=1, valid_length=None, tokens=None, layer_digests=(), verification=DIGEST)


def measured(clock: Clock, seconds: float = 1.0) -> CheckCosts:
    """Return costs that have seen enough checks of ten tokens."""
    costs = CheckCosts(clock)
    for _ in range(RATES_MIN):
        with costs.timed(A, described(), DIGEST):
            clock.now += seconds
    return costs


def test_nothing_is_estimated_before_something_is_measured() -> None:
    """An unknown time is no reason to refuse; nor does a check that is not asked for take any."""
    costs = CheckCosts(Clock())
    assert costs.estimate(A, described(), DIGEST) == 0.0
    assert measured(Clock()).estimate(A, described(), Verification.NONE) == 0.0


def test_like_checks_take_as_long_and_larger_ones_longer() -> None:
    """Estimates follow the bytes; each level has measurements of its own."""
    costs = measured(Clock())
    assert costs.estimate(B, described(), DIGEST) == pytest.approx(1.0)
    assert costs.estimate(B, described(100), DIGEST) == pytest.approx(10.0)
    assert costs.estimate(B, described(), FULL) == 0.0


def test_whoever_comes_later_waits_for_those_before() -> None:
    """A check that is asked for while another runs has to wait for that one's bytes first."""
    clock = Clock()
    costs = measured(clock)
    with costs.timed(A, described(30), FULL):
        assert costs.estimate(B, described(), DIGEST) == pytest.approx(4.0)
        assert described(30).canonical_bytes == 3 * described().canonical_bytes


def test_whoever_shares_a_check_waits_for_the_rest_of_it() -> None:
    """The time that a running check has taken already is not waited for again; a less thorough one is not shared."""
    clock = Clock()
    costs = measured(clock)
    with costs.timed(A, described(), FULL):
        clock.now += 0.75
        assert costs.estimate(A, described(), DIGEST) == pytest.approx(0.25)
        clock.now += 5.0
        assert costs.estimate(A, described(), DIGEST) == 0.0
    for _ in range(RATES_MIN):
        with costs.timed(A, described(), FULL):
            clock.now += 2.0
    with costs.timed(A, described(), DIGEST):
        assert costs.estimate(A, described(), FULL) == pytest.approx(4.0)


def test_one_payload_may_be_checked_at_two_levels_at_a_time() -> None:
    """Both are counted while they run, and nothing is left afterwards."""
    costs = measured(Clock())
    with costs.timed(A, described(), DIGEST), costs.timed(A, described(), FULL):
        assert costs.estimate(B, described(), DIGEST) == pytest.approx(3.0)
    assert "0 checks of 0 bytes" in repr(costs)


def test_only_checks_that_ran_alone_and_to_their_end_are_measured() -> None:
    """What shared the threads with others, or broke off, says nothing of the time that one check takes."""
    clock = Clock()
    costs = CheckCosts(clock)
    for _ in range(5):
        with costs.timed(A, described(), DIGEST):
            with costs.timed(B, described(), DIGEST):
                clock.now += 1.0
            clock.now += 1.0
        with suppress(ZeroDivisionError), costs.timed(A, described(), DIGEST):
            clock.now += 1.0
            raise ZeroDivisionError
    assert costs.estimate(A, described(), DIGEST) == 0.0


def test_a_clock_that_shows_no_time_teaches_nothing() -> None:
    """A check that took no measurable time is no measurement."""
    costs = measured(Clock(), seconds=0.0)
    assert costs.estimate(A, described(), DIGEST) == 0.0
