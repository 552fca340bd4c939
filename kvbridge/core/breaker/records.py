"""What a breaker answers, announces and shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique

from kvbridge.core.breaker.states import BreakerState
from kvbridge.core.breaker.window import BadOutcome


@unique
class AdmissionKind(StrEnum):
    """Whether a handoff may take this route now."""

    ALLOWED = "ALLOWED"
    """It may."""
    TRIAL = "TRIAL"
    """It may, and its outcome must be recorded as that of a trial."""
    REFUSED = "REFUSED"
    """It must take the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The answer to one handoff, with the figures behind it."""

    kind: AdmissionKind
    """Whether the handoff may take this route."""
    bad_share: float
    """Share of bad handoffs: of the window now while closed, else of the window that tripped the breaker; 0 to 1."""
    samples: int
    """Handoffs that the share is of."""
    retry_after_seconds: float
    """Seconds until a trial is free at the latest if its outcome does not come before; 0 unless refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerChange:
    """One change of state, for the node to announce."""

    now: float
    """When it happened, in seconds of the caller's clock."""
    before: BreakerState
    """The state that ended."""
    after: BreakerState
    """The state that began."""
    detail: str
    """Why, with the figures, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSnapshot:
    """A breaker as of the last call that told it the time."""

    state: BreakerState
    """Its state."""
    since: float | None
    """When the state began: the time of the first call if it never changed, and None before that."""
    samples: int
    """Handoffs in the window."""
    bad: dict[BadOutcome, int]
    """Bad ones among them by kind; kinds without any are left out."""
    tripped_samples: int
    """Handoffs in the window when the breaker tripped; 0 while closed."""
    tripped_bad: int
    """Bad ones among those."""
    retry_at: float | None
    """When trials begin; None unless open."""
    trials_good: int
    """Good trials in a row; 0 unless half-open."""
    trials_in_flight: int
    """Trials whose outcome is awaited; 0 unless half-open."""
