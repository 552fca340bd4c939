"""Texts in the catalog, checked once: short, and fit to be shown."""

from __future__ import annotations

from kvbridge.core.errors import InvalidFieldError

NAME_CHARACTERS_MAX = 128
"""Longest name of a route."""
FAMILY_CHARACTERS_MAX = 256
"""Longest name of a family."""
PATH_CHARACTERS_MAX = 4096
"""Longest path of a fingerprint."""


def require_text(field: str, value: object, *, characters_max: int, may_be_empty: bool = True) -> None:
    """Refuse what is not a printable string of at most `characters_max` characters.

    Raises:
        InvalidFieldError: `value` is no string, too long, not printable, or empty where it may not be.
    """
    if not isinstance(value, str):
        raise InvalidFieldError(field, f"must be a string, got {type(value).__name__}")
    if not value and not may_be_empty:
        raise InvalidFieldError(field, "must not be empty")
    if len(value) > characters_max:
        raise InvalidFieldError(field, f"is {len(value)} characters long; at most {characters_max} are allowed")
    if not value.isprintable():
        raise InvalidFieldError(field, "holds characters that do not print")
