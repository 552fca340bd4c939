"""When a breaker trips, and what it takes to close it again."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.bounds import require_count, require_number

DURATION_SECONDS_MIN = 0.001
"""Shortest window and open time; below it the buckets of the window would be finer than clocks are."""
DURATION_SECONDS_MAX = 86_400.0
"""Longest window and open time: one day."""
BAD_SHARE_MIN = 1e-6
"""Smallest share to tolerate; a route of which one bad handoff is too many says so with `samples_min` 1."""
COUNT_MAX = 1_000_000
"""Largest number of samples or trials that a policy may ask for."""
TRIALS_IN_FLIGHT_MAX = 1_024
"""Most trials at a time that a policy may ask for; each is remembered until it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """The settings of one breaker."""

    window_seconds: float = 60.0
    """How far back handoffs are counted, less up to a twelfth of it."""
    bad_share_max: float = 0.05
    """Largest share of bad handoffs that is tolerated, from a millionth to 1, which never trips."""
    samples_min: int = 20
    """Fewer handoffs than this in the window never trip; positive."""
    open_seconds: float = 30.0
    """How long the route stays open before trials, and how long the outcome of a trial is waited for."""
    trials: int = 5
    """Good trials in a row that close the breaker; positive."""
    trials_in_flight_max: int = 1
    """Trials whose outcome is not known yet, at most; positive."""

    def __post_init__(self) -> None:
        """Refuse a policy that no breaker can follow.

        Raises:
            InvalidFieldError: a value is of the wrong type or out of bounds.
        """
        for name in ("window_seconds", "open_seconds"):
            value = getattr(self, name)
            require_number(f"breaker.{name}", value, least=DURATION_SECONDS_MIN, most=DURATION_SECONDS_MAX)
        require_number("breaker.bad_share_max", self.bad_share_max, least=BAD_SHARE_MIN, most=1.0)
        require_count("breaker.samples_min", self.samples_min, least=1, most=COUNT_MAX)
        require_count("breaker.trials", self.trials, least=1, most=COUNT_MAX)
        require_count("breaker.trials_in_flight_max", self.trials_in_flight_max, least=1, most=TRIALS_IN_FLIGHT_MAX)
