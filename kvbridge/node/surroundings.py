"""What holds around a handoff: catalog, route, breaker, quarantines and costs, gathered for the gate."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvbridge.core.breaker import Admission, AdmissionKind
from kvbridge.core.catalog import Catalog, RouteMode, RoutePolicy
from kvbridge.core.descriptor import PayloadDescriptor, PayloadReference, Verification
from kvbridge.core.gate import AcquireTerms, AlignerStanding, Conditions, Costs
from kvbridge.core.journal import HandoffRecord, RouteKey
from kvbridge.core.ledger import Grant, Payload, Tombstone
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.node.breakers import Breakers
from kvbridge.node.costs import CostKeeper
from kvbridge.node.foreign import Foreign, arriving_bytes

_ALIGNERS_COMPARED_MAX = 64
"""Most versions of an aligner that are looked at to say in what one that is not there differs."""
_SHARE_BYTES = 8
_SHARE_STEPS = 1 << 53
"""As many as a float tells apart in [0, 1)."""
_SHARE_SURPLUS_BITS = 8 * _SHARE_BYTES - 53


Found: TypeAlias = Payload | Tombstone | Foreign | None
"""What there is under a key: here, or on another node."""
NOT_HERE = -1
"""Stands for the payload id of what is on another node."""


class RunningCatalog(Protocol):
    """The catalog as it is at the moment."""

    @property
    def catalog(self) -> Catalog:
        """Return the running snapshot."""

    def kill_switch_reason(self) -> str | None:
        """Return why every handoff is text, or None if it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What holds around one part of one handoff."""

    conditions: Conditions
    """What the gate is told."""
    quarantine: str | None = None
    """What about the payload is quarantined; None if nothing is."""
    route: RouteKey | None = None
    """The route that applies; None if who computed the cache is not known."""
    trial: bool = False
    """Whether the breaker lets this through as a trial, to be given up if it does not take place."""
    probe_figures: Mapping[str, float] = field(default_factory=dict)
    """What the probe of the payload's tokens measured at commit."""

    @property
    def shadows(self) -> bool:
        """Tell whether everything is done and text is handed out."""
        return self.conditions.policy.mode is RouteMode.SHADOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """How one acquire was made, alike for all its parts."""

    tenant: str
    """The caller's tenant."""
    attached: bool
    """Whether the caller shares memory with the node."""
    verification: Verification
    """How far the bytes are to be checked again."""
    deadline_seconds: float | None
    """What the caller's deadline leaves; None if it has none."""


class QuarantinesInForce(Protocol):
    """What is quarantined at the moment."""

    def problem(
        self,
        tenant: str,
        reference: PayloadReference,
        model: ModelTag,
        aligner: AlignerTag | None,
        derived_from: Iterable[PayloadReference],
    ) -> str | None:
        """Return what about a payload, or the aligner that it went or will go through, is quarantined, or None."""


class ProbeFigures(Protocol):
    """What probes measured at commit."""

    def figures(self, payload: tuple[str, int]) -> Mapping[str, float]:
        """Return what was measured of a payload of a tenant; empty if nothing was."""


