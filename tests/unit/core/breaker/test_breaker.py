"""What trips a breaker, what closes it, and what it says about it."""

from __future__ import annotations

from itertools import product

import pytest

from kvbridge.core.breaker import (
    Admission,
    AdmissionKind,
    BadOutcome,
    Breaker,
    BreakerEvent,
    BreakerPolicy,
    BreakerState,
)
from kvbridge.core.breaker.breaker import CHANGES_MAX, OPEN_FACTOR_MAX
from kvbridge.core.breaker.states import TRANSITIONS, next_state
from kvbridge.core.errors import InvalidFieldError

S, E = BreakerState, BreakerEvent
ALLOWED = {
    S.CLOSED: {E.TRIP: S.OPEN},
    S.OPEN: {E.WAIT_OVER: S.HALF_OPEN},
    S.HALF_OPEN: {E.TRIAL_BAD: S.OPEN, E.TRIALS_GOOD: S.CLOSED},
}
POLICY = BreakerPolicy(window_seconds=12.0, bad_share_max=0.25, samples_min=4, open_seconds=30.0, trials=3)


def tripped(policy: BreakerPolicy = POLICY) -> Breaker:
    """Return a breaker that tripped at second 0."""
    breaker = Breaker(policy)
    for _ in range(policy.samples_min):
        breaker.record_bad(0.0, BadOutcome.CORRUPT, trial=False)
    assert breaker.state is S.OPEN
    return breaker


def half_open(policy: BreakerPolicy = POLICY) -> Breaker:
    """Return a breaker that is about to become half-open at second 30, with no change left to take."""
    breaker = tripped(policy)
    breaker.take_changes()
    return breaker


def trial(breaker: Breaker, now: float) -> None:
    """Take a trial."""
    assert breaker.admit(now).kind is AdmissionKind.TRIAL


@pytest.mark.parametrize(("state", "event"), tuple(product(S, E)))
def test_each_pair_leads_where_it_should_or_nowhere(state: BreakerState, event: BreakerEvent) -> None:
    """A pair that is absent from the table is a programmer's error."""
    expected = ALLOWED[state].get(event)
    if expected is None:
        with pytest.raises(AssertionError):
            next_state(state, event)
    else:
        assert next_state(state, event) is expected


def test_there_is_a_way_from_each_state_to_each() -> None:
    """No state is a dead end and none is dead wood."""
    for start in S:
        reached = {start}
        for _ in S:
            reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
        assert reached == set(S)


def test_a_share_at_the_limit_is_tolerated_and_one_above_it_trips() -> None:
    """One bad of four is a quarter; the second bad one is too many."""
    breaker = Breaker(POLICY)
    for _ in range(3):
        breaker.record_good(0.0, trial=False)
    breaker.record_bad(0.0, BadOutcome.PROBE, trial=False)
    assert breaker.admit(1.0) == Admission(
        kind=AdmissionKind.ALLOWED, bad_share=0.25, samples=4, retry_after_seconds=0.0
    )
    breaker.record_bad(1.0, BadOutcome.REPORTED, trial=False)
    assert breaker.admit(2.0) == Admission(
        kind=AdmissionKind.REFUSED, bad_share=0.4, samples=5, retry_after_seconds=29.0
    )


def test_too_few_samples_never_trip() -> None:
    """Three bad handoffs of three are no evidence yet; a fourth, even a good one, makes them evidence."""
    breaker = Breaker(POLICY)
    for _ in range(3):
        breaker.record_bad(0.0, BadOutcome.CORRUPT, trial=False)
    assert breaker.admit(0.0).kind is AdmissionKind.ALLOWED
    breaker.record_good(0.0, trial=False)
    assert breaker.admit(0.0).kind is AdmissionKind.REFUSED


