"""The states of a breaker as one table: whatever is absent from it cannot happen.

```
CLOSED --trip--> OPEN --wait over--> HALF_OPEN --trials good--> CLOSED
                  ^                      |
                  +------ trial bad -----+
```
"""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class BreakerState(StrEnum):
    """What a breaker does with the next handoff."""

    CLOSED = "CLOSED"
    """Every handoff is allowed."""
    OPEN = "OPEN"
    """Every handoff is refused."""
    HALF_OPEN = "HALF_OPEN"
    """A few handoffs are let through as trials."""


@unique
class BreakerEvent(StrEnum):
    """What can happen to a breaker."""

    TRIP = "TRIP"
    """Too large a share of the handoffs in the window was bad."""
    WAIT_OVER = "WAIT_OVER"
    """It was open for long enough."""
    TRIAL_BAD = "TRIAL_BAD"
    """A trial was bad."""
    TRIALS_GOOD = "TRIALS_GOOD"
    """Enough trials in a row were good."""


TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.WAIT_OVER): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIAL_BAD): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIALS_GOOD): BreakerState.CLOSED,
}
"""Every transition that there is."""


def next_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """Return the state that `event` leads to; the pair must be in the table."""
    assert (state, event) in TRANSITIONS, (state, event)
    return TRANSITIONS[state, event]
