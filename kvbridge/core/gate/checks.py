"""The checks, one for each reason that a node can give, in the order in which they are asked.

Each check is a pure function that returns what is wrong, or None. The first stage asks whether there is a payload at
all; the second compares its descriptor with the consumer's terms. A comparison that cannot be made counts as failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvbridge.core.descriptor import PayloadDescriptor
from kvbridge.core.gate.request import AcquireTerms, Candidate
from kvbridge.core.geometry import CacheGeometry, LayerGroup
from kvbridge.core.reasons import Reason

_TOKENIZER_FIELD = "tokenizer_digest"


class Stage(Enum):
    """What a check needs to see."""

    PRESENCE = auto()
    """Only what the node knows; a failure ends the questioning, for there is no descriptor to look at."""
    TERMS = auto()
    """Descriptor and terms; all of these are asked, so that the verdict shows every difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question and the reason that its failure gives."""

    reason: Reason
    """What the consumer is told."""
    stage: Stage
    """What the check needs to see."""
    problem: Callable[[AcquireTerms, Candidate], str | None]
    """Returns what is wrong, for a person, or None."""


def _node_serves(_: AcquireTerms, candidate: Candidate) -> str | None:
    return "the node is shutting down" if candidate.node_draining else None


def _is_known(terms: AcquireTerms, candidate: Candidate) -> str | None:
    wanted = f" generation {terms.reference.generation}" if terms.reference.generation else ""
    return None if candidate.known else f"nothing is known under this key{wanted}"


def _did_not_end_with(reason: Reason) -> Callable[[AcquireTerms, Candidate], str | None]:
    def problem(_: AcquireTerms, candidate: Candidate) -> str | None:
        return candidate.ended_detail or reason.lower() if candidate.ended is reason else None

    return problem


def _is_ready(_: AcquireTerms, candidate: Candidate) -> str | None:
    return "the producer has not committed it yet" if candidate.descriptor is None else None


def _format_is_read(terms: AcquireTerms, candidate: Candidate) -> str | None:
    version = _described(candidate).format_version
    if version <= terms.format_version_max:
        return None
    return f"payload has format version {version}, consumer reads up to {terms.format_version_max}"


def _model_is_the_same(terms: AcquireTerms, candidate: Candidate) -> str | None:
    differences = terms.model.differences(_described(candidate).model)
    return "; ".join(str(difference) for difference in differences if difference.field != _TOKENIZER_FIELD) or None


def _tokenizer_is_the_same(terms: AcquireTerms, candidate: Candidate) -> str | None:
    differences = terms.model.differences(_described(candidate).model)
    return "; ".join(str(difference) for difference in differences if difference.field == _TOKENIZER_FIELD) or None


def _tokens_are_a_prefix(terms: AcquireTerms, candidate: Candidate) -> str | None:
    cached = _described(candidate).tokens
    if terms.tokens is None or cached.count > terms.tokens.count or terms.tokens.starts_with(cached):
        return None
    return f"the {cached.count} cached tokens are not a prefix of the consumer's {terms.tokens.count}"


def _geometry_is_accepted(terms: AcquireTerms, candidate: Candidate) -> str | None:
    found = _described(candidate).geometry
    if terms.geometry is None or terms.geometry is found:
        return None
    return _geometry_difference(terms.geometry, found)


def _valid_length_fits(terms: AcquireTerms, candidate: Candidate) -> str | None:
    valid_length = _described(candidate).valid_length
    if valid_length < terms.valid_length_min:
        return f"payload has {valid_length} valid tokens, consumer needs at least {terms.valid_length_min}"
    if terms.tokens is not None and valid_length > terms.tokens.count:
        return f"payload has {valid_length} valid tokens, more than the consumer's {terms.tokens.count}"
    return None


def _positions_are_the_same(terms: AcquireTerms, candidate: Candidate) -> str | None:
    descriptor = _described(candidate)
    if descriptor.first_position != terms.first_position:
        return f"first position: consumer has {terms.first_position}, payload has {descriptor.first_position}"
    if terms.geometry is None or terms.geometry is descriptor.geometry:
        return None
    for layer in set(terms.geometry.layers) & set(descriptor.geometry.layers):
        mine = terms.geometry.group_of(layer).position_encoding
        theirs = descriptor.geometry.group_of(layer).position_encoding
        if mine != theirs:
            return f"layer {layer}: consumer has {mine}, payload has {theirs}"
    return None


CHECKS: tuple[Check, ...] = (
    Check(reason=Reason.DRAINING, stage=Stage.PRESENCE, problem=_node_serves),
    Check(reason=Reason.PAYLOAD_UNKNOWN, stage=Stage.PRESENCE, problem=_is_known),
    *(
        Check(reason=reason, stage=Stage.PRESENCE, problem=_did_not_end_with(reason))
        for reason in (
            Reason.PAYLOAD_EXPIRED,
            Reason.MEMORY_EXHAUSTED,
            Reason.PAYLOAD_CORRUPT,
            Reason.VALUES_NOT_FINITE,
        )
    ),
    Check(reason=Reason.PAYLOAD_NOT_READY, stage=Stage.PRESENCE, problem=_is_ready),
    Check(reason=Reason.FORMAT_UNSUPPORTED, stage=Stage.TERMS, problem=_format_is_read),
    Check(reason=Reason.MODEL_VERSION_MISMATCH, stage=Stage.TERMS, problem=_model_is_the_same),
    Check(reason=Reason.TOKENIZER_MISMATCH, stage=Stage.TERMS, problem=_tokenizer_is_the_same),
    Check(reason=Reason.TOKENS_MISMATCH, stage=Stage.TERMS, problem=_tokens_are_a_prefix),
    Check(reason=Reason.GEOMETRY_MISMATCH, stage=Stage.TERMS, problem=_geometry_is_accepted),
    Check(reason=Reason.VALID_LENGTH_INVALID, stage=Stage.TERMS, problem=_valid_length_fits),
    Check(reason=Reason.POSITION_ENCODING_MISMATCH, stage=Stage.TERMS, problem=_positions_are_the_same),
)
"""Every check in order. What the checks of bytes found, at commit or later, is remembered and asked for here."""


def _described(candidate: Candidate) -> PayloadDescriptor:
    assert candidate.descriptor is not None, "terms are compared only once there is a descriptor"
    return candidate.descriptor


def _geometry_difference(mine: CacheGeometry, theirs: CacheGeometry) -> str | None:
    """Return the first difference but for position encodings, which have a check of their own."""
    for name in ("tensor_parallel_rank", "tensor_parallel_size"):
        if getattr(mine, name) != getattr(theirs, name):
            return f"{name}: consumer has {getattr(mine, name)}, payload has {getattr(theirs, name)}"
    if mine.layers != theirs.layers:
        return f"layers: consumer has {_span(mine)}, payload has {_span(theirs)}"
    for layer in mine.layers:
        difference = _group_difference(mine.group_of(layer), theirs.group_of(layer))
        if difference:
            return f"layer {layer}: {difference}"
    return None


_GROUP_FIELDS = (
    "kind",
    "kv_heads",
    "head_dim_k",
    "head_dim_v",
    "dtype",
    "order",
    "window_tokens",
    "stored_tokens_max",
)


def _group_difference(mine: LayerGroup, theirs: LayerGroup) -> str | None:
    for name in _GROUP_FIELDS:
        if getattr(mine, name) != getattr(theirs, name):
            return f"{name}: consumer has {getattr(mine, name)}, payload has {getattr(theirs, name)}"
    return None


def _span(geometry: CacheGeometry) -> str:
    return f"{len(geometry.layers)} layers from {geometry.layers[0]} to {geometry.layers[-1]}"
