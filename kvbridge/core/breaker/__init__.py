"""The circuit breaker of one route: too large a share of bad handoffs, and the route's answer is text for a while."""

from kvbridge.core.breaker.breaker import Breaker
from kvbridge.core.breaker.policy import BreakerPolicy
from kvbridge.core.breaker.records import Admission, AdmissionKind, BreakerChange, BreakerSnapshot
from kvbridge.core.breaker.states import BreakerEvent, BreakerState
from kvbridge.core.breaker.window import BadOutcome

__all__ = [
    "Admission",
    "AdmissionKind",
    "BadOutcome",
    "Breaker",
    "BreakerChange",
    "BreakerEvent",
    "BreakerPolicy",
    "BreakerSnapshot",
    "BreakerState",
]