def test_old_outcomes_leave_the_window() -> None:
    """What is older than the window counts no more."""
    breaker = Breaker(POLICY)
    for _ in range(3):
        breaker.record_bad(0.0, BadOutcome.CORRUPT, trial=False)
    breaker.record_bad(12.0, BadOutcome.CORRUPT, trial=False)
    assert breaker.admit(12.0) == Admission(
        kind=AdmissionKind.ALLOWED, bad_share=1.0, samples=1, retry_after_seconds=0.0
    )


def test_good_ones_that_leave_can_trip() -> None:
    """The share is that of the window now, so it can rise without a new outcome."""
    breaker = Breaker(POLICY)
    for _ in range(12):
        breaker.record_good(0.0, trial=False)
    for _ in range(4):
        breaker.record_bad(6.0, BadOutcome.ALIGNMENT, trial=False)
    assert breaker.admit(11.0).kind is AdmissionKind.ALLOWED
    assert breaker.admit(12.0).kind is AdmissionKind.REFUSED


def test_a_share_of_one_never_trips() -> None:
    """The largest share switches tripping off."""
    breaker = Breaker(BreakerPolicy(bad_share_max=1.0, samples_min=1))
    for _ in range(100):
        breaker.record_bad(0.0, BadOutcome.CORRUPT, trial=False)
    assert breaker.admit(0.0).kind is AdmissionKind.ALLOWED


def test_the_refusal_keeps_the_figures_that_tripped() -> None:
    """Long after the window has moved on, the answer still says why the route is open."""
    breaker = tripped()
    answer = breaker.admit(29.0)
    assert (answer.bad_share, answer.samples, answer.retry_after_seconds) == (1.0, 4, 1.0)
    assert breaker.snapshot().samples == 0


def test_good_trials_in_a_row_close() -> None:
    """Three good trials, one at a time, close the breaker, and what was counted before is forgotten."""
    breaker = half_open()
    for now in (30.0, 31.0, 32.0):
        trial(breaker, now)
        assert breaker.admit(now).kind is AdmissionKind.REFUSED
        breaker.record_good(now, trial=True)
    assert breaker.admit(32.0) == Admission(
        kind=AdmissionKind.ALLOWED, bad_share=0.0, samples=0, retry_after_seconds=0.0
    )
    assert [(change.now, change.before, change.after) for change in breaker.take_changes()] == [
        (30.0, S.OPEN, S.HALF_OPEN),
        (32.0, S.HALF_OPEN, S.CLOSED),
    ]


def test_a_bad_trial_opens_for_twice_as_long_up_to_a_limit_and_closing_resets_it() -> None:
    """30, 60, 120, 240, 480 seconds and no longer; after it has closed, the next trip is one of 30 seconds again."""
    breaker, now, waits = half_open(), 0.0, []
    for _ in range(7):
        waits.append(breaker.admit(now).retry_after_seconds)
        now += waits[-1]
        trial(breaker, now)
        breaker.record_bad(now, BadOutcome.PROBE, trial=True)
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0]
    assert max(waits) == OPEN_FACTOR_MAX * POLICY.open_seconds
    now += 480.0
    for _ in range(POLICY.trials):
        trial(breaker, now)
        breaker.record_good(now, trial=True)
    for _ in range(POLICY.samples_min):
        breaker.record_bad(now, BadOutcome.CORRUPT, trial=False)
    assert breaker.admit(now).retry_after_seconds == 30.0


def test_a_bad_trial_undoes_the_good_ones_before() -> None:
    """The good trials have to come in a row."""
    breaker = half_open()
    for _ in range(2):
        trial(breaker, 30.0)
        breaker.record_good(30.0, trial=True)
    trial(breaker, 30.0)
    breaker.record_bad(30.0, BadOutcome.CORRUPT, trial=True)
    trial(breaker, 90.0)
    breaker.record_good(90.0, trial=True)
    assert breaker.snapshot().trials_good == 1
    assert breaker.state is S.HALF_OPEN


