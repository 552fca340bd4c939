"""Numbers that come from outside, checked once: the right type, finite, and within their bounds."""

from __future__ import annotations

from kvbridge.core.errors import InvalidFieldError

_SHOWN_MAX = 10**18
"""A message repeats smaller numbers; what is larger may have any number of digits."""

UNIX_SECONDS_MAX = 253_402_300_799
"""The end of the year 9999, behind which no calendar and no protobuf timestamp goes."""


def require_unix_time(field: str, value: object) -> None:
    """Refuse what is no time that can be told.

    Raises:
        InvalidFieldError: `value` is no number of seconds since 1970, or beyond the year 9999.
    """
    require_number(field, value, least=0, most=UNIX_SECONDS_MAX)


def require_number(field: str, value: object, *, least: float, most: float) -> None:
    """Refuse what is not a number from `least` to `most`.

    Raises:
        InvalidFieldError: `value` is no number, not finite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidFieldError(field, f"must be a number, got {type(value).__name__}")
    _require_within(field, value, least, most)


def require_count(field: str, value: object, *, least: int, most: int) -> None:
    """Refuse what is not a whole number from `least` to `most`.

    Raises:
        InvalidFieldError: `value` is no whole number or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidFieldError(field, f"must be a whole number, got {type(value).__name__}")
    _require_within(field, value, least, most)


def _require_within(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # written so that a NaN is refused
        got = f", got {value}" if abs(value) < _SHOWN_MAX else ""
        raise InvalidFieldError(field, f"must be from {least} to {most}{got}")
