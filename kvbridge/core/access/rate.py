"""How many calls a tenant may make: a bucket of tokens that fills with time, one token for a call."""

from __future__ import annotations

_ROUNDING = 1e-6
"""As much of a token as may be missing, so that whoever waited as long as it was told finds one."""


class TokenBucket:
    """Full at first. The caller gives the time, which must not go back; nothing runs in between."""

    def __init__(self, *, per_second: float, burst: int, now: float) -> None:
        """Hold at most `burst` tokens, at least 1, and fill by `per_second`, which is positive."""
        assert per_second > 0, per_second
        assert burst >= 1, burst
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at = now

    def __repr__(self) -> str:
        """Show how full it is."""
        return f"<TokenBucket: {self._tokens:g} of {self._burst}, {self._per_second:g} per second>"

    @property
    def per_second(self) -> float:
        """Return how fast it fills."""
        return self._per_second

    def change(self, *, per_second: float, burst: int, now: float) -> None:
        """Fill by another rate from now on; what is in it stays, as far as it holds that."""
        self._fill(now)
        self._per_second, self._burst = per_second, burst
        self._tokens = min(self._tokens, float(burst))

    def take(self, *, now: float) -> float:
        """Take one token and return 0, or take none and return in how many seconds there will be one."""
        self._fill(now)
        if self._tokens >= 1 - _ROUNDING:
            self._tokens = max(self._tokens - 1, 0.0)
            return 0.0
        return (1 - self._tokens) / self._per_second

    def taken(self, *, now: float) -> float:
        """Return how many of its tokens are gone."""
        self._fill(now)
        return self._burst - self._tokens

    @property
    def burst(self) -> int:
        """Return how many tokens it holds."""
        return self._burst

    def _fill(self, now: float) -> None:
        self._tokens = min(self._tokens + (now - self._filled_at) * self._per_second, float(self._burst))
        self._filled_at = now
