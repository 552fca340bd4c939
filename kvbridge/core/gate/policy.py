"""Checks of what the catalog's routes demand, and of what a handoff costs."""

from __future__ import annotations

from kvbridge.core.catalog.policy import RouteMode
from kvbridge.core.gate.check import Check, Figures, Stage
from kvbridge.core.gate.request import Question
from kvbridge.core.reasons import Reason

_PERCENT = 100
_ROLL_OUT = {RouteMode.OFF: "is off", RouteMode.SHADOW: "only shadows"}


def _route_is_on(question: Question) -> str | None:
    conditions = question.conditions
    if conditions.kill_switch is not None:
        return f"the kill switch is on: {conditions.kill_switch}"
    standing = _ROLL_OUT.get(conditions.policy.mode)
    if conditions.policy.mode is RouteMode.OFF:
        return f"route {conditions.route!r} {standing}"
    barred = _barred(question)
    if barred is not None:
        return barred
    return None if standing is None else f"route {conditions.route!r} {standing}"


def _barred(question: Question) -> str | None:
    """Return what would keep a route from handing over caches even if it were on."""
    conditions = question.conditions
    if conditions.breaker is not None:
        return f"the breaker of route {conditions.route!r} has tripped: {conditions.breaker}"
    if conditions.policy.same_family and not _of_one_family(question):
        return f"route {conditions.route!r} wants models of one family: {_families(question)}"
    return _lost_bits(question)


def _lost_bits(question: Question) -> str | None:
    conditions, form = question.conditions, question.descriptor.transfer_form
    if form.serves(conditions.policy.transfer_form):
        return None
    return (
        f"route {conditions.route!r} takes no values that came as {form}: it allows {conditions.policy.transfer_form}"
    )


def _only_rolled_out_less_far(question: Question) -> bool:
    return question.conditions.kill_switch is None and _barred(question) is None


def _of_one_family(question: Question) -> bool:
    conditions = question.conditions
    if question.descriptor.model == question.terms.model:
        return True
    return conditions.source_family is not None and conditions.source_family == conditions.target_family


def _families(question: Question) -> str:
    source, target = question.conditions.source_family, question.conditions.target_family
    return f"payload's is {source or 'unknown'}, consumer's is {target or 'unknown'}"


def _route_figures(question: Question) -> Figures:
    figures: Figures = {"route": question.conditions.route, "mode": question.conditions.policy.mode}
    form = question.descriptor.transfer_form
    return figures if form.is_exact else {**figures, "came_as": str(form)}


def _is_in_the_canary(question: Question) -> str | None:
    policy, share = question.conditions.policy, question.conditions.canary_share
    if policy.mode is not RouteMode.CANARY or share * _PERCENT < policy.canary_percent:
        return None
    return f"route {question.conditions.route!r} hands caches to {policy.canary_percent:g} % of all conversations"


def _canary_figures(question: Question) -> Figures:
    if question.conditions.policy.mode is not RouteMode.CANARY:
        return {}
    return {
        "canary_percent": question.conditions.policy.canary_percent,
        "falls_at_percent": question.conditions.canary_share * _PERCENT,
    }


def _is_not_too_deep(question: Question) -> str | None:
    policy, terms = question.conditions.policy, question.terms
    if terms.depth > policy.depth_max:
        return f"the context has been through {terms.depth} handoffs, more than the route's {policy.depth_max}"
    if terms.cached_segments_nearer >= policy.cached_segments_max:
        return f"{terms.cached_segments_nearer} nearer segments are cached already, as many as the route allows"
    return None


def _depth_figures(question: Question) -> Figures:
    return {
        "depth": question.terms.depth,
        "depth_max": question.conditions.policy.depth_max,
        "cached_segments_nearer": question.terms.cached_segments_nearer,
        "cached_segments_max": question.conditions.policy.cached_segments_max,
    }


def _pays(question: Question) -> str | None:
    policy, valid_length, depth = question.conditions.policy, question.descriptor.valid_length, question.terms.depth
    if valid_length < policy.tokens_min:
        return f"{valid_length} tokens are fewer than the route's {policy.tokens_min}"
    if depth < policy.depth_min:
        return f"the context has been through {depth} handoffs, fewer than the route's {policy.depth_min}"
    return question.conditions.costs.problem


def _cost_figures(question: Question) -> Figures:
    policy, costs = question.conditions.policy, question.conditions.costs
    return {
        "valid_length": question.descriptor.valid_length,
        "tokens_min": policy.tokens_min,
        "tokens_min_unmeasured": policy.tokens_min_unmeasured,
        "prefill_seconds": costs.prefill_seconds,
        "handoff_seconds": costs.handoff_seconds,
        "gain_min": policy.gain_min,
    }


def deadline_figures(question: Question) -> Figures:
    """Return what the check of the deadline looked at."""
    costs = question.conditions.costs
    return {"bytes_seconds": costs.bytes_seconds, "deadline_seconds": costs.deadline_seconds}


CHECKS: tuple[Check, ...] = (
    Check(
        reason=Reason.ROUTE_OFF,
        stage=Stage.TERMS,
        problem=_route_is_on,
        figures=_route_figures,
        is_roll_out=_only_rolled_out_less_far,
    ),
    Check(
        reason=Reason.CANARY_HOLDOUT,
        stage=Stage.TERMS,
        problem=_is_in_the_canary,
        figures=_canary_figures,
        is_roll_out=lambda _: True,
    ),
    Check(reason=Reason.DEPTH_EXCEEDED, stage=Stage.TERMS, problem=_is_not_too_deep, figures=_depth_figures),
    Check(reason=Reason.TOO_SHORT_TO_PAY, stage=Stage.TERMS, problem=_pays, figures=_cost_figures),
)
"""These checks in order."""
