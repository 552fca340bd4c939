"""Why a consumer is told to take the text: the closed list of fallback reasons."""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class Reason(StrEnum):
    """One reason, one check that gives it, one test that provokes it."""

    PAYLOAD_UNKNOWN = "PAYLOAD_UNKNOWN"
    """Nothing was ever published under this key, or it is another tenant's, or it was forgotten."""
    PAYLOAD_EXPIRED = "PAYLOAD_EXPIRED"
    """The payload reached its time to live, lingered unreferenced for too long, or was never committed."""
    PAYLOAD_NOT_READY = "PAYLOAD_NOT_READY"
    """The producer has reserved but not yet committed, or the node is still verifying."""
    PAYLOAD_CORRUPT = "PAYLOAD_CORRUPT"
    """The bytes differ from the digest that was declared or sealed."""
    VALUES_NOT_FINITE = "VALUES_NOT_FINITE"
    """A value inside the valid length is NaN or infinite."""
    FORMAT_UNSUPPORTED = "FORMAT_UNSUPPORTED"
    """The payload's format version is not one that the consumer reads."""
    GEOMETRY_MISMATCH = "GEOMETRY_MISMATCH"
    """Layers, kinds, heads, dimensions, dtype, order or sharding differ from what the consumer accepts."""
    VALID_LENGTH_INVALID = "VALID_LENGTH_INVALID"
    """The valid length does not fit the consumer's tokens or the least length that it asked for."""
    TOKENS_MISMATCH = "TOKENS_MISMATCH"
    """The cached tokens are not a prefix of the consumer's tokens."""
    TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH"
    """Producer and consumer use different tokenizers or chat templates."""
    MODEL_VERSION_MISMATCH = "MODEL_VERSION_MISMATCH"
    """Name, revision, adapter or weight dtype of the model differ."""
    POSITION_ENCODING_MISMATCH = "POSITION_ENCODING_MISMATCH"
    """Rotary parameters or the first position differ from the consumer's."""
    MEMORY_EXHAUSTED = "MEMORY_EXHAUSTED"
    """No memory could be had for the payload, or its tensors were evicted under memory pressure."""
    DRAINING = "DRAINING"
    """The node is shutting down and gives no new leases."""
    BRIDGE_UNREACHABLE = "BRIDGE_UNREACHABLE"
    """Made by the SDK alone: the bridge did not answer within the deadline, or answered with an error."""


SDK_ONLY_REASONS = frozenset({Reason.BRIDGE_UNREACHABLE})
"""Reasons that no node ever sends."""
