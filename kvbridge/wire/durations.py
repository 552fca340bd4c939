"""Durations as float seconds."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from kvbridge.core.errors import InvalidFieldError

_NANOS_PER_SECOND = 1_000_000_000


def encode_duration(seconds: float) -> Duration:
    """Return `seconds` (finite, not negative) as a message, to the nearest nanosecond."""
    whole = int(seconds)
    more, nanos = divmod(round((seconds - whole) * _NANOS_PER_SECOND), _NANOS_PER_SECOND)
    return Duration(seconds=whole + more, nanos=nanos)


def decode_duration(message: Duration, field: str) -> float:
    """Return the seconds in `message`.

    Raises:
        InvalidFieldError: the duration is negative or its nanoseconds are out of range.
    """
    if message.seconds < 0 or not 0 <= message.nanos < _NANOS_PER_SECOND:
        raise InvalidFieldError(field, "must not be negative")
    # In one division, so that a decimal fraction comes back as it was.
    return (message.seconds * _NANOS_PER_SECOND + message.nanos) / _NANOS_PER_SECOND
