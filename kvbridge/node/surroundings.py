"""What holds around a handoff: catalog, route, breaker, quarantines and costs, gathered for the gate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvbridge.core.breaker import AdmissionKind
from kvbridge.core.catalog.policy import RouteMode, RoutePolicy
from kvbridge.core.descriptor import PayloadDescriptor, Verification
from kvbridge.core.gate import AcquireTerms, Conditions, Costs
from kvbridge.core.journal import HandoffRecord, RouteKey
from kvbridge.core.ledger import Payload, Tombstone
from kvbridge.node.breakers import Breakers

_SHARE_BYTES = 8
_SHARE_STEPS = 1 << 53
"""As many as a float tells apart in [0, 1)."""
_SHARE_SURPLUS_BITS = 8 * _SHARE_BYTES - 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What holds around one part of one handoff."""

    conditions: Conditions
    """What the gate is told."""
    quarantine: str | None
    """What about the payload is quarantined; None if nothing is."""
    route: RouteKey | None
    """The route that applies; None if who computed the cache is not known."""
    trial: bool
    """Whether the breaker lets this through as a trial, to be given up if it does not take place."""

    @property
    def shadows(self) -> bool:
        """Tell whether everything is done and text is handed out."""
        return self.conditions.policy.mode is RouteMode.SHADOW


class Surroundings:
    """Everything that the gate asks about but the payload itself."""

    def __init__(self, *, policy: RoutePolicy, breakers: Breakers) -> None:
        """Apply `policy` to every route."""
        self._policy = policy
        self._breakers = breakers

    def passage(
        self,
        *,
        tenant: str,
        terms: AcquireTerms,
        found: Payload | Tombstone | None,
        verification: Verification,
        deadline_seconds: float | None,
        now: float,
    ) -> Passage:
        """Return what holds for one part."""
        del tenant, verification
        if found is None:
            return Passage(conditions=Conditions(policy=self._policy), quarantine=None, route=None, trial=False)
        descriptor = found.descriptor if isinstance(found, Payload) else None
        source = found.model if isinstance(found, Tombstone) else found.spec.model
        route = RouteKey(route="default", source=source, target=terms.model, edge=terms.edge)
        admission = self._breakers.admit(route, self._policy.breaker, now=now)
        refused = admission.kind is AdmissionKind.REFUSED
        conditions = Conditions(
            policy=self._policy,
            breaker=f"{admission.bad_share:.1%} of {admission.samples} handoffs were bad" if refused else None,
            canary_share=_canary_share(route.route, terms),
            costs=self._costs(descriptor, deadline_seconds),
        )
        return Passage(conditions=conditions, quarantine=None, route=route, trial=admission.kind is AdmissionKind.TRIAL)

    def note(self, record: HandoffRecord, *, now: float) -> None:
        """Learn from a handoff that was answered."""
        for part in record.parts:
            if part.route is not None and part.trial and not part.leased:
                self._breakers.abandon_trial(part.route, now=now)

    def _costs(self, descriptor: PayloadDescriptor | None, deadline_seconds: float | None) -> Costs:
        floor = self._policy.tokens_min_unmeasured
        if descriptor is None or descriptor.valid_length >= floor:
            return Costs(deadline_seconds=deadline_seconds)
        problem = f"nothing is measured, and {descriptor.valid_length} tokens are under the floor of {floor}"
        return Costs(problem=problem, deadline_seconds=deadline_seconds)


def _canary_share(route: str, terms: AcquireTerms) -> float:
    """Return where a conversation falls on a route, evenly in [0, 1) and always in the same place."""
    sticks_to = f"{route}\0{terms.affinity or terms.reference.key}".encode()
    digest = hashlib.blake2b(sticks_to, digest_size=_SHARE_BYTES).digest()
    return (int.from_bytes(digest, "big") >> _SHARE_SURPLUS_BITS) / _SHARE_STEPS