def test_a_lost_trial_is_given_up() -> None:
    """After the open time another trial takes its place; a good outcome that comes later earns nothing."""
    breaker = half_open()
    trial(breaker, 30.0)
    refused = breaker.admit(40.0)
    assert (refused.kind, refused.retry_after_seconds) == (AdmissionKind.REFUSED, 20.0)
    breaker.record_good(60.0, trial=True)
    assert (breaker.snapshot().trials_good, breaker.snapshot().trials_in_flight) == (0, 0)
    trial(breaker, 60.0)


def test_a_late_bad_trial_still_counts() -> None:
    """A trial that was given up and then turns out bad opens the breaker again."""
    breaker = half_open()
    trial(breaker, 30.0)
    breaker.record_bad(70.0, BadOutcome.REPORTED, trial=True)
    assert breaker.state is S.OPEN


def test_a_trial_that_did_not_take_place_makes_room() -> None:
    """Where another check refused the handoff, the next one is the trial, and nothing is counted."""
    breaker = half_open()
    trial(breaker, 30.0)
    breaker.abandon_trial(31.0)
    breaker.abandon_trial(31.0)
    assert breaker.snapshot().trials_good == 0
    trial(breaker, 31.0)


def test_several_trials_at_a_time() -> None:
    """As many are in flight as the policy allows; the refusal tells when the oldest is given up."""
    breaker = half_open(BreakerPolicy(window_seconds=12.0, samples_min=4, trials_in_flight_max=2))
    trial(breaker, 30.0)
    trial(breaker, 35.0)
    assert breaker.admit(40.0).retry_after_seconds == 20.0
    breaker.record_good(41.0, trial=True)
    trial(breaker, 41.0)
    assert breaker.admit(41.0).retry_after_seconds == 24.0


def test_stragglers_from_before_the_trip_move_nothing() -> None:
    """An outcome of a handoff that was no trial neither opens nor closes while trials run."""
    breaker = half_open()
    trial(breaker, 30.0)
    for _ in range(10):
        breaker.record_bad(30.0, BadOutcome.CORRUPT, trial=False)
        breaker.record_good(30.0, trial=False)
    assert breaker.state is S.HALF_OPEN
    assert (breaker.snapshot().trials_good, breaker.snapshot().trials_in_flight) == (0, 1)


def test_outcomes_of_trials_while_open_do_not_lengthen_the_wait() -> None:
    """Of two trials that fail, only the first one opens the breaker."""
    breaker = half_open(BreakerPolicy(window_seconds=12.0, samples_min=4, trials_in_flight_max=2))
    trial(breaker, 30.0)
    trial(breaker, 30.0)
    breaker.record_bad(30.0, BadOutcome.CORRUPT, trial=True)
    breaker.record_bad(31.0, BadOutcome.CORRUPT, trial=True)
    assert breaker.admit(31.0).retry_after_seconds == 59.0


def test_a_stricter_policy_applies_to_what_is_in_the_window() -> None:
    """A route's policy changes live, and the outcomes so far count under the new one at once."""
    breaker = Breaker(POLICY)
    for outcome in (None, None, None, BadOutcome.PROBE):
        if outcome is None:
            breaker.record_good(0.0, trial=False)
        else:
            breaker.record_bad(0.0, outcome, trial=False)
    strict = BreakerPolicy(window_seconds=6.0, bad_share_max=0.1, samples_min=4)
    breaker.replace_policy(1.0, strict)
    assert breaker.policy is strict
    assert breaker.admit(1.0).kind is AdmissionKind.REFUSED


def test_a_policy_with_fewer_trials_closes_at_once() -> None:
    """Good trials count under the new policy too."""
    breaker = half_open()
    trial(breaker, 30.0)
    breaker.record_good(30.0, trial=True)
    breaker.replace_policy(31.0, BreakerPolicy(trials=1))
    assert breaker.state is S.CLOSED


