"""What feeds the breakers of routes, and what they announce."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from kvbridge.core.breaker import AdmissionKind, BreakerPolicy, BreakerState
from kvbridge.core.catalog.policy import RouteMode
from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.gate import Candidate, Conditions, Question, Verdict, decide
from kvbridge.core.journal import HandoffQuality, HandoffUse, Outcome, PartRecord, RouteKey
from kvbridge.core.reasons import Reason
from kvbridge.node.breakers import Breakers
from tests import builders, records
from tests.unit.core.gate.test_policy import TERMS, verdict_on

POLICY = BreakerPolicy(window_seconds=60.0, bad_share_max=0.4, samples_min=2, open_seconds=10.0, trials=2)
BAD = Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD)
GOOD = Outcome(use=HandoffUse.USED)
TEXT = Outcome(use=HandoffUse.DISCARDED)


class Desk:
    """Breakers with a clock that is turned by hand, and short words for what happens."""

    def __init__(self, policy: BreakerPolicy = POLICY, breakers_max: int = 8) -> None:
        self.breakers, self.policy, self.now, self.count = Breakers(breakers_max), policy, 0.0, 0

    def admit(self, route: RouteKey = records.ROUTE) -> AdmissionKind:
        """Ask for a handoff."""
        return self.breakers.admit(route, self.policy, now=self.now).kind

    def hand_over(self, **changes: Any) -> PartRecord:
        """Admit a handoff and answer it with a lease of the token `lease-N`."""
        self.count += 1
        trial = self.admit() is AdmissionKind.TRIAL
        part = records.leased(**{"trial": trial, **changes})
        self.breakers.note(part, now=self.now)
        if trial:
            self.breakers.trial_began(
                records.ROUTE, lease_token=f"lease-{self.count}", handoff_id=f"handoff-{self.count}"
            )
        return part

    def refuse(self, reason: Reason, key: str = "k", **changes: Any) -> None:
        """Admit a handoff and answer it with the text."""
        trial = self.admit() is AdmissionKind.TRIAL
        part = records.refused(reason, reference=PayloadReference(key=key, generation=1), trial=trial)
        self.breakers.note(replace(part, **changes), now=self.now)

    def report(self, outcome: Outcome, *parts: PartRecord) -> None:
        """Report on the newest handoff."""
        record = records.record(*parts, handoff_id=f"handoff-{self.count}")
        self.breakers.reported(record, outcome, now=self.now)

    def give_back(self) -> None:
        """Return the newest lease."""
        self.breakers.returned([f"lease-{self.count}"], now=self.now)

    def trip(self) -> None:
        """Let two payloads be corrupt, and wait until trials begin."""
        self.refuse(Reason.PAYLOAD_CORRUPT, "a")
        self.refuse(Reason.PAYLOAD_CORRUPT, "b")
        assert self.state == BreakerState.OPEN
        self.now += POLICY.open_seconds

    @property
    def state(self) -> str:
        """Return the state of the default route's breaker."""
        return self.breakers.of_route("default", "")[0]


@pytest.mark.parametrize(
    ("reason", "trips"),
    [
        (Reason.PAYLOAD_CORRUPT, True),
        (Reason.VALUES_NOT_FINITE, True),
        (Reason.PROBE_BELOW_THRESHOLD, True),
        (Reason.PAYLOAD_EXPIRED, False),
        (Reason.MEMORY_EXHAUSTED, False),
        (Reason.TRANSFER_FAILED, False),
    ],
)
def test_what_was_found_bad_trips_its_route(reason: Reason, trips: bool) -> None:
    """Bad bytes and tokens count against a route; what is merely gone does not."""
    desk = Desk()
    desk.refuse(reason, "a")
    desk.refuse(reason, "b")
    assert (desk.state == BreakerState.OPEN) is trips


def test_one_bad_payload_counts_once() -> None:
    """However many ask for it, it is one fault."""
    desk = Desk()
    for _ in range(20):
        desk.refuse(Reason.PAYLOAD_CORRUPT, "the same")
    assert desk.state == BreakerState.CLOSED


