"""Model tags and reasons."""

from __future__ import annotations

from typing import cast

from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.v1 import types_pb2 as pb
from kvbridge.wire.enums import EnumCodec

_REASONS = EnumCodec(Reason, dict(pb.Reason.items()), "REASON_")


def encode_model_tag(tag: ModelTag) -> pb.ModelTag:
    """Return `tag` as a message."""
    return pb.ModelTag(
        name=tag.name,
        revision=tag.revision,
        adapter=tag.adapter,
        weight_dtype=tag.weight_dtype,
        tokenizer_digest=tag.tokenizer_digest,
    )


def decode_model_tag(message: pb.ModelTag) -> ModelTag:
    """Return the tag in `message`.

    Raises:
        InvalidFieldError: a field is empty, too long or unprintable.
    """
    return ModelTag(
        name=message.name,
        revision=message.revision,
        adapter=message.adapter,
        weight_dtype=message.weight_dtype,
        tokenizer_digest=message.tokenizer_digest,
    )


def encode_reason(reason: Reason) -> pb.Reason.ValueType:
    """Return the number of `reason`."""
    return cast("pb.Reason.ValueType", _REASONS.encode(reason))


def decode_reason(number: int, field: str = "reason") -> Reason:
    """Return the reason with this `number`.

    Raises:
        InvalidFieldError: the number is unknown to this release.
    """
    return _REASONS.decode(number, field)
