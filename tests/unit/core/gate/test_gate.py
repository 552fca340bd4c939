"""The gate's checks: each reason from a handoff that is valid but for one thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbridge.core.catalog.policy import RoutePolicy
from kvbridge.core.descriptor import PayloadReference, Verification, seal
from kvbridge.core.gate import CHECKS, AcquireTerms, Candidate, Conditions, Question, Verdict, decide
from kvbridge.core.geometry import (
    CacheGeometry,
    DimensionOrder,
    Dtype,
    LayerKind,
    PositionEncoding,
    PositionKind,
    RopePairing,
    RopeParameters,
)
from kvbridge.core.reasons import SDK_ONLY_REASONS, Reason
from kvbridge.core.tokens import TokenSequence
from kvbridge.v1 import types_pb2
from tests import builders

DESCRIPTOR = seal(
    builders.spec(), generation=1, valid_length=None, tokens=None, layer_digests=(), verification=Verification.FULL
)
CANDIDATE = Candidate(known=True, descriptor=DESCRIPTOR)
TERMS = AcquireTerms(
    reference=PayloadReference(key="conversation/1", generation=0),
    model=builders.model_tag(),
    geometry=builders.geometry(),
    tokens=builders.tokens(12),
)
CONDITIONS = Conditions(policy=RoutePolicy())


def rope(**changes: Any) -> PositionEncoding:
    """Return a rotation with some parameters changed."""
    return PositionEncoding(kind=PositionKind.ROPE, rope=RopeParameters(**{"theta": 10_000.0, **changes}))


def verdict_on(
    terms: AcquireTerms = TERMS, candidate: Candidate = CANDIDATE, conditions: Conditions = CONDITIONS
) -> Verdict:
    """Return what the gate decides."""
    return decide(Question(terms=terms, candidate=candidate, conditions=conditions))


def reason_for(
    terms: AcquireTerms = TERMS, candidate: Candidate = CANDIDATE, conditions: Conditions = CONDITIONS
) -> Reason | None:
    """Return the reason that the gate gives, or None if the handoff passes."""
    failure = verdict_on(terms, candidate, conditions).failure
    return None if failure is None else failure.reason


PRESENCE = [
    (replace(CANDIDATE, node_draining=True), Reason.DRAINING),
    (Candidate(known=False), Reason.PAYLOAD_UNKNOWN),
    (Candidate(known=True), Reason.PAYLOAD_NOT_READY),
    *(
        (Candidate(known=True, ended=reason, ended_detail="why"), reason)
        for reason in (
            Reason.PAYLOAD_EXPIRED,
            Reason.PAYLOAD_CORRUPT,
            Reason.VALUES_NOT_FINITE,
            Reason.MEMORY_EXHAUSTED,
            Reason.PROBE_BELOW_THRESHOLD,
            Reason.OWNER_UNREACHABLE,
            Reason.TRANSFER_FAILED,
            Reason.QUARANTINED,
        )
    ),
    (replace(CANDIDATE, quarantine="model tiny is quarantined"), Reason.QUARANTINED),
]

TERMS_CASES = [
    ({"format_version_max": 0}, Reason.FORMAT_UNSUPPORTED),
    ({"model": builders.model_tag(name="other")}, Reason.MODEL_VERSION_MISMATCH),
    ({"model": builders.model_tag(revision="xxh3:01")}, Reason.MODEL_VERSION_MISMATCH),
    ({"model": builders.model_tag(adapter="lora:1")}, Reason.MODEL_VERSION_MISMATCH),
    ({"model": builders.model_tag(weight_dtype="bfloat16")}, Reason.MODEL_VERSION_MISMATCH),
    ({"model": builders.model_tag(tokenizer_digest="t1")}, Reason.TOKENIZER_MISMATCH),
    ({"tokens": builders.tokens(12, first=1)}, Reason.TOKENS_MISMATCH),
    ({"tokens": TokenSequence(count=12, digest=builders.tokens(12).digest)}, Reason.TOKENS_MISMATCH),
    ({"tokens": builders.tokens(9)}, Reason.VALID_LENGTH_INVALID),
    ({"valid_length_min": 11}, Reason.VALID_LENGTH_INVALID),
    ({"first_position": 1}, Reason.POSITION_ENCODING_MISMATCH),
    ({"geometry": builders.geometry(kv_heads=1)}, Reason.GEOMETRY_MISMATCH),
    ({"geometry": builders.geometry(head_dim_k=4)}, Reason.GEOMETRY_MISMATCH),
    ({"geometry": builders.geometry(head_dim_v=4)}, Reason.GEOMETRY_MISMATCH),
    ({"geometry": builders.geometry(dtype=Dtype.BFLOAT16)}, Reason.GEOMETRY_MISMATCH),
    ({"geometry": builders.geometry(order=DimensionOrder.NHD)}, Reason.GEOMETRY_MISMATCH),
    ({"geometry": builders.geometry(layers=(0, 1, 2))}, Reason.GEOMETRY_MISMATCH),
    ({"geometry": builders.geometry(layers=(1, 2))}, Reason.GEOMETRY_MISMATCH),
    (
        {"geometry": builders.geometry(kind=LayerKind.SLIDING, window_tokens=8, stored_tokens_max=7)},
        Reason.GEOMETRY_MISMATCH,
    ),
    (
        {"geometry": CacheGeometry(groups=(builders.layer_group(),), tensor_parallel_size=2)},
        Reason.GEOMETRY_MISMATCH,
    ),
    *(
        ({"geometry": builders.geometry(position_encoding=encoding)}, Reason.POSITION_ENCODING_MISMATCH)
        for encoding in (
            rope(theta=500_000.0),
            rope(rope_type="linear"),
            rope(partial_factor=0.5),
            rope(pairing=RopePairing.INTERLEAVED),
            rope(scaling=(("factor", (2.0,)),)),
            PositionEncoding(kind=PositionKind.NONE),
        )
    ),
]


def test_a_valid_handoff_passes() -> None:
    """The case that all others differ from in one thing passes every check."""
    assert reason_for() is None
    assert {finding.reason for finding in verdict_on().findings} == {check.reason for check in CHECKS}


@pytest.mark.parametrize(("candidate", "reason"), PRESENCE)
def test_what_is_not_there_is_refused_with_its_reason(candidate: Candidate, reason: Reason) -> None:
    """Each way in which there is no payload to lease gives its own reason, and the questioning ends there."""
    verdict = verdict_on(candidate=candidate)
    assert verdict.failure is not None
    assert verdict.failure.reason is reason
    assert verdict.findings[-1] is verdict.failure


@pytest.mark.parametrize(("changes", "reason"), TERMS_CASES)
def test_one_difference_from_a_valid_handoff_is_refused_with_its_reason(
    changes: dict[str, Any], reason: Reason
) -> None:
    """Each single difference between terms and descriptor gives its own reason, and only that one."""
    verdict = verdict_on(replace(TERMS, **changes))
    assert [finding.reason for finding in verdict.failures] == [reason]
    assert verdict.failure is not None
    assert verdict.failure.problem


def test_the_finding_names_the_field_and_both_values() -> None:
    """A version mismatch says which field differs, what the consumer has and what the payload has."""
    failure = verdict_on(replace(TERMS, model=builders.model_tag(revision="xxh3:ff"))).failure
    assert failure is not None
    assert failure.problem == "revision: consumer has 'xxh3:ff', payload has 'xxh3:00'"


def test_all_differences_are_found_and_the_first_decides() -> None:
    """The verdict keeps every difference, and the directive gives the first in the table's order."""
    terms = replace(TERMS, model=builders.model_tag(name="other", tokenizer_digest="t1"), first_position=3)
    assert [finding.reason for finding in verdict_on(terms).failures] == [
        Reason.MODEL_VERSION_MISMATCH,
        Reason.TOKENIZER_MISMATCH,
        Reason.POSITION_ENCODING_MISMATCH,
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": builders.tokens(10)},
        {"tokens": TokenSequence(count=10, digest=builders.tokens(10).digest)},
        {"geometry": None},
        {"valid_length_min": 10},
    ],
)
def test_terms_that_the_payload_meets_pass(changes: dict[str, Any]) -> None:
    """Equal tokens, the same digest, any tokens and any geometry are accepted where the consumer says so."""
    assert reason_for(replace(TERMS, **changes)) is None


def test_every_reason_has_exactly_one_check_and_one_number() -> None:
    """Reasons, checks and the API's enumeration are the same set."""
    assert sorted(check.reason for check in CHECKS) == sorted(set(Reason) - SDK_ONLY_REASONS)
    assert set(types_pb2.Reason.keys()) == {f"REASON_{reason}" for reason in Reason} | {"REASON_UNSPECIFIED"}