def test_a_policy_with_fewer_trials_in_flight_says_when_there_is_room() -> None:
    """With two trials in flight and room for one, the later of them has to end first."""
    breaker = half_open(BreakerPolicy(window_seconds=12.0, samples_min=4, trials_in_flight_max=2))
    trial(breaker, 30.0)
    trial(breaker, 35.0)
    breaker.replace_policy(36.0, BreakerPolicy(window_seconds=12.0))
    wait = breaker.admit(36.0).retry_after_seconds
    assert breaker.admit(36.0 + wait - 1).kind is AdmissionKind.REFUSED
    trial(breaker, 36.0 + wait)


def test_a_shorter_open_time_ends_the_wait() -> None:
    """The wait is reckoned from when the breaker opened, under the policy in force."""
    breaker = half_open()
    breaker.replace_policy(10.0, BreakerPolicy(open_seconds=5.0))
    trial(breaker, 10.0)


def test_changes_say_why() -> None:
    """Each detail has the figures that a person needs."""
    breaker = tripped()
    trial(breaker, 30.0)
    breaker.record_bad(30.0, BadOutcome.PROBE, trial=True)
    assert [change.detail for change in breaker.take_changes()] == [
        "4 of 4 handoffs were bad (CORRUPT 4), a share over 0.25; text for 30 s",
        "open for 30 s; the next handoffs are trials",
        "a trial was bad: PROBE; text for 60 s",
    ]
    assert breaker.take_changes() == []


def test_changes_that_nobody_takes_do_not_pile_up() -> None:
    """Only the newest are kept."""
    breaker, now = tripped(), 0.0
    for _ in range(CHANGES_MAX):
        now += OPEN_FACTOR_MAX * POLICY.open_seconds
        breaker.record_bad(now, BadOutcome.CORRUPT, trial=True)
    changes = breaker.take_changes()
    assert len(changes) == CHANGES_MAX
    assert (changes[-1].now, changes[-1].after) == (now, S.OPEN)


def test_time_never_goes_back() -> None:
    """A clock that goes back, or is none, is a programmer's error."""
    breaker = Breaker(POLICY)
    breaker.admit(5.0)
    for now in (4.0, float("nan"), float("inf")):
        with pytest.raises(AssertionError):
            breaker.admit(now)


def test_the_snapshot_shows_each_state() -> None:
    """Figures of a state are there in that state alone."""
    assert Breaker(POLICY).snapshot().since is None
    breaker = tripped()
    opened = breaker.snapshot()
    assert (opened.state, opened.since, opened.retry_at) == (S.OPEN, 0.0, 30.0)
    assert (opened.tripped_bad, opened.tripped_samples, opened.bad) == (4, 4, {BadOutcome.CORRUPT: 4})
    trial(breaker, 31.0)
    trying = breaker.snapshot()
    assert (trying.state, trying.since, trying.retry_at, trying.trials_in_flight) == (S.HALF_OPEN, 31.0, None, 1)
    assert repr(breaker) == "<Breaker HALF_OPEN, 0 of 0 handoffs bad, 0 of 3 trials good, 1 in flight>"


REFUSED_SETTINGS = {
    "window_seconds": (0, -1.0, float("nan"), float("inf"), 1e6, "60", True),
    "bad_share_max": (0, 0.0, 1.01, -0.1, float("nan")),
    "samples_min": (0, 1.0, 2**60),
    "open_seconds": (0, float("inf")),
    "trials": (0, -1, 2.5),
    "trials_in_flight_max": (0, 2_000),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, row in REFUSED_SETTINGS.items() for value in row])
def test_a_policy_that_no_breaker_can_follow_is_refused_by_field(name: str, value: object) -> None:
    """The error names the field."""
    with pytest.raises(InvalidFieldError) as refusal:
        BreakerPolicy(**{name: value})  # type: ignore[arg-type]
    assert refusal.value.field == f"breaker.{name}"
