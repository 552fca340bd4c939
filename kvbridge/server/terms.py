"""What a consumer asks for, out of its message, and how its plan lies, into one."""

from __future__ import annotations

from dataclasses import replace

from kvbridge.core.attention import AttentionLayout
from kvbridge.core.catalog.policy import DEPTH_MAX
from kvbridge.core.descriptor import FORMAT_VERSION, PayloadReference, Verification
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.geometry import TOKENS_MAX
from kvbridge.core.media import MediaItem, check_media
from kvbridge.core.tokens import TokenSequence
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.identity import Client
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import (
    decode_aligner_tag,
    decode_geometry,
    decode_media,
    decode_model_tag,
    decode_reference,
    decode_tokens,
    decode_verification,
)
from kvbridge.wire.payloads import require

LABEL_CHARACTERS_MAX = 256
"""Longest edge and affinity."""


def decode_acquisition(
    request: pb.AcquireRequest, client: Client, arrived_at: float, deadline_seconds: float | None
) -> Acquisition:
    """Return what `client` asks for; all parts share their terms but for the reference.

    Raises:
        InvalidFieldError: a field is missing or out of range.
    """
    require(bool(request.payloads), "payloads")
    require(request.HasField("model"), "model")
    first, *others = [decode_reference(reference) for reference in request.payloads]
    terms = _decode_terms(request, first)
    return Acquisition(
        client=client,
        parts=(terms, *(replace(terms, reference=reference) for reference in others)),
        verification=decode_verification(request.verification, Verification.NONE),
        deadline_seconds=deadline_seconds,
        arrived_at=arrived_at,
    )


def encode_layout(layout: AttentionLayout) -> pb.AttentionLayout:
    """Return `layout` as a message."""
    return pb.AttentionLayout(
        spans=[
            pb.AttentionSpan(first_position=span.first_position, length=span.length, cached=span.cached)
            for span in layout.spans
        ]
    )


def _decode_terms(request: pb.AcquireRequest, reference: PayloadReference) -> AcquireTerms:
    return AcquireTerms(
        reference=reference,
        model=decode_model_tag(request.model),
        geometry=decode_geometry(request.geometry) if request.HasField("geometry") else None,
        tokens=_decode_expected_tokens(request.tokens),
        first_position=_at_most("first_position", request.first_position, TOKENS_MAX),
        valid_length_min=request.valid_length_min or 1,
        format_version_max=request.format_version_max or FORMAT_VERSION,
        media=_decode_media(request),
        aligner=decode_aligner_tag(request.aligner) if request.HasField("aligner") else None,
        edge=_label("edge", request.edge),
        depth=_at_most("depth", request.depth, DEPTH_MAX),
        affinity=_label("affinity", request.affinity) or reference.key,
    )


def _decode_media(request: pb.AcquireRequest) -> tuple[MediaItem, ...]:
    media = decode_media(request.media)
    check_media(media, tokens_max=TOKENS_MAX)
    return media


def _decode_expected_tokens(message: pb.ExpectedTokens) -> TokenSequence | None:
    expectation = message.WhichOneof("expectation")
    if expectation == "prefix_of":
        return decode_tokens(message.prefix_of, "tokens.prefix_of")
    require(expectation == "any" and message.any, "tokens")
    return None


def _at_most(field: str, value: int, most: int) -> int:
    if value > most:
        raise InvalidFieldError(field, f"must be at most {most}, got {value}")
    return value


def _label(field: str, text: str) -> str:
    if len(text) > LABEL_CHARACTERS_MAX or not text.isprintable():
        raise InvalidFieldError(field, f"must be at most {LABEL_CHARACTERS_MAX} printable characters")
    return text
