"""How values are written on their way, as messages say it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from kvbridge.core.transfer_encoding import TransferEncoding
from kvbridge.v1 import types_pb2
from kvbridge.wire.enums import EnumCodec

_ENCODINGS = EnumCodec(TransferEncoding, dict(types_pb2.TransferEncoding.items()), "TRANSFER_ENCODING_")
_Default = TypeVar("_Default", TransferEncoding, None)


def encode_transfer_encoding(encoding: TransferEncoding) -> types_pb2.TransferEncoding.ValueType:
    """Return the number of an encoding."""
    return cast("types_pb2.TransferEncoding.ValueType", _ENCODINGS.encode(encoding))


def decode_transfer_encoding(number: int, default: _Default, field: str) -> TransferEncoding | _Default:
    """Return the encoding with this number, `default` if none was named.

    Raises:
        InvalidFieldError: there is none, as for one from a newer release.
    """
    return _ENCODINGS.decode(number, field) if number else default


def known_transfer_encodings(numbers: Iterable[int]) -> tuple[TransferEncoding, ...]:
    """Return those of the encodings that this release knows."""
    known = set(types_pb2.TransferEncoding.values()) - {types_pb2.TRANSFER_ENCODING_UNSPECIFIED}
    return tuple(_ENCODINGS.decode(number, "encodings") for number in numbers if number in known)
