"""Token sequences."""

from __future__ import annotations

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.tokens import TokenSequence
from kvbridge.v1 import types_pb2 as pb


def encode_tokens(tokens: TokenSequence, *, with_ids: bool = True) -> pb.TokenSequence:
    """Return `tokens` as a message, with their ids only where wanted and known."""
    packed = tokens.packed_ids if with_ids and tokens.packed_ids is not None else b""
    return pb.TokenSequence(packed_ids=packed, count=tokens.count, digest=tokens.digest)


def decode_tokens(message: pb.TokenSequence, field: str = "tokens") -> TokenSequence:
    """Return the sequence in `message`; ids, if present, decide.

    Raises:
        InvalidFieldError: ids, count and digest disagree or are out of range.
    """
    if not message.packed_ids:
        return TokenSequence(count=message.count, digest=message.digest)
    tokens = TokenSequence.from_packed(message.packed_ids)
    if message.count and message.count != tokens.count:
        raise InvalidFieldError(f"{field}.count", f"is {message.count}, but {tokens.count} ids were given")
    if message.digest and message.digest != tokens.digest:
        raise InvalidFieldError(f"{field}.digest", "is not the digest of the ids that were given")
    return tokens
