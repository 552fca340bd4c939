"""Reports out of their messages: what cannot be is refused before anybody learns from it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvbridge.core.cost.curve import RATES_MIN
from kvbridge.core.errors import InvalidFieldError, UnknownReferenceError
from kvbridge.core.journal import HandoffQuality, HandoffUse, Outcome
from kvbridge.node.breakers import Breakers
from kvbridge.node.costs import CostKeeper
from kvbridge.node.identity import Client
from kvbridge.node.journal import Journal
from kvbridge.node.reports import Reports
from kvbridge.server.reports import DETAIL_CHARACTERS_MAX, take_report
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import encode_model_tag
from tests import builders, records

CLIENT = Client(client_id=records.CLIENT, tenant="default", attached=True)


class Desk:
    """Reports, and one handoff to report on."""

    def __init__(self) -> None:
        self.journal, self.costs = Journal(8), CostKeeper("node-1")
        self.reports = Reports(clock=lambda: 1.0, journal=self.journal, breakers=Breakers(8), costs=self.costs)
        self.journal.add(records.record(handoff_id="h"))

    def take(self, **fields: Any) -> None:
        """Take a report with these fields."""
        take_report(self.reports, CLIENT, pb.ReportRequest(request_id="r", **fields))


def prefill(tokens: int = 100, seconds: float = 1.0) -> pb.MeasuredPrefill:
    """Return a measurement."""
    return pb.MeasuredPrefill(tokens=tokens, duration=Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9)))


def scatter(nbytes: int = 100, seconds: float = 1.0) -> pb.MeasuredTransfer:
    """Return a measurement."""
    return pb.MeasuredTransfer(bytes=nbytes, duration=Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9)))


def test_a_report_on_a_handoff_is_remembered() -> None:
    """Use, quality, detail and saved tokens arrive; a quality that nobody knows stays unknown."""
    desk = Desk()
    desk.take(
        handoff_id="h",
        use=pb.HANDOFF_USE_USED,
        quality=pb.HANDOFF_QUALITY_GOOD,
        detail="fluent",
        tokens_saved=512,
        prefill=prefill(),
        scatter=scatter(),
    )
    found = desk.journal.find("h")
    assert found is not None
    assert found.outcome == Outcome(use=HandoffUse.USED, quality=HandoffQuality.GOOD, detail="fluent", tokens_saved=512)
    desk.take(handoff_id="h", use=pb.HANDOFF_USE_DISCARDED)
    found = desk.journal.find("h")
    assert found is not None
    assert found.outcome == Outcome(use=HandoffUse.DISCARDED)


def test_measurements_of_a_model_need_no_handoff() -> None:
    """They teach the cost model."""
    desk, model = Desk(), encode_model_tag(builders.model_tag())
    for _ in range(RATES_MIN):
        desk.take(model=model, prefill=prefill(100, 0.5))
    estimate = desk.costs.of_tenant(CLIENT.tenant).estimate(builders.model_tag(), ("node-1", "node-1"), 100, 1)
    assert estimate.prefill_seconds == pytest.approx(0.5)


MODEL = {"model": encode_model_tag(builders.model_tag())}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "model"),
        (MODEL, "prefill"),
        ({**MODEL, "prefill": prefill(tokens=0)}, "prefill"),
        ({**MODEL, "prefill": prefill(seconds=0)}, "prefill.duration"),
        ({**MODEL, "prefill": prefill(seconds=86_401)}, "prefill.duration"),
        ({**MODEL, "prefill": pb.MeasuredPrefill(tokens=1, duration=Duration(seconds=-1))}, "prefill.duration"),
        ({**MODEL, "prefill": prefill(), "scatter": scatter(nbytes=0)}, "scatter"),
        ({**MODEL, "prefill": prefill(), "scatter": scatter(nbytes=2**63)}, "scatter"),
        ({"handoff_id": "h"}, "use"),
        ({"handoff_id": "h", "use": 77}, "use"),
        ({"handoff_id": "h", "use": pb.HANDOFF_USE_USED, "quality": 77}, "quality"),
        ({"handoff_id": "h", "use": pb.HANDOFF_USE_USED, "detail": "x" * (DETAIL_CHARACTERS_MAX + 1)}, "detail"),
    ],
)
def test_a_field_that_cannot_be_is_named_and_nothing_is_learned(fields: dict[str, Any], named: str) -> None:
    """The first wrong field refuses the whole report, measurements beside it included."""
    desk = Desk()
    with pytest.raises(InvalidFieldError) as caught:
        desk.take(**fields)
    assert caught.value.field == named
    assert "0 models' prefill" in repr(desk.costs)
    found = desk.journal.find("h")
    assert found is not None
    assert found.outcome is None


def test_an_unknown_handoff_is_not_found() -> None:
    """Nobody can report on what the node does not remember."""
    with pytest.raises(UnknownReferenceError):
        Desk().take(handoff_id="another", use=pb.HANDOFF_USE_USED)
