"""Records of handoffs for tests to start from, made by the real gate, and hypothesis strategies over them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from kvbridge.core.catalog.policy import RouteMode
from kvbridge.core.descriptor import PayloadReference, Verification, seal
from kvbridge.core.gate import AcquireTerms, Candidate, Conditions, Question, Verdict, decide
from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, Outcome, PartRecord, Pull, RouteKey
from kvbridge.core.reasons import SDK_ONLY_REASONS, Reason
from tests import builders

CLIENT = "session.of-the-consumer"
ROUTE = RouteKey(route="default", source=builders.model_tag(), target=builders.model_tag(), edge="")

_DESCRIPTOR = seal(
    builders.spec(), generation=1, valid_length=None, tokens=None, layer_digests=(), verification=Verification.DIGEST
)


def verdict(*, terms: dict[str, Any] | None = None, **candidate: Any) -> Verdict:
    """Return what the gate says of a handoff that is valid but for some fields of its candidate and terms."""
    fields: dict[str, Any] = {
        "reference": PayloadReference(key="conversation/1", generation=0),
        "model": builders.model_tag(),
        "geometry": builders.geometry(),
        "tokens": builders.tokens(12),
    }
    question = Question(
        terms=AcquireTerms(**{**fields, **(terms or {})}),
        candidate=Candidate(**{"known": True, "descriptor": _DESCRIPTOR, **candidate}),
        conditions=Conditions(),
    )
    return decide(question, clock=time.perf_counter)


def leased(**changes: Any) -> PartRecord:
    """Return a part that was handed over as a cache, with some fields changed."""
    part = PartRecord(
        reference=PayloadReference(key="conversation/1", generation=1),
        verdict=verdict(),
        leased=True,
        route=ROUTE,
        route_mode=RouteMode.ON,
        payload_id=1,
        valid_length=10,
        payload_bytes=2560,
        verified_at_commit=Verification.DIGEST,
    )
    return replace(part, **changes)


def refused(reason: Reason = Reason.PAYLOAD_EXPIRED, **changes: Any) -> PartRecord:
    """Return a part that fell back for `reason`, one that a payload ends for, with some fields changed."""
    found = verdict(descriptor=None, ended=reason, ended_detail=f"ended: {reason}")
    assert found.failure is not None
    part = leased(verdict=found, leased=False, payload_id=None, valid_length=0, payload_bytes=0)
    return replace(part, verified_at_commit=None, **changes)


def record(*parts: PartRecord, **changes: Any) -> HandoffRecord:
    """Return the record of a handoff of `parts`, by default one that was leased, with some fields changed."""
    fields: dict[str, Any] = {
        "handoff_id": "handoff-1",
        "at": 1_796_000_000.25,
        "tenant": "default",
        "client_id": CLIENT,
        "model": builders.model_tag(),
        "edge": "plan",
        "depth": 1,
        "seconds": 0.0004,
        "deadline_seconds": 2.5,
        "parts": parts or (leased(),),
    }
    return HandoffRecord(**{**fields, **changes})


ENDING_REASONS = (
    Reason.PAYLOAD_EXPIRED,
    Reason.MEMORY_EXHAUSTED,
    Reason.PAYLOAD_CORRUPT,
    Reason.VALUES_NOT_FINITE,
    Reason.TRANSFER_FAILED,
)
"""Some of the reasons that `refused` can give."""
NODE_REASONS = [reason for reason in Reason if reason not in SDK_ONLY_REASONS]
"""Every reason that a node can give."""

outcomes = st.builds(
    Outcome,
    use=st.sampled_from(HandoffUse),
    quality=st.sampled_from([None, *HandoffQuality]),
    detail=st.text(max_size=20),
    tokens_saved=st.integers(0, 1000),
)
"""What a consumer may report."""
verifications = st.sampled_from(Verification)
pulls = st.builds(
    Pull,
    node_id=builders.names,
    by=st.sampled_from(["grpc", "tcp"]),
    nbytes=st.integers(0, 2**40),
    seconds=st.floats(0, 100),
    from_replica=st.booleans(),
)
"""What may have been brought over for a part."""
leased_parts = st.builds(
    leased,
    verified_at_commit=verifications,
    verified_now=verifications,
    trial=st.booleans(),
    aligner=st.one_of(st.none(), builders.aligners),
    aligner_applied=st.booleans(),
    pull=st.one_of(st.none(), pulls),
    verdict=st.sampled_from([verdict(), verdict(terms={"tokens": None})]),
)
parts = st.one_of(leased_parts, st.builds(refused, st.sampled_from(ENDING_REASONS)))
records = st.builds(
    lambda parts, outcome, by_value, depth: record(*parts, outcome=outcome, by_value=by_value, depth=depth),
    st.lists(parts, min_size=1, max_size=3),
    st.one_of(st.none(), outcomes),
    st.booleans(),
    st.integers(0, 3),
)
"""Handoffs of every kind."""