class Surroundings:
    """Everything that the gate asks about but the payload itself."""

    def __init__(
        self,
        *,
        catalog: RunningCatalog,
        breakers: Breakers,
        costs: CostKeeper,
        quarantines: QuarantinesInForce,
        probes: ProbeFigures,
    ) -> None:
        """Gather from these."""
        self._probes = probes
        self._quarantines = quarantines
        self._catalog = catalog
        self._breakers = breakers
        self._costs = costs

    def passage(self, terms: AcquireTerms, found: Found, made: Circumstances, *, now: float) -> Passage:
        """Return what holds for one part."""
        kill_switch = self._catalog.kill_switch_reason()
        source = computed_by(found)
        if found is None or source is None:
            return Passage(conditions=Conditions(kill_switch=kill_switch))
        catalog = self._catalog.catalog
        route = catalog.route_for(source, terms.model, terms.edge)
        key = RouteKey(route=route.name, source=source, target=terms.model, edge=terms.edge, tenant=made.tenant)
        admission = self._breakers.admit(key, route.policy.breaker, now=now)
        descriptor = None if isinstance(found, Tombstone) else found.descriptor
        target = catalog.model(terms.model)
        conditions = Conditions(
            kill_switch=kill_switch,
            route=route.name,
            policy=route.policy,
            breaker=_refusal(admission),
            canary_share=canary_share(route.name, terms),
            source_family=catalog.family(source),
            target_family=catalog.family(terms.model),
            target_geometry=None if target is None else target.geometry,
            aligner=_standing(catalog, _claimed(descriptor, terms)),
            costs=self._costs_of(found, terms, made, route.policy),
        )
        return Passage(
            conditions=conditions,
            quarantine=self.quarantine(terms, found, made.tenant),
            route=key,
            trial=admission.kind is AdmissionKind.TRIAL,
            probe_figures=self._probes.figures((made.tenant, found.payload_id)) if isinstance(found, Payload) else {},
        )

    def quarantine(self, terms: AcquireTerms, found: Payload | Tombstone | Foreign, tenant: str) -> str | None:
        """Return what about a payload, or the aligner that the consumer will apply to it, is quarantined, or None."""
        source = computed_by(found)
        if source is None:
            return None
        descriptor = None if isinstance(found, Tombstone) else found.descriptor
        derived_from = () if descriptor is None else descriptor.derived_from
        aligner = _claimed(descriptor, terms)
        return self._quarantines.problem(tenant, found.reference, source, aligner, derived_from)

    def takes(self, terms: AcquireTerms, payload: Payload) -> bool:
        """Tell whether the route lets a replica that lost bits on its way be handed over."""
        route = self._catalog.catalog.route_for(payload.spec.model, terms.model, terms.edge)
        return payload.spec.transfer_form.serves(route.policy.transfer_form)

    def kill_switch_reason(self) -> str | None:
        """Return why every handoff is text at this moment, or None if it is not."""
        return self._catalog.kill_switch_reason()

    def forgo(self, passages: Iterable[Passage], *, now: float) -> None:
        """Give up trials that do not take place."""
        for passage in passages:
            if passage.trial and passage.route is not None:
                self._breakers.abandon(passage.route, now=now)

    def note(self, record: HandoffRecord, grants: Sequence[Grant | None], *, now: float) -> None:
        """Learn from a handoff that was answered, part by part, with `grants` for those that were leased."""
        for part, grant in zip(record.parts, grants, strict=True):
            self._breakers.note(part, now=now)
            if part.trial and part.route is not None and grant is not None:
                self._breakers.trial_began(part.route, lease_token=grant.token, handoff_id=record.handoff_id)

    def _costs_of(
        self, found: Payload | Tombstone | Foreign, terms: AcquireTerms, made: Circumstances, policy: RoutePolicy
    ) -> Costs:
        if isinstance(found, Tombstone) or found.descriptor is None:
            return Costs(deadline_seconds=made.deadline_seconds)
        # Fewer bytes come from the owner alone.
        fewer = arriving_bytes(found, policy.transfer_form) if isinstance(found, Foreign) else None
        return self._costs.costs(
            (made.tenant, NOT_HERE if isinstance(found, Foreign) else found.payload_id),
            found.descriptor,
            consumer=terms.model,
            attached=made.attached,
            policy=policy,
            verification=made.verification,
            deadline_seconds=made.deadline_seconds,
            owner=found.owner if isinstance(found, Foreign) else None,
            arriving_bytes=fewer,
            holders=found.holders if isinstance(found, Foreign) and fewer is None else (),
        )


def canary_share(route: str, terms: AcquireTerms) -> float:
    """Return where a conversation falls on a route, evenly in [0, 1) and always in the same place."""
    sticks_to = f"{route}\0{terms.affinity or terms.reference.key}".encode()
    digest = hashlib.blake2b(sticks_to, digest_size=_SHARE_BYTES).digest()
    return (int.from_bytes(digest, "big") >> _SHARE_SURPLUS_BITS) / _SHARE_STEPS


def computed_by(found: Found) -> ModelTag | None:
    """Return the model that computed a payload; None if that is not known."""
    if isinstance(found, Payload):
        return found.spec.model
    return None if found is None else found.model


def _claimed(descriptor: PayloadDescriptor | None, terms: AcquireTerms) -> AlignerTag | None:
    return terms.aligner if descriptor is None or descriptor.aligner is None else descriptor.aligner


def _standing(catalog: Catalog, claimed: AlignerTag | None) -> AlignerStanding:
    if claimed is None:
        return AlignerStanding()
    entry = catalog.aligner(claimed)
    return AlignerStanding(
        name_known=catalog.aligner_named(claimed.name),
        entry=entry,
        nearest=_nearest(catalog, claimed) if entry is None else None,
        problem=catalog.aligner_problem(claimed),
    )


def _nearest(catalog: Catalog, claimed: AlignerTag) -> AlignerTag | None:
    """Return which version of an aligner differs least from one that is not in the catalog, for people."""
    listed = (entry.tag for _, entry in catalog.aligners_after((claimed.name,), _ALIGNERS_COMPARED_MAX))
    named = [tag for tag in listed if tag.name == claimed.name]
    return min(named, key=lambda tag: len(claimed.differences(tag)), default=None)


def _refusal(admission: Admission) -> str | None:
    if admission.kind is not AdmissionKind.REFUSED:
        return None
    return f"{admission.bad_share:.1%} of {admission.samples} handoffs were bad"
