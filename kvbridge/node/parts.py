"""The parts of one acquire on their way to an answer: what is known of each, and what becomes of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbridge.core.attention import AttentionLayout, AttentionSpan
from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, Verification
from kvbridge.core.gate import AcquireTerms, Candidate, Verdict
from kvbridge.core.geometry import TOKENS_MAX
from kvbridge.core.journal import PartRecord, Pull
from kvbridge.core.ledger import Grant, Payload, Tombstone
from kvbridge.core.plan import Place
from kvbridge.core.reasons import Reason
from kvbridge.node.answers import Fallback, Leased
from kvbridge.node.foreign import Foreign
from kvbridge.node.surroundings import Found, Passage, computed_by

_NOT_READY_RETRY_SECONDS = 0.05


@dataclass(slots=True, kw_only=True)
class Part:
    """One part on its way to an answer."""

    terms: AcquireTerms
    """What is asked for, in its place."""
    place: Place
    """Where it stands."""
    found: Found
    """What there is."""
    passage: Passage
    """What holds around it."""
    verdict: Verdict
    """What the gate found so far."""
    passes: bool = False
    """Whether it gets a lease, be it only to see what would have become of it on a route that shadows."""
    grant: Grant | None = None
    """Its lease."""
    verified_now: Verification = Verification.NONE
    """How far its bytes were checked for this handoff."""
    pull: Pull | None = None
    """What was brought over for it."""


def candidate_of(found: Found, *, quarantine: str | None, node_draining: bool, not_asked: str = "") -> Candidate:
    """Return what the gate is told of what there is; `not_asked` says why others were not asked, if they were not."""
    if isinstance(found, Foreign):
        return Candidate(
            node_draining=node_draining,
            known=found.known,
            ended=found.ended,
            ended_detail=found.detail,
            descriptor=found.descriptor,
            quarantine=quarantine,
        )
    if isinstance(found, Tombstone):
        return Candidate(
            node_draining=node_draining,
            known=True,
            ended=found.reason,
            ended_detail=found.detail,
            quarantine=quarantine,
        )
    if found is None:
        return Candidate(node_draining=node_draining, known=False, not_asked=not_asked)
    ready = found.committed_at is not None
    return Candidate(
        node_draining=node_draining,
        known=True,
        descriptor=found.descriptor if ready else None,
        quarantine=quarantine,
    )


def readable(found: Found, terms: AcquireTerms) -> Found:
    """Return what there is, if its tokens mean the same to the consumer: another tokenizer has other words for them."""
    source = computed_by(found)
    return found if source is not None and source.tokenizer_digest == terms.model.tokenizer_digest else None


def answer_to(part: Part) -> Leased | Fallback:
    """Return what the consumer is told of a part that is decided."""
    found = part.found
    if part.grant is not None:
        assert isinstance(found, Payload), part
        assert found.descriptor is not None, part
        expected = part.terms.aligner if found.descriptor.aligner is None else None
        return Leased(grant=part.grant, descriptor=found.descriptor, aligner_to_apply=expected)
    failure, shown = part.verdict.failure, readable(found, part.terms)
    assert failure is not None, part
    return Fallback(
        finding=failure,
        fallback=FallbackText() if found is None else found.fallback,
        tokens=None if shown is None else shown.tokens,
        retry_after_seconds=_NOT_READY_RETRY_SECONDS if failure.reason is Reason.PAYLOAD_NOT_READY else None,
    )


def layout_of(parts: Sequence[Part]) -> AttentionLayout | None:
    """Return how the parts of a plan lie; None if the length of one is not known."""
    spans = []
    for part in parts:
        offset, length = part.place.token_offset, part.place.length
        if offset is None or length is None:
            return None
        position = part.terms.first_position + offset
        if position + length > TOKENS_MAX:
            return None
        spans.append(AttentionSpan(first_position=position, length=length, cached=part.grant is not None))
    return AttentionLayout(spans=tuple(spans)) if sum(span.length for span in spans) <= TOKENS_MAX else None


def record_of(part: Part) -> PartRecord:
    """Return what the journal keeps of a part."""
    found = part.found
    descriptor = found.descriptor if isinstance(found, Payload | Foreign) else None
    known = {} if descriptor is None else _described(descriptor, part.terms)
    return PartRecord(
        reference=part.terms.reference if found is None else found.reference,
        verdict=part.verdict,
        leased=part.grant is not None,
        route=part.passage.route,
        route_mode=part.passage.conditions.policy.mode,
        trial=part.passage.trial,
        payload_id=found.payload_id if isinstance(found, Payload) else None,
        verified_now=part.verified_now,
        pull=part.pull,
        **known,
    )


def _described(descriptor: PayloadDescriptor, terms: AcquireTerms) -> dict[str, Any]:
    return {
        "valid_length": descriptor.valid_length,
        "payload_bytes": descriptor.canonical_bytes,
        "verified_at_commit": descriptor.verified,
        "aligner": descriptor.aligner or terms.aligner,
        "aligner_applied": descriptor.aligner is not None,
    }
