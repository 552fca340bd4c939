"""What reports teach, and what they cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbridge.core.breaker import BreakerPolicy, BreakerState
from kvbridge.core.cost.curve import RATES_MIN
from kvbridge.core.errors import UnknownReferenceError
from kvbridge.core.journal import HandoffQuality, HandoffUse, Outcome
from kvbridge.node.breakers import Breakers
from kvbridge.node.costs import CostKeeper
from kvbridge.node.identity import Client
from kvbridge.node.journal import Journal
from kvbridge.node.reports import Measured, Report, Reports
from tests import builders, records

CLIENT = Client(client_id=records.CLIENT, tenant="default", attached=True)
BAD = Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD)
GOOD = Outcome(use=HandoffUse.USED, quality=HandoffQuality.GOOD)
TRIPS_AT_ONCE = BreakerPolicy(samples_min=1)


class Desk:
    """Reports with everything that learns from them, and one handoff that was answered."""

    def __init__(self) -> None:
        self.journal, self.breakers, self.costs = Journal(8), Breakers(8), CostKeeper("node-1")
        self.reports = Reports(clock=lambda: 1.0, journal=self.journal, breakers=self.breakers, costs=self.costs)
        self.breakers.admit(records.ROUTE, TRIPS_AT_ONCE, now=0.0)
        record = records.record(handoff_id="h")
        self.breakers.note(record.parts[0], now=0.0)
        self.journal.add(record)

    def take(self, outcome: Outcome, client: Client = CLIENT, prefill: Measured | None = None) -> None:
        """Report on the handoff."""
        self.reports.take(client, Report(handoff_id="h", outcome=outcome, prefill=prefill))

    @property
    def state(self) -> str:
        """Return the state of the route's breaker."""
        return self.breakers.of_route("default", "")[0]

    def prefill_seconds(self, tokens: int) -> float | None:
        """Return what a prefill is estimated to take."""
        return (
            self.costs.of_tenant(CLIENT.tenant)
            .estimate(builders.model_tag(), ("node-1", "node-1"), tokens, 1)
            .prefill_seconds
        )


def test_a_bad_report_reaches_journal_and_breaker() -> None:
    """The record keeps what was said, and the route trips."""
    desk = Desk()
    desk.take(BAD)
    found = desk.journal.find("h")
    assert found is not None
    assert found.outcome == BAD
    assert desk.state == BreakerState.OPEN


def test_only_the_first_report_moves_anything() -> None:
    """A consumer that changes its mind changes the record, and counts once; measurements count once, too."""
    desk = Desk()
    for _ in range(RATES_MIN):
        desk.take(GOOD, prefill=Measured(size=100, seconds=1.0))
    desk.take(BAD)
    assert desk.state == BreakerState.CLOSED
    assert desk.prefill_seconds(100) is None
    found = desk.journal.find("h")
    assert found is not None
    assert found.outcome == BAD


def test_others_cannot_report() -> None:
    """A report on another client's handoff is refused, and nothing of it is kept."""
    desk = Desk()
    stranger = replace(CLIENT, client_id="somebody-else")
    for _ in range(RATES_MIN):
        with pytest.raises(UnknownReferenceError):
            desk.take(BAD, client=stranger, prefill=Measured(size=100, seconds=1.0))
    assert desk.state == BreakerState.CLOSED
    assert desk.prefill_seconds(100) is None


def test_measurements_need_no_handoff() -> None:
    """A calibration reports on a model alone; enough reports make an estimate."""
    desk = Desk()
    for _ in range(RATES_MIN):
        desk.reports.measure(
            CLIENT.tenant,
            builders.model_tag(),
            prefill=Measured(size=100, seconds=1.0),
            scatter=Measured(size=1000, seconds=0.1),
        )
    assert desk.prefill_seconds(100) == pytest.approx(1.0)
    assert desk.costs.of_tenant(CLIENT.tenant).estimate(
        builders.model_tag(), ("node-1", "node-1"), 100, 1000
    ).handoff_seconds == (pytest.approx(0.1))
