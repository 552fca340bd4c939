"""Reports through the SDK: what the bridge learns from them, and that they are never worth an exception."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvbridge import ArgumentTypeError, ArgumentValueError, Bridge, Handoff, ModelTag, Reason, connect
from kvbridge.core.cost.curve import RATES_MIN
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import inspect_service_pb2
from tests.api import ApiClient
from tests.builders import model_tag
from tests.harness import BridgeProcess, running_bridge
from tests.integration.client.kv import Contents

TOKENS = 20
SECONDS = 30.0
"""Far more than a report takes; one that is not taken in time is not repeated."""
CATALOG = "defaults: {breaker: {samples_min: 2, bad_share_max: 0.5}}"


@pytest.fixture(scope="module")
def bridge_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeProcess]:
    """Run a bridge that demands 512 tokens as long as nothing is measured, and trips soon."""
    catalog = tmp_path_factory.mktemp("catalog") / "catalog.yaml"
    catalog.write_text(CATALOG)
    with running_bridge("--catalog", str(catalog)) as process:
        yield process


@pytest.fixture
def model(request: pytest.FixtureRequest) -> ModelTag:
    """Return a model of this test's own, of which the bridge has measured nothing."""
    return model_tag(name=request.node.name)


def reported(process: BridgeProcess, handoff: Handoff) -> inspect_service_pb2.ReportedOutcome:
    """Return what the bridge remembers of a report, which only the client itself can have sent."""
    with ApiClient(process) as client:
        request = inspect_service_pb2.ExplainHandoffRequest(handoff_id=handoff.handoff_id)
        answer: inspect_service_pb2.ExplainHandoffResponse = client.call("ExplainHandoff", request)
        return answer.record.outcome


def measure(bridge: Bridge, model: ModelTag) -> None:
    """Report enough prefills."""
    for _ in range(RATES_MIN):
        assert bridge.report_prefill(model, TOKENS, 0.5, timeout=SECONDS)


def test_a_short_handoff_pays_once_its_prefill_is_measured(either: Bridge, model: ModelTag) -> None:
    """By default few tokens are text; the consumer's own prefills tell the bridge better."""
    contents = Contents()
    contents.publish(either, model.name, model=model)
    for _ in range(RATES_MIN):
        handoff = contents.acquire(either, model.name, model=model)
        assert handoff.reason is Reason.TOO_SHORT_TO_PAY
        assert handoff.report(prefill_tokens=TOKENS, prefill_seconds=0.5, timeout=SECONDS)
    handoff = contents.acquire(either, model.name, model=model)
    if either.by_value:
        assert handoff.reason is Reason.TOO_SHORT_TO_PAY, "nobody has measured a download"
        return
    contents.assert_in(handoff)


@pytest.mark.parametrize(
    ("said", "use", "saved"),
    [
        ({}, pb.HANDOFF_USE_USED, TOKENS),
        ({"used": True, "tokens_saved": 7}, pb.HANDOFF_USE_USED, 7),
        ({"used": False}, pb.HANDOFF_USE_DISCARDED, 0),
    ],
)
def test_what_became_of_a_cache_is_remembered(
    bridge: Bridge, bridge_process: BridgeProcess, said: dict[str, Any], use: int, saved: int
) -> None:
    """A cache counts as used, and its tokens as saved, unless the consumer says otherwise."""
    contents, model = Contents(), model_tag(name="remembered")
    measure(bridge, model)
    contents.publish(bridge, "remembered", model=model)
    with contents.acquire(bridge, "remembered", model=model) as handoff:
        assert handoff.kv
    assert handoff.report(quality="GOOD", detail="fluent", timeout=SECONDS, **said)
    outcome = reported(bridge_process, handoff)
    assert (outcome.use, outcome.tokens_saved) == (use, saved)
    assert (outcome.quality, outcome.detail) == (pb.HANDOFF_QUALITY_GOOD, "fluent")


def test_a_consumer_that_took_the_text_says_so(bridge: Bridge, bridge_process: BridgeProcess, model: ModelTag) -> None:
    """There is no cache that it could have used, and to say so is a mistake."""
    handoff = Contents().acquire(bridge, "nothing is published here", model=model)
    assert handoff.report(timeout=SECONDS)
    assert reported(bridge_process, handoff).use == pb.HANDOFF_USE_TEXT
    with pytest.raises(ArgumentValueError, match="used"):
        handoff.report(used=True)


