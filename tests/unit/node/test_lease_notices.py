"""When a client is told that a lease ends soon."""

from __future__ import annotations

from kvbridge.core.events import LeaseExpiring
from kvbridge.node.identity import Client
from kvbridge.node.lease_notices import LeaseNotices
from kvbridge.node.watch import Watchers, WatchLimits

CLIENT = Client(client_id="c", tenant="t", attached=True)
LIMITS = WatchLimits(watches_max=3, watches_per_client_max=2, events_max=100, seconds=10.0)


class Desk:
    """Notices with a clock that tests turn by hand, of leases that end when the test says so."""

    def __init__(self, expiring_seconds: float = 10.0) -> None:
        self.now = 0.0
        self.watchers = Watchers(LIMITS, clock=lambda: self.now, first_sequence=1)
        self.watch = self.watchers.open("c", 0)
        self.notices = LeaseNotices(expiring_seconds=expiring_seconds, watchers=self.watchers, clock=lambda: self.now)
        self.ends: dict[str, float] = {}

    def grant(self, token: str, ttl_seconds: float = 30.0) -> None:
        self.ends[token] = self.now + ttl_seconds
        self.notices.granted(CLIENT, token, ttl_seconds)

    async def at(self, now: float) -> list[tuple[str, float]]:
        """Let time pass and return what was told."""
        self.now = now
        self.notices.advance(self._left)
        self.watchers.tell("c", LeaseExpiring(lease_token="", seconds_left=0.0))
        told = []
        async for _, event in self.watch:
            assert isinstance(event, LeaseExpiring)
            if not event.lease_token:
                break
            told.append((event.lease_token, event.seconds_left))
        return told

    def _left(self, tenant: str, client_id: str, token: str) -> float | None:
        assert (tenant, client_id) == ("t", "c")
        left = self.ends[token] - self.now
        return left if left > 0 else None


async def test_a_lease_is_announced_once_when_little_time_is_left() -> None:
    """Not before, and not again."""
    desk = Desk()
    desk.grant("a")
    assert desk.notices.advance(desk._left) == 20.0
    assert await desk.at(19.9) == []
    assert await desk.at(20.0) == [("a", 10.0)]
    assert await desk.at(29.0) == []
    assert desk.notices.advance(desk._left) is None


async def test_a_lease_that_is_renewed_is_announced_later() -> None:
    """Every time that its end comes near, be it before or after an announcement that it was renewed."""
    desk = Desk()
    desk.grant("a")
    await desk.at(15.0)
    desk.grant("a")
    assert await desk.at(34.0) == []
    assert await desk.at(35.0) == [("a", 10.0)]
    desk.grant("a")
    assert await desk.at(55.0) == [("a", 10.0)]


async def test_a_short_lease_is_announced_when_two_thirds_have_passed() -> None:
    """Otherwise it would be announced as soon as it is granted."""
    desk = Desk()
    desk.grant("a", ttl_seconds=3.0)
    assert await desk.at(1.9) == []
    assert await desk.at(2.0) == [("a", 1.0)]


async def test_a_lease_that_is_gone_is_not_announced() -> None:
    """Because it was returned, or because the node is late."""
    desk = Desk()
    desk.grant("returned")
    desk.grant("over")
    desk.notices.returned(CLIENT, ["returned", "unknown"])
    assert len(desk.notices) == 1
    assert await desk.at(31.0) == []
    assert len(desk.notices) == 0


async def test_nothing_is_announced_if_nobody_wants_it() -> None:
    """Zero turns it off."""
    desk = Desk(expiring_seconds=0.0)
    desk.grant("a")
    assert len(desk.notices) == 0
