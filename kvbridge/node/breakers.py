"""The breakers of all routes that were taken lately, and what feeds them.

1. Every handoff of a cache counts as a good one when it is handed over, and turns into a bad one if its consumer
   reports so. On a route that shadows, one that would have been handed over counts as good.
2. A payload whose bytes or tokens were found bad counts once, however many consumers ask for it; an alignment that is
   not good enough counts whenever it stands in the way. That bytes could not be checked, because nobody sealed a
   digest, counts neither way.
3. A trial counts as good when its consumer reports so, or gives its lease back without a complaint. A complaint that
   comes later opens the breaker again all the same.
4. Tenants have breakers of their own, and as many: none can close a route to another, or make its breakers forgotten.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbridge.core.breaker import Admission, BadOutcome, Breaker, BreakerPolicy, BreakerState
from kvbridge.core.catalog.policy import RouteMode
from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, Outcome, PartRecord, RouteKey
from kvbridge.core.reasons import Reason

_log = logging.getLogger(__name__)

_BAD_FINDINGS = {
    Reason.PAYLOAD_CORRUPT: BadOutcome.CORRUPT,
    Reason.VALUES_NOT_FINITE: BadOutcome.CORRUPT,
    Reason.PROBE_BELOW_THRESHOLD: BadOutcome.PROBE,
    Reason.ALIGNMENT_ERROR_EXCEEDED: BadOutcome.ALIGNMENT,
}
_SEVERITY = (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A handoff that is to show whether a route is good again."""

    route: RouteKey
    """The route."""
    handoff_id: str
    """Names the handoff."""


@dataclass(frozen=True, slots=True)
class _OfTenant:
    """What is kept for one tenant."""

    breakers: OrderedDict[RouteKey, Breaker] = field(default_factory=OrderedDict)
    """Its breakers; the last is the one that was used last."""
    bad_payloads: OrderedDict[PayloadReference, None] = field(default_factory=OrderedDict)
    """Its payloads that have counted."""


