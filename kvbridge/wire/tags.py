"""Version tags, media and reasons."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import cast

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.media import MediaItem
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.v1 import types_pb2 as pb
from kvbridge.wire.enums import EnumCodec

_MODEL_TAGS_MAX = 1024
"""Most tags of models that are kept: nearly every call names one of few, and to check its fields takes longer."""
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
    return _model_tag(message.name, message.revision, message.adapter, message.weight_dtype, message.tokenizer_digest)


@lru_cache(maxsize=_MODEL_TAGS_MAX)
def _model_tag(name: str, revision: str, adapter: str, weight_dtype: str, tokenizer_digest: str) -> ModelTag:
    return ModelTag(
        name=name, revision=revision, adapter=adapter, weight_dtype=weight_dtype, tokenizer_digest=tokenizer_digest
    )


def encode_aligner_tag(tag: AlignerTag) -> pb.AlignerTag:
    """Return `tag` as a message."""
    return pb.AlignerTag(
        name=tag.name,
        version=tag.version,
        source=encode_model_tag(tag.source),
        target=encode_model_tag(tag.target),
        digest=tag.digest,
    )


def decode_aligner_tag(message: pb.AlignerTag) -> AlignerTag:
    """Return the tag in `message`.

    Raises:
        InvalidFieldError: a field is missing, empty, too long or unprintable.
    """
    for side in ("source", "target"):
        if not message.HasField(side):
            raise InvalidFieldError(f"aligner.{side}", "is required")
    return AlignerTag(
        name=message.name,
        version=message.version,
        source=decode_model_tag(message.source),
        target=decode_model_tag(message.target),
        digest=message.digest,
    )


def encode_media(media: Iterable[MediaItem]) -> list[pb.MediaItem]:
    """Return `media` as messages."""
    return [pb.MediaItem(token_index=item.token_index, digest=item.digest) for item in media]


def decode_media(messages: Iterable[pb.MediaItem]) -> tuple[MediaItem, ...]:
    """Return the media in `messages`.

    Raises:
        InvalidFieldError: a digest has another length than SHA-256.
    """
    return tuple(MediaItem(token_index=message.token_index, digest=message.digest) for message in messages)


def encode_reason(reason: Reason) -> pb.Reason.ValueType:
    """Return the number of `reason`."""
    return cast("pb.Reason.ValueType", _REASONS.encode(reason))


def decode_reason(number: int, field: str = "reason") -> Reason:
    """Return the reason with this `number`.

    Raises:
        InvalidFieldError: the number is unknown to this release.
    """
    return _REASONS.decode(number, field)
