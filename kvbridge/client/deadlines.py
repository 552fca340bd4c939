"""The end of a caller's patience, carried through everything that one call does."""

from __future__ import annotations

import math
import time

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError

TIMEOUT_SECONDS_MAX = 86_400.0
"""Longest timeout of one call (a day)."""


class Deadline:
    """A moment of the monotonic clock."""

    __slots__ = ("_ends_at", "timeout_seconds")

    def __init__(self, timeout_seconds: float, field: str = "timeout") -> None:
        """End `timeout_seconds` from now.

        Raises:
            ArgumentTypeError: the timeout is no number.
            ArgumentValueError: it is negative, not finite or too long.
        """
        if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float):
            raise ArgumentTypeError(field, f"must be a number of seconds, got {type(timeout_seconds).__name__}")
        if not (math.isfinite(timeout_seconds) and 0 <= timeout_seconds <= TIMEOUT_SECONDS_MAX):
            raise ArgumentValueError(field, f"must lie in [0, {TIMEOUT_SECONDS_MAX:g}] seconds, got {timeout_seconds}")
        self.timeout_seconds = float(timeout_seconds)
        self._ends_at = time.monotonic() + timeout_seconds

    def __repr__(self) -> str:
        return f"<Deadline in {self.remaining_seconds:.3f} s>"

    @property
    def remaining_seconds(self) -> float:
        """Return the seconds left, never less than zero."""
        return max(self._ends_at - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        """Tell whether no time is left."""
        return time.monotonic() >= self._ends_at
