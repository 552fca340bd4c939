"""Texts that are kept on disk, in the words in which a node tells another one that a payload is gone."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.kept_text import KeptText
from kvbridge.core.reasons import Reason
from kvbridge.v1.peer_service_pb2 import ClosedPayload
from kvbridge.wire.payloads import decode_fallback, encode_fallback
from kvbridge.wire.tags import decode_model_tag, encode_model_tag
from kvbridge.wire.tokens import decode_tokens, encode_tokens


def encode_kept_text(kept: KeptText) -> bytes:
    """Return everything that does not change about a text: model, fallback and tokens."""
    message = ClosedPayload(
        model=encode_model_tag(kept.model),
        fallback=encode_fallback(kept.fallback),
        tokens=None if kept.tokens is None else encode_tokens(kept.tokens),
    )
    return message.SerializeToString(deterministic=True)


def decode_kept_text(
    content: bytes, reference: PayloadReference, *, reason: Reason | None = None, detail: str = ""
) -> KeptText:
    """Return a text with why its payload ended, if so.

    Raises:
        InvalidFieldError: no node wrote that.
    """
    try:
        message = ClosedPayload.FromString(content)
    except DecodeError as error:
        raise InvalidFieldError("content", f"is no message: {error}") from error
    return KeptText(
        reference=reference,
        model=decode_model_tag(message.model),
        fallback=decode_fallback(message.fallback),
        tokens=decode_tokens(message.tokens) if message.HasField("tokens") else None,
        reason=reason,
        detail=detail,
    )
