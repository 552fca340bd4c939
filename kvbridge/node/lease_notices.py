"""When clients that watch are told that a lease ends soon."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvbridge.core.events import LeaseExpiring
from kvbridge.core.ledger.deadlines import Deadlines
from kvbridge.node.identity import Client
from kvbridge.node.watch import Watchers

_NOTICE_SHARE_MAX = 1 / 3
"""Greatest share of a lease's time that is left when its client is told."""
_NOTICES_PER_TURN = 512
"""Leases that are looked at before other work gets its turn."""

SecondsLeft: TypeAlias = Callable[[str, str, str], float | None]
"""Tells how long a lease lasts, by tenant, client and token; None if it is not live."""


class LeaseNotices:
    """One deadline for each live lease. Granting and renewing take O(log n), and mostly O(1)."""

    def __init__(self, *, expiring_seconds: float, watchers: Watchers, clock: Callable[[], float]) -> None:
        """Tell `watchers` when `expiring_seconds` are left, or a third of the lease's time if less; 0 for never."""
        self._expiring_seconds = expiring_seconds
        self._watchers = watchers
        self._clock = clock
        self._deadlines: Deadlines[tuple[str, str, str]] = Deadlines()

    def __len__(self) -> int:
        """Return how many leases are waited for."""
        return len(self._deadlines)

    def granted(self, client: Client, token: str, ttl_seconds: float) -> None:
        """Begin to wait for a lease that was granted or renewed."""
        if not self._expiring_seconds:
            return
        notice = min(self._expiring_seconds, ttl_seconds * _NOTICE_SHARE_MAX)
        self._deadlines.set((client.tenant, client.client_id, token), self._clock() + ttl_seconds - notice)

    def returned(self, client: Client, tokens: Iterable[str]) -> None:
        """Wait no longer for leases that were returned."""
        for token in tokens:
            self._deadlines.discard((client.tenant, client.client_id, token))

    def advance(self, seconds_left: SecondsLeft) -> float | None:
        """Tell of the leases that end soon and return when to look again; None if there is no lease."""
        for _ in range(_NOTICES_PER_TURN):
            top = self._deadlines.peek()
            if top is None or top[0] > self._clock():
                return None if top is None else top[0]
            self._deadlines.pop()
            tenant, client_id, token = top[1]
            left = seconds_left(tenant, client_id, token) if self._watchers.remembers(client_id) else None
            if left is not None:
                self._watchers.tell(client_id, LeaseExpiring(lease_token=token, seconds_left=left))
        return self._clock()