class Breakers:
    """One breaker for each route between two model versions along one edge, for each tenant."""

    def __init__(self, breakers_max: int) -> None:
        """Start closed; of more than `breakers_max` routes of one tenant the longest unused is forgotten."""
        self._breakers_max = breakers_max
        self._of_tenants: defaultdict[str, _OfTenant] = defaultdict(_OfTenant)
        self._trials: OrderedDict[str, _Trial] = OrderedDict()  # by lease token, until one thing decides each

    def __repr__(self) -> str:
        """Show how many routes there are, and how many are not closed."""
        breakers = [breaker for mine in self._of_tenants.values() for breaker in mine.breakers.values()]
        tripped = sum(breaker.state is not BreakerState.CLOSED for breaker in breakers)
        return f"<Breakers of {len(breakers)} routes, {tripped} tripped>"

    def admit(self, route: RouteKey, policy: BreakerPolicy, *, now: float) -> Admission:
        """Say whether a handoff may take this route now."""
        breakers = self._of_tenants[route.tenant].breakers
        breaker = breakers.get(route)
        if breaker is None:
            breaker = breakers[route] = Breaker(policy)
            if len(breakers) > self._breakers_max:
                breakers.popitem(last=False)
        elif breaker.policy is not policy and breaker.policy != policy:
            breaker.replace_policy(now, policy)
        breakers.move_to_end(route)
        admission = breaker.admit(now)
        self._announce(route, breaker)
        return admission

    def note(self, part: PartRecord, *, now: float) -> None:
        """Count what became of one part when it was answered."""
        breaker = self._find(part.route)
        if part.route is None or breaker is None:
            return
        if part.leased:
            if not part.trial:
                breaker.record_good(now, trial=False)
        else:
            self._note_text(part, part.route.tenant, breaker, now)
        self._announce(part.route, breaker)

    def abandon(self, route: RouteKey, *, now: float) -> None:
        """Make room for another trial on `route` in place of one that did not take place."""
        breaker = self._find(route)
        if breaker is not None:
            breaker.abandon_trial(now)
            self._announce(route, breaker)

    def trial_began(self, route: RouteKey, *, lease_token: str, handoff_id: str) -> None:
        """Remember whose report or return decides a trial."""
        self._trials[lease_token] = _Trial(route=route, handoff_id=handoff_id)
        if len(self._trials) > self._breakers_max:
            self._trials.popitem(last=False)

    def returned(self, lease_tokens: Iterable[str], *, now: float) -> None:
        """Count trials whose leases came back without a complaint."""
        if not self._trials:
            return
        for token in lease_tokens:
            trial = self._trials.pop(token, None)
            breaker = None if trial is None else self._find(trial.route)
            if trial is not None and breaker is not None:
                breaker.record_good(now, trial=True)
                self._announce(trial.route, breaker)

    def reported(self, record: HandoffRecord, outcome: Outcome, *, now: float) -> None:
        """Count what a consumer reported of a handoff for the first time."""
        undecided = self._decide_trials(record.handoff_id)
        for part in record.parts:
            breaker = self._find(part.route)
            if part.leased and part.route is not None and breaker is not None:
                _count(outcome, breaker, now, trial=part.trial, undecided=part.trial and part.route in undecided)
                self._announce(part.route, breaker)

    def of_route(self, name: str, tenant: str) -> tuple[str, str]:
        """Return the worst state among a tenant's breakers of a route, and its figures for people."""
        breakers = [breaker for key, breaker in self._of_tenants[tenant].breakers.items() if key.route == name]
        if not breakers:
            return (BreakerState.CLOSED, "")
        worst = min(breakers, key=lambda breaker: _SEVERITY.index(breaker.state))
        return (worst.state, repr(worst).strip("<>"))

    def _find(self, route: RouteKey | None) -> Breaker | None:
        return None if route is None else self._of_tenants[route.tenant].breakers.get(route)

    def _note_text(self, part: PartRecord, tenant: str, breaker: Breaker, now: float) -> None:
        if part.trial:
            breaker.abandon_trial(now)
        outcome = _bad_finding(part)
        if outcome is None:
            if part.route_mode is RouteMode.SHADOW and part.verdict.would_pass:
                breaker.record_good(now, trial=False)
        elif outcome is BadOutcome.ALIGNMENT or self._is_news(tenant, part.reference):
            breaker.record_bad(now, outcome, trial=part.trial)

    def _is_news(self, tenant: str, reference: PayloadReference) -> bool:
        bad_payloads = self._of_tenants[tenant].bad_payloads
        if reference in bad_payloads:
            return False
        bad_payloads[reference] = None
        if len(bad_payloads) > self._breakers_max:
            bad_payloads.popitem(last=False)
        return True

    def _decide_trials(self, handoff_id: str) -> set[RouteKey]:
        tokens = [token for token, trial in self._trials.items() if trial.handoff_id == handoff_id]
        return {self._trials.pop(token).route for token in tokens}

    def _announce(self, route: RouteKey, breaker: Breaker) -> None:
        for change in breaker.take_changes():
            _log.warning(
                "route breaker changed",
                extra={
                    "route": route.route,
                    "source": f"{route.source.name}@{route.source.revision}",
                    "target": f"{route.target.name}@{route.target.revision}",
                    "edge": route.edge,
                    "tenant": route.tenant,
                    "before": change.before,
                    "after": change.after,
                    "detail": change.detail,
                },
            )


def _bad_finding(part: PartRecord) -> BadOutcome | None:
    """Return what counts against the route of a part that is text, whichever reason was given for that."""
    if part.route_mode is RouteMode.OFF:
        return None
    bad = (failure.reason for failure in part.verdict.failures if failure.reason in _BAD_FINDINGS)
    reason = next(bad, None)
    if reason is Reason.PAYLOAD_CORRUPT and part.verified_at_commit is Verification.NONE:
        return None  # If its bytes really changed, the payload has ended, and whoever asks next finds that.
    return None if reason is None else _BAD_FINDINGS[reason]


def _count(outcome: Outcome, breaker: Breaker, now: float, *, trial: bool, undecided: bool) -> None:
    if outcome.quality is HandoffQuality.BAD:
        breaker.record_bad(now, BadOutcome.REPORTED, trial=trial, was_good=not undecided)
    elif undecided and outcome.use is HandoffUse.USED:
        breaker.record_good(now, trial=True)
    elif undecided:
        breaker.abandon_trial(now)
