"""What is declared about payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kvbridge.core.descriptor import (
    FallbackText,
    PayloadDescriptor,
    PayloadReference,
    PayloadSpec,
    Verification,
    check_key,
)
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.tokens import TokenSequence
from kvbridge.core.transfer_encoding import TransferEncoding, form_of
from kvbridge.v1 import types_pb2 as pb
from kvbridge.v1.handoff_service_pb2 import PayloadSeal
from kvbridge.wire.durations import decode_duration, encode_duration
from kvbridge.wire.enums import EnumCodec
from kvbridge.wire.geometry import decode_geometry, encode_geometry
from kvbridge.wire.tags import (
    decode_aligner_tag,
    decode_media,
    decode_model_tag,
    encode_aligner_tag,
    encode_media,
    encode_model_tag,
)
from kvbridge.wire.tokens import decode_tokens, encode_tokens
from kvbridge.wire.transfers import decode_transfer_encoding, encode_transfer_encoding

_VERIFICATIONS = EnumCodec(Verification, dict(pb.Verification.items()), "VERIFICATION_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What a producer declares about the bytes that it has written."""

    valid_length: int | None = None
    """Tokens that are real; absent if all declared tokens are."""
    tokens: TokenSequence | None = None
    """The tokens, if they were not declared at reserve or have changed."""
    fallback: FallbackText | None = None
    """The fallback, if it was not declared at reserve or has changed."""
    layer_digests: tuple[bytes, ...] = ()
    """XXH3-128 of each layer's canonical bytes; empty to let the node digest what it finds."""
    verification: Verification = Verification.FULL
    """How much of the bytes the node checks."""
    hold: bool = False
    """Whether the producer keeps a reference."""


def encode_verification(verification: Verification) -> pb.Verification.ValueType:
    """Return the number of `verification`."""
    return cast("pb.Verification.ValueType", _VERIFICATIONS.encode(verification))


def decode_verification(number: int, default: Verification, field: str = "verification") -> Verification:
    """Return the level with this `number`, or `default` if it was left unspecified.

    Raises:
        InvalidFieldError: the number is unknown.
    """
    return default if number == pb.VERIFICATION_UNSPECIFIED else _VERIFICATIONS.decode(number, field)


def encode_reference(reference: PayloadReference) -> pb.PayloadReference:
    """Return `reference` as a message."""
    return pb.PayloadReference(key=reference.key, generation=reference.generation)


def decode_reference(message: pb.PayloadReference) -> PayloadReference:
    """Return the reference in `message`; generation 0 stands for the newest.

    Raises:
        InvalidFieldError: the key is empty, too long or unprintable.
    """
    check_key(message.key)
    return PayloadReference(key=message.key, generation=message.generation)


def encode_fallback(fallback: FallbackText) -> pb.FallbackText:
    """Return `fallback` as a message."""
    message = pb.FallbackText(summary=fallback.summary or "")
    if fallback.text is not None:
        message.text = fallback.text
    elif fallback.text_uri is not None:
        message.text_uri = fallback.text_uri
    return message


def decode_fallback(message: pb.FallbackText) -> FallbackText:
    """Return the fallback in `message`.

    Raises:
        InvalidFieldError: the text or URI is too long.
    """
    content = message.WhichOneof("content")
    return FallbackText(
        text=message.text if content == "text" else None,
        text_uri=message.text_uri if content == "text_uri" else None,
        summary=message.summary or None,
    )


def encode_spec(spec: PayloadSpec) -> pb.PayloadSpec:
    """Return `spec` as a message."""
    return pb.PayloadSpec(
        key=spec.key,
        model=encode_model_tag(spec.model),
        geometry=encode_geometry(spec.geometry),
        capacity_tokens=spec.capacity_tokens,
        first_position=spec.first_position,
        tokens=None if spec.tokens is None else encode_tokens(spec.tokens),
        fallback=encode_fallback(spec.fallback),
        derived_from=[encode_reference(reference) for reference in spec.derived_from],
        linger=None if spec.linger_seconds is None else encode_duration(spec.linger_seconds),
        ttl=None if spec.ttl_seconds is None else encode_duration(spec.ttl_seconds),
        aligner=None if spec.aligner is None else encode_aligner_tag(spec.aligner),
        media=encode_media(spec.media),
        context_digest=spec.context_digest,
    )


