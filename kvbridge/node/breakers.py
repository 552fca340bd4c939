"""The breakers of all routes that were taken lately."""

from __future__ import annotations

from collections import OrderedDict

from kvbridge.core.breaker import Admission, Breaker, BreakerPolicy
from kvbridge.core.journal import RouteKey


class Breakers:
    """One breaker for each route between two model versions along one edge."""

    def __init__(self, breakers_max: int) -> None:
        """Start with every route closed; of more than `breakers_max` routes the longest unused is forgotten."""
        self._breakers_max = breakers_max
        self._breakers: OrderedDict[RouteKey, Breaker] = OrderedDict()

    def admit(self, route: RouteKey, policy: BreakerPolicy, *, now: float) -> Admission:
        """Say whether a handoff may take this route now."""
        breaker = self._breakers.get(route)
        if breaker is None:
            breaker = self._breakers[route] = Breaker(policy)
            if len(self._breakers) > self._breakers_max:
                self._breakers.popitem(last=False)
        elif breaker.policy is not policy and breaker.policy != policy:
            breaker.replace_policy(now, policy)
        self._breakers.move_to_end(route)
        return breaker.admit(now)

    def abandon_trial(self, route: RouteKey, *, now: float) -> None:
        """Make room for another trial in place of one that did not take place."""
        breaker = self._breakers.get(route)
        if breaker is not None:
            breaker.abandon_trial(now)
