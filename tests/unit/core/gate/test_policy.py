"""What routes demand and what a handoff costs: each of these checks from a handoff that is valid but for one thing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.catalog.policy import RouteMode, RoutePolicy
from kvbridge.core.descriptor import PayloadReference, Verification, seal
from kvbridge.core.gate import AcquireTerms, Candidate, Conditions, Costs, Finding, Question, Verdict, decide
from kvbridge.core.reasons import Reason
from kvbridge.core.transfer_encoding import TransferEncoding, form_of
from tests import builders

CANDIDATE = Candidate(
    known=True,
    descriptor=seal(
        builders.spec(), generation=1, valid_length=None, tokens=None, layer_digests=(), verification=Verification.FULL
    ),
)
TERMS = AcquireTerms(
    reference=PayloadReference(key="conversation/1", generation=0),
    model=builders.model_tag(),
    geometry=builders.geometry(),
    tokens=builders.tokens(12),
)


def verdict_on(*, terms: dict[str, Any] | None = None, policy: dict[str, Any] | None = None, **found: Any) -> Verdict:
    """Return what the gate decides of a valid handoff with some terms, policies and conditions changed."""
    conditions = Conditions(policy=RoutePolicy(**(policy or {})), **found)
    return decide(Question(terms=replace(TERMS, **(terms or {})), candidate=CANDIDATE, conditions=conditions))


def test_values_that_lost_more_bits_than_the_route_allows_are_refused() -> None:
    """However a lookup came by them: an exact route takes only exact values, and a layered one its layers exactly."""
    assert CANDIDATE.descriptor is not None
    came = replace(CANDIDATE, descriptor=replace(CANDIDATE.descriptor, transfer_form=form_of(TransferEncoding.INT8, 2)))

    def refusal(**policy: Any) -> Finding | None:
        conditions = Conditions(policy=RoutePolicy(**policy))
        return decide(Question(terms=TERMS, candidate=came, conditions=conditions)).failure

    stricter: dict[str, Any] = {"transfer_encoding": TransferEncoding.INT8, "exact_layers_first": 3}
    for refused in (refusal(), refusal(**stricter)):
        assert refused is not None
        assert refused.reason is Reason.ROUTE_OFF
        assert "came as INT8 but for the first 2 layers" in (refused.problem or "")
        assert not refused.is_roll_out
    assert refusal(transfer_encoding=TransferEncoding.INT8, exact_layers_first=2) is None
    assert refusal(transfer_encoding=TransferEncoding.INT4) is None


def finding_of(verdict: Verdict, reason: Reason) -> Finding:
    """Return what the check of this reason found."""
    [found] = [finding for finding in verdict.findings if finding.reason is reason]
    return found


REFUSALS: list[tuple[dict[str, Any], Reason, str]] = [
    ({"kill_switch": "an incident"}, Reason.ROUTE_OFF, "kill switch is on: an incident"),
    ({"policy": {"mode": RouteMode.OFF}}, Reason.ROUTE_OFF, "'default' is off"),
    ({"policy": {"mode": RouteMode.SHADOW}}, Reason.ROUTE_OFF, "'default' only shadows"),
    ({"breaker": "9.0% of 100 were bad"}, Reason.ROUTE_OFF, r"breaker .* has tripped: 9.0% of 100 were bad"),
    (
        {"policy": {"mode": RouteMode.CANARY, "canary_percent": 10.0}, "canary_share": 0.1},
        Reason.CANARY_HOLDOUT,
        "10 % of all",
    ),
    ({"policy": {"depth_max": 2}, "terms": {"depth": 3}}, Reason.DEPTH_EXCEEDED, "through 3 handoffs, more than"),
    ({"terms": {"cached_segments_nearer": 3}}, Reason.DEPTH_EXCEEDED, "3 nearer segments"),
    ({"policy": {"tokens_min": 11}}, Reason.TOO_SHORT_TO_PAY, "10 tokens are fewer than the route's 11"),
    ({"policy": {"depth_min": 1}}, Reason.TOO_SHORT_TO_PAY, "through 0 handoffs, fewer than"),
    ({"costs": Costs(problem="it is cheap to compute")}, Reason.TOO_SHORT_TO_PAY, "it is cheap to compute"),
    (
        {"costs": Costs(bytes_seconds=0.51, deadline_seconds=0.5)},
        Reason.TRANSFER_TIMEOUT,
        "need about 0.510 s, and 0.500 s are left",
    ),
]


@pytest.mark.parametrize(("changes", "reason", "words"), REFUSALS)
def test_one_thing_that_stands_in_the_way_gives_its_reason(changes: dict[str, Any], reason: Reason, words: str) -> None:
    """Each demand of a route gives its own reason, with the figures in its sentence, and nothing else fails."""
    [failure] = verdict_on(**changes).failures
    assert failure.reason is reason
    assert failure.problem is not None
    assert re.search(words, failure.problem)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {"mode": RouteMode.CANARY, "canary_percent": 10.0}, "canary_share": 0.0999},
        {"policy": {"mode": RouteMode.CANARY, "canary_percent": 100.0}, "canary_share": 1 - 2**-53},
        {"policy": {"depth_max": 2}, "terms": {"depth": 2}},
        {"policy": {"depth_min": 2}, "terms": {"depth": 2}},
        {"policy": {"tokens_min": 10}},
        {"terms": {"cached_segments_nearer": 2}},
        {"costs": Costs(bytes_seconds=0.5, deadline_seconds=0.5)},
        {"costs": Costs(bytes_seconds=99.0)},
        {"policy": {"same_family": True}},
    ],
)
def test_what_just_meets_a_demand_passes(changes: dict[str, Any]) -> None:
    """Every limit is one that may be reached; nobody without a deadline is late, and a model is of its own family."""
    assert verdict_on(**changes).failure is None


@pytest.mark.parametrize(
    ("source", "target", "passes"), [("a", "a", True), ("a", "b", False), (None, "a", False), (None, None, False)]
)
def test_a_route_may_want_one_family(source: str | None, target: str | None, passes: bool) -> None:
    """Two versions are of one family only if the catalog says so of both; unknown families are not alike."""
    verdict = verdict_on(
        terms={"model": builders.model_tag(name="other")},
        policy={"same_family": True},
        source_family=source,
        target_family=target,
    )
    assert (finding_of(verdict, Reason.ROUTE_OFF).problem is None) is passes


def test_the_verdict_carries_both_estimates() -> None:
    """People see what the prefill and the handoff were estimated to cost, whether or not it pays."""
    figures = finding_of(
        verdict_on(costs=Costs(prefill_seconds=0.5, handoff_seconds=0.25)), Reason.TOO_SHORT_TO_PAY
    ).figures
    assert (figures["prefill_seconds"], figures["handoff_seconds"]) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("changes", "would_pass"),
    [
        ({}, True),
        ({"kill_switch": "an incident"}, False),
        ({"breaker": "bad"}, False),
        ({"terms": {"first_position": 1}}, False),
        ({"costs": Costs(problem="too short")}, False),
    ],
)
@pytest.mark.parametrize("mode", [RouteMode.OFF, RouteMode.SHADOW, RouteMode.CANARY])
def test_what_would_have_passed_is_told_from_what_would_not(
    mode: RouteMode, changes: dict[str, Any], would_pass: bool
) -> None:
    """A route that is not rolled out says whether anything but that stands in the way; its breaker is such a thing."""
    verdict = verdict_on(policy={"mode": mode}, **changes)
    assert verdict.failure is not None
    assert verdict.would_pass is would_pass


def test_another_family_would_not_have_passed() -> None:
    """That a route shadows does not hide that it wants one family."""
    verdict = verdict_on(
        terms={"model": builders.model_tag(name="other")}, policy={"mode": RouteMode.SHADOW, "same_family": True}
    )
    assert not verdict.would_pass


@given(st.floats(0, 1, exclude_max=True), st.lists(st.floats(0, 100), min_size=2, max_size=5))
def test_raising_a_canary_never_takes_a_conversation_out(share: float, percents: list[float]) -> None:
    """Whoever is handed caches at some share is handed them at every greater one."""
    passed = [
        verdict_on(policy={"mode": RouteMode.CANARY, "canary_percent": percent}, canary_share=share).failure is None
        for percent in sorted(percents)
    ]
    assert passed == sorted(passed)


@pytest.mark.parametrize("reason", [Reason.PAYLOAD_CORRUPT, Reason.TRANSFER_TIMEOUT, Reason.PAYLOAD_EXPIRED])
def test_what_is_found_later_joins_the_verdict(reason: Reason) -> None:
    """A reason that the bytes give takes the place of the same check's first finding, and keeps all others."""
    before = verdict_on()
    ended = Candidate(known=True, ended=reason, ended_detail="found later")
    later = decide(Question(terms=TERMS, candidate=ended, conditions=Conditions(policy=RoutePolicy())))
    joined = before.after(later)
    assert joined.failure is not None
    assert (joined.failure.reason, joined.failure.problem) == (reason, "found later")
    assert sorted(finding.reason for finding in joined.findings) == sorted(
        {finding.reason for finding in (*before.findings, *later.findings)}
    )