def test_an_alignment_that_is_not_good_enough_counts_whenever_it_stands_in_the_way() -> None:
    """It is the aligner that is bad, not one payload."""
    desk = Desk()
    verdict = _failing(Reason.ALIGNMENT_ERROR_EXCEEDED)
    for _ in range(2):
        desk.refuse(Reason.PAYLOAD_EXPIRED, verdict=verdict)
    assert desk.state == BreakerState.OPEN


def _failing(*reasons: Reason) -> Verdict:
    found = records.verdict()
    problems = [finding._replace(problem="bad") if finding.reason in reasons else finding for finding in found.findings]
    return Verdict(findings=tuple(problems))


def test_every_bad_report_replaces_a_good_handoff() -> None:
    """Two of five handoffs are two of five, not two of seven."""
    desk = Desk(replace(POLICY, samples_min=5, bad_share_max=0.39))
    for _ in range(3):
        desk.hand_over()
    for _ in range(2):
        assert desk.state == BreakerState.CLOSED
        desk.report(BAD, desk.hand_over())
    assert desk.state == BreakerState.OPEN


def test_bytes_that_nobody_could_check_count_neither_way() -> None:
    """A payload without a digest is no sign of a fault."""
    desk = Desk()
    for key in "abc":
        desk.refuse(Reason.PAYLOAD_CORRUPT, key, verified_at_commit=Verification.NONE)
    assert desk.state == BreakerState.CLOSED


def test_a_route_that_is_off_learns_nothing() -> None:
    """What happens beside a route that hands nothing over says nothing about it."""
    desk = Desk()
    for key in "abc":
        desk.refuse(Reason.PAYLOAD_CORRUPT, key, route_mode=RouteMode.OFF)
    assert desk.state == BreakerState.CLOSED


def test_a_route_that_shadows_learns_from_what_would_have_happened() -> None:
    """Those that would have passed are good, those whose bytes are bad are bad, though all are told that it shadows."""
    desk = Desk(replace(POLICY, samples_min=4, bad_share_max=0.5))
    shadow = verdict_on(policy={"mode": RouteMode.SHADOW})
    ended = Candidate(known=True, ended=Reason.PAYLOAD_CORRUPT)
    corrupt = shadow.after(decide(Question(terms=TERMS, candidate=ended, conditions=Conditions())))
    assert corrupt.failure is not None
    for key in "ab":
        desk.refuse(Reason.PAYLOAD_EXPIRED, key, verdict=shadow, route_mode=RouteMode.SHADOW)
    for key in "cd":
        desk.refuse(Reason.PAYLOAD_EXPIRED, key, verdict=corrupt, route_mode=RouteMode.SHADOW)
    assert desk.state == BreakerState.CLOSED
    desk.refuse(Reason.PAYLOAD_EXPIRED, "e", verdict=corrupt, route_mode=RouteMode.SHADOW)
    assert desk.state == BreakerState.OPEN


def test_good_trials_close_the_route() -> None:
    """A trial whose lease comes back without a complaint is good, and so is one that is reported as used."""
    desk = Desk()
    desk.trip()
    desk.hand_over()
    assert desk.admit() is AdmissionKind.REFUSED
    desk.give_back()
    assert desk.state == BreakerState.HALF_OPEN
    desk.report(GOOD, desk.hand_over())
    assert desk.state == BreakerState.CLOSED


def test_a_bad_trial_opens_the_route_again() -> None:
    """One complaint is enough, and a lease that comes back after it changes nothing."""
    desk = Desk()
    desk.trip()
    desk.report(BAD, desk.hand_over())
    assert desk.state == BreakerState.OPEN
    desk.give_back()
    assert desk.state == BreakerState.OPEN


def test_a_complaint_that_comes_after_the_lease_opens_the_route_again() -> None:
    """Consumers return the lease first and judge the answer later."""
    desk = Desk()
    desk.trip()
    part = desk.hand_over()
    desk.give_back()
    desk.report(BAD, part)
    assert desk.state == BreakerState.OPEN


