"""Whom a node asks for bytes, by what it measured and what went wrong before."""

from __future__ import annotations

from kvbridge.core.cost.sources import Candidate
from kvbridge.node.sources import AVOID_SECONDS_MAX, AVOID_SECONDS_MIN, Sources


class Desk:
    """Sources whose measurements and clock a test sets."""

    def __init__(self, **seconds: float) -> None:
        """Measure these nodes."""
        self.now = 0.0
        self.seconds = seconds
        self.sources = Sources(lambda node_id, _: self.seconds.get(node_id), clock=lambda: self.now)

    def before(self, *holders: str) -> list[str]:
        """Return who is asked before the owner."""
        return [one.node_id for one in self.sources.before_owner("owner", holders, 1000)]


def test_the_first_one_asked_is_the_owner_unless_a_holder_is_cheaper() -> None:
    """Without holders, and with those that are no better, it is the owner."""
    desk = Desk(owner=1.0, near=0.1, far=2.0)
    assert desk.sources.first("owner", (), 1000) == "owner"
    assert desk.sources.first("owner", ("far",), 1000) == "owner"
    assert desk.sources.first("owner", ("far", "near"), 1000) == "near"


def test_a_holder_that_failed_is_left_alone_for_longer_each_time() -> None:
    """It comes back after its time, and at once with its first success; no failure bars it for good."""
    desk = Desk(owner=1.0, near=0.1)
    desk.sources.failed("near")
    assert desk.before("near") == []
    desk.now = AVOID_SECONDS_MIN
    assert desk.before("near") == ["near"]
    desk.sources.failed("near")
    desk.now += AVOID_SECONDS_MIN
    assert desk.before("near") == []
    desk.now += AVOID_SECONDS_MIN
    assert desk.before("near") == ["near"]
    for _ in range(20):
        desk.sources.failed("near")
    desk.now += AVOID_SECONDS_MAX
    assert desk.before("near") == ["near"]
    desk.sources.failed("near")
    desk.sources.succeeded("near")
    assert desk.before("near") == ["near"]


def test_what_is_not_measured_is_tried_by_one_at_a_time() -> None:
    """Whoever comes meanwhile asks others; a holder that is measured may be asked by many."""
    desk = Desk(owner=1.0, near=0.5)
    trial = Candidate(node_id="new", seconds=None)
    assert desk.before("new", "near") == ["new", "near"]
    with desk.sources.trying(trial):
        assert desk.before("new", "near") == ["near"]
    with desk.sources.trying(Candidate(node_id="near", seconds=0.5)):
        assert desk.before("new", "near") == ["new", "near"]
    assert desk.before("new", "near") == ["new", "near"]
