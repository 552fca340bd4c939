"""Between protobuf messages and the core's dataclasses, in both directions.

`decode_*` trusts nothing: it raises `InvalidFieldError` with the field's path for whatever the core would not accept.
"""

from kvbridge.wire.durations import decode_duration, encode_duration
from kvbridge.wire.geometry import decode_geometry, encode_geometry
from kvbridge.wire.payloads import (
    Seal,
    decode_descriptor,
    decode_fallback,
    decode_reference,
    decode_seal,
    decode_spec,
    decode_verification,
    encode_descriptor,
    encode_fallback,
    encode_reference,
    encode_seal,
    encode_spec,
    encode_verification,
)
from kvbridge.wire.tags import (
    decode_aligner_tag,
    decode_media,
    decode_model_tag,
    decode_reason,
    encode_aligner_tag,
    encode_media,
    encode_model_tag,
    encode_reason,
)
from kvbridge.wire.tokens import decode_tokens, encode_tokens

__all__ = [
    "Seal",
    "decode_aligner_tag",
    "decode_descriptor",
    "decode_duration",
    "decode_fallback",
    "decode_geometry",
    "decode_media",
    "decode_model_tag",
    "decode_reason",
    "decode_reference",
    "decode_seal",
    "decode_spec",
    "decode_tokens",
    "decode_verification",
    "encode_aligner_tag",
    "encode_descriptor",
    "encode_duration",
    "encode_fallback",
    "encode_geometry",
    "encode_media",
    "encode_model_tag",
    "encode_reason",
    "encode_reference",
    "encode_seal",
    "encode_spec",
    "encode_tokens",
    "encode_verification",
]