def test_a_trial_that_was_not_used_counts_neither_way() -> None:
    """The next handoff is the trial in its place."""
    desk = Desk()
    desk.trip()
    for _ in range(5):
        desk.report(TEXT, desk.hand_over())
        assert desk.state == BreakerState.HALF_OPEN


def test_a_trial_that_became_text_makes_room_for_another() -> None:
    """Whatever else stands in the way is no outcome; a bad payload is one."""
    desk = Desk()
    desk.trip()
    for _ in range(5):
        desk.refuse(Reason.PAYLOAD_EXPIRED, "gone")
    desk.admit()
    desk.breakers.abandon(records.ROUTE, now=desk.now)
    assert desk.admit() is AdmissionKind.TRIAL
    desk.breakers.abandon(records.ROUTE, now=desk.now)
    desk.refuse(Reason.VALUES_NOT_FINITE, "new and bad")
    assert desk.state == BreakerState.OPEN


def test_changes_are_announced_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Every change of state is one line that names the route, both states and why."""
    desk = Desk()
    with caplog.at_level(logging.WARNING, logger="kvbridge.node.breakers"):
        desk.trip()
        desk.report(GOOD, desk.hand_over())
        desk.report(GOOD, desk.hand_over())
    changes: list[Any] = [record for record in caplog.records if record.msg == "route breaker changed"]
    assert [(change.before, change.after) for change in changes] == [
        ("CLOSED", "OPEN"),
        ("OPEN", "HALF_OPEN"),
        ("HALF_OPEN", "CLOSED"),
    ]
    assert changes[0].route == "default"
    assert "2 of 2 handoffs were bad (CORRUPT 2)" in changes[0].detail


def test_each_pair_of_models_and_edge_has_a_breaker_of_its_own() -> None:
    """A bad target trips nobody else's route; people are shown the worst of a route's breakers."""
    desk = Desk()
    other = replace(records.ROUTE, target=builders.model_tag(name="other"))
    desk.trip()
    desk.now -= 1.0
    assert desk.admit(other) is AdmissionKind.ALLOWED
    assert desk.admit() is AdmissionKind.REFUSED
    assert desk.state == BreakerState.OPEN


def test_the_longest_unused_route_is_forgotten() -> None:
    """Memory is bounded; so is what is remembered of trials and bad payloads."""
    desk = Desk(breakers_max=2)
    for name in "abc":
        desk.admit(replace(records.ROUTE, route=name))
    assert repr(desk.breakers) == "<Breakers of 2 routes, 0 tripped>"
    assert desk.breakers.of_route("a", "") == (BreakerState.CLOSED, "")
    for number in range(10):
        desk.refuse(Reason.PAYLOAD_CORRUPT, str(number))
        desk.breakers.trial_began(records.ROUTE, lease_token=str(number), handoff_id="h")
    assert len(desk.breakers._of_tenants[""].bad_payloads) == len(desk.breakers._trials) == 2


def test_no_tenant_moves_the_breakers_of_another() -> None:
    """Not by reports, not by a payload of the same name, not by taking so many routes that others are forgotten."""
    desk = Desk(breakers_max=2)
    theirs = replace(records.ROUTE, tenant="other")
    desk.trip()
    desk.now -= 1.0
    assert desk.admit(theirs) is AdmissionKind.ALLOWED
    for key in "ab":  # As bad for the other tenant, and news to it.
        desk.refuse(Reason.PAYLOAD_CORRUPT, key, route=theirs)
    assert desk.admit(theirs) is AdmissionKind.REFUSED
    for number in range(10):
        desk.admit(replace(theirs, edge=str(number)))
    assert desk.admit() is AdmissionKind.REFUSED
    assert desk.breakers.of_route("default", "")[0] == BreakerState.OPEN


def test_a_new_policy_holds_at_once() -> None:
    """A route whose tolerance is lowered trips at its next handoff."""
    desk = Desk(replace(POLICY, bad_share_max=1.0))
    desk.refuse(Reason.PAYLOAD_CORRUPT, "a")
    desk.refuse(Reason.PAYLOAD_CORRUPT, "b")
    assert desk.admit() is AdmissionKind.ALLOWED
    desk.policy = POLICY
    assert desk.admit() is AdmissionKind.REFUSED