def test_bad_results_trip_the_route(bridge: Bridge, model: ModelTag) -> None:
    """Consumers that report bad answers stop the caches of that route."""
    contents = Contents()
    measure(bridge, model)
    contents.publish(bridge, model.name, model=model)
    for _ in range(2):
        with contents.acquire(bridge, model.name, model=model) as handoff:
            assert handoff.kv
        assert handoff.report(quality="BAD", detail="nonsense", timeout=SECONDS)
    refused = contents.acquire(bridge, model.name, model=model)
    assert refused.reason is Reason.ROUTE_OFF
    assert "tripped" in refused.detail


def test_a_report_to_a_bridge_that_is_away_is_not_taken(model: ModelTag) -> None:
    """No bridge, a bridge that has ended, one that was restarted, a closed object: false, and no exception."""
    with connect("unix:/nowhere/bridge.sock") as nobody:
        assert not nobody.report_prefill(model, 10, 1.0)
        handoff = Contents().acquire(nobody, "k", model=model, timeout=0.1)
        assert handoff.reason is Reason.BRIDGE_UNREACHABLE
        assert not handoff.report(prefill_tokens=10, prefill_seconds=1.0)
        with pytest.raises(ArgumentValueError, match="prefill_seconds"):
            handoff.report(prefill_tokens=10)
    with running_bridge() as process:
        bridge = connect(process.target)
        handoff = Contents().acquire(bridge, "k", model=model)
        process.stop()
        assert not handoff.report()
        process.start()
        assert not handoff.report(timeout=SECONDS), "the new bridge knows nothing of the handoff"
        assert bridge.report_prefill(model, 10, 1.0, timeout=SECONDS)
        bridge.close()
        assert not handoff.report()
        assert not bridge.report_prefill(model, 10, 1.0)


def test_a_forked_child_reports_nothing(bridge: Bridge, model: ModelTag) -> None:
    """The connection is its parent's."""
    handoff = Contents().acquire(bridge, "k", model=model)
    child = os.fork()
    if child == 0:
        taken = True
        try:
            taken = handoff.report() or bridge.report_prefill(model, 10, 1.0)
        finally:
            os._exit(1 if taken else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handoff.report(timeout=SECONDS)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"quality": "FINE"}, ArgumentValueError, "quality"),
    ({"tokens_saved": -1}, ArgumentValueError, "tokens_saved"),
    ({"tokens_saved": 1.5}, ArgumentTypeError, "tokens_saved"),
    ({"detail": 7}, ArgumentTypeError, "detail"),
    ({"prefill_tokens": 10}, ArgumentValueError, "prefill_seconds"),
    ({"prefill_seconds": 1.0}, ArgumentValueError, "prefill_tokens"),
    ({"prefill_tokens": 0, "prefill_seconds": 1.0}, ArgumentValueError, "prefill_tokens"),
    ({"prefill_tokens": 10, "prefill_seconds": 0.0}, ArgumentValueError, "prefill_seconds"),
    ({"prefill_tokens": 10, "prefill_seconds": float("nan")}, ArgumentValueError, "prefill_seconds"),
    ({"scatter_bytes": 10, "scatter_seconds": -1.0}, ArgumentValueError, "scatter_seconds"),
    ({"scatter_seconds": 1.0}, ArgumentValueError, "scatter_bytes"),
    ({"timeout": -1.0}, ArgumentValueError, "timeout"),
]


@pytest.mark.parametrize(("said", "kind", "field"), MISTAKES)
def test_mistakes_are_named(
    bridge: Bridge, model: ModelTag, said: dict[str, Any], kind: type[Exception], field: str
) -> None:
    """What cannot be raises, names the argument, and is not reported."""
    handoff = Contents().acquire(bridge, "k", model=model)
    with pytest.raises(kind) as caught:
        handoff.report(**said)
    assert getattr(caught.value, "field", None) == field


def test_a_prefill_is_of_a_model(bridge: Bridge) -> None:
    """A name is no version."""
    name: Any = "tiny"
    with pytest.raises(ArgumentTypeError, match="model"):
        bridge.report_prefill(name, 10, 1.0)