def decode_spec(message: pb.PayloadSpec) -> PayloadSpec:
    """Return the spec in `message`.

    Raises:
        InvalidFieldError: a field is missing or out of range.
    """
    for required in ("model", "geometry"):
        require(message.HasField(required), required)
    return PayloadSpec(
        key=message.key,
        model=decode_model_tag(message.model),
        geometry=decode_geometry(message.geometry),
        capacity_tokens=message.capacity_tokens,
        first_position=message.first_position,
        tokens=decode_tokens(message.tokens) if message.HasField("tokens") else None,
        fallback=decode_fallback(message.fallback),
        derived_from=tuple(decode_reference(reference) for reference in message.derived_from),
        linger_seconds=decode_duration(message.linger, "linger") if message.HasField("linger") else None,
        ttl_seconds=decode_duration(message.ttl, "ttl") if message.HasField("ttl") else None,
        aligner=decode_aligner_tag(message.aligner) if message.HasField("aligner") else None,
        media=decode_media(message.media),
        context_digest=message.context_digest,
    )


def encode_seal(seal: Seal) -> PayloadSeal:
    """Return `seal` as a message."""
    return PayloadSeal(
        valid_length=seal.valid_length or 0,
        tokens=None if seal.tokens is None else encode_tokens(seal.tokens),
        fallback=None if seal.fallback is None else encode_fallback(seal.fallback),
        layer_digests=seal.layer_digests,
        verification=encode_verification(seal.verification),
        hold=seal.hold,
    )


def decode_seal(message: PayloadSeal) -> Seal:
    """Return the seal in `message`.

    Raises:
        InvalidFieldError: a field is out of range.
    """
    return Seal(
        valid_length=message.valid_length or None,
        tokens=decode_tokens(message.tokens) if message.HasField("tokens") else None,
        fallback=decode_fallback(message.fallback) if message.HasField("fallback") else None,
        layer_digests=tuple(message.layer_digests),
        verification=decode_verification(message.verification, Verification.FULL),
        hold=message.hold,
    )


def encode_descriptor(descriptor: PayloadDescriptor, *, with_ids: bool = False) -> pb.PayloadDescriptor:
    """Return `descriptor` as a message; token ids only where wanted, for they can be long."""
    return pb.PayloadDescriptor(
        format_version=descriptor.format_version,
        reference=encode_reference(descriptor.reference),
        model=encode_model_tag(descriptor.model),
        geometry=encode_geometry(descriptor.geometry),
        capacity_tokens=descriptor.capacity_tokens,
        valid_length=descriptor.valid_length,
        first_position=descriptor.first_position,
        tokens=encode_tokens(descriptor.tokens, with_ids=with_ids),
        derived_from=[encode_reference(reference) for reference in descriptor.derived_from],
        layer_digests=descriptor.layer_digests,
        verified=encode_verification(descriptor.verified),
        aligner=None if descriptor.aligner is None else encode_aligner_tag(descriptor.aligner),
        media=encode_media(descriptor.media),
        context_digest=descriptor.context_digest,
        transfer_encoding=encode_transfer_encoding(descriptor.transfer_form.encoding),
        exact_layers_first=descriptor.transfer_form.exact_layers_first,
    )


def decode_descriptor(message: pb.PayloadDescriptor) -> PayloadDescriptor:
    """Return the descriptor in `message`.

    Raises:
        InvalidFieldError: a field is missing or out of range.
    """
    return PayloadDescriptor(
        format_version=message.format_version,
        reference=decode_reference(message.reference),
        model=decode_model_tag(message.model),
        geometry=decode_geometry(message.geometry),
        capacity_tokens=message.capacity_tokens,
        valid_length=message.valid_length,
        first_position=message.first_position,
        tokens=decode_tokens(message.tokens),
        derived_from=tuple(decode_reference(reference) for reference in message.derived_from),
        layer_digests=tuple(message.layer_digests),
        verified=decode_verification(message.verified, Verification.NONE, "verified"),
        aligner=decode_aligner_tag(message.aligner) if message.HasField("aligner") else None,
        media=decode_media(message.media),
        context_digest=message.context_digest,
        transfer_form=form_of(
            decode_transfer_encoding(message.transfer_encoding, TransferEncoding.EXACT, "transfer_encoding"),
            message.exact_layers_first,
        ),
    )


def require(present: bool, field: str) -> None:  # noqa: FBT001 - reads as an assertion
    """Refuse a request that lacks a required `field`.

    Raises:
        InvalidFieldError: it is not present.
    """
    if not present:
        raise InvalidFieldError(field, "is required")
