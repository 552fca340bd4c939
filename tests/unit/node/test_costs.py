"""What a handoff costs beside the prefill that it replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbridge.core.catalog.policy import RoutePolicy
from kvbridge.core.cost import CostLimits
from kvbridge.core.cost.curve import RATES_MIN
from kvbridge.core.cost.policy import GAIN_MAX
from kvbridge.core.descriptor import Verification, seal
from kvbridge.core.gate import Costs
from kvbridge.node.costs import CostKeeper
from tests import builders

SPEC = builders.spec(capacity_tokens=256, tokens=builders.tokens(256))
DESCRIPTOR = seal(
    SPEC, generation=1, valid_length=None, tokens=None, layer_digests=(), verification=Verification.DIGEST
)
BYTES = DESCRIPTOR.canonical_bytes
MODEL = builders.model_tag()


def costs_of(keeper: CostKeeper, policy: RoutePolicy | None = None, **changes: Any) -> Costs:
    """Return what handing over 256 tokens costs."""
    terms: dict[str, Any] = {
        "consumer": MODEL,
        "attached": True,
        "verification": Verification.NONE,
        "deadline_seconds": None,
    }
    return keeper.costs(("default", 1), DESCRIPTOR, policy=policy or RoutePolicy(), **{**terms, **changes})


def with_prefill(seconds: float) -> CostKeeper:
    """Return costs of a node to which enough prefills of 256 tokens were reported."""
    keeper = CostKeeper("node-1")
    for _ in range(RATES_MIN):
        keeper.record_prefill("default", MODEL, 256, seconds)
    return keeper


def test_the_floor_holds_while_nothing_is_measured() -> None:
    """Fewer tokens than the floor are too few as long as nobody has said what a prefill takes."""
    unmeasured = costs_of(CostKeeper("node-1"))
    assert unmeasured.problem is not None
    assert "fewer than 512" in unmeasured.problem
    assert (unmeasured.prefill_seconds, unmeasured.handoff_seconds) == (None, 0.0)
    assert costs_of(CostKeeper("node-1"), RoutePolicy(tokens_min_unmeasured=256)).problem is None


def test_a_measured_prefill_lifts_the_floor_on_one_host() -> None:
    """In shared memory the transfer costs nothing, so any measured prefill is longer."""
    measured = costs_of(with_prefill(0.5))
    assert measured.problem is None
    assert measured.prefill_seconds == pytest.approx(0.5)


def test_a_client_by_value_needs_its_transfer_measured() -> None:
    """Who shares no memory pays for the download, which is not free as long as nobody has measured it."""
    keeper = with_prefill(0.5)
    assert costs_of(keeper, attached=False).problem is not None
    for _ in range(RATES_MIN):
        keeper.record_download("default", BYTES, 0.1)
    assert costs_of(keeper, attached=False).problem is None
    for _ in range(2 * RATES_MIN + 1):
        keeper.record_download("default", BYTES, 0.6)
    slow = costs_of(keeper, attached=False)
    assert slow.problem is not None
    assert slow.handoff_seconds == pytest.approx(0.6)
    assert costs_of(keeper).problem is None, "those who share memory do not download"


def test_what_did_not_pay_is_tried_again_after_a_while() -> None:
    """A source or a reader that was slow is not slow for ever, and nobody who is refused would find out."""
    now = 0.0
    keeper = CostKeeper("node-1", clock=lambda: now)
    for _ in range(RATES_MIN):
        keeper.record_prefill("default", MODEL, 256, 0.5)
        keeper.record_pull("node-2", BYTES, 5.0)
        keeper.record_download("default", BYTES, 5.0)
    for where in ({"owner": "node-2"}, {"attached": False}):
        now = 0.0
        assert costs_of(keeper, **where).problem is not None
        now = CostLimits().fresh_seconds + 1.0
        assert costs_of(keeper, **where).problem is None


def test_a_scatter_counts_as_cost() -> None:
    """What the consumer needs to bring the cache into its own blocks is part of the handoff."""
    keeper = with_prefill(0.5)
    for _ in range(RATES_MIN):
        keeper.record_scatter("default", MODEL, BYTES, 0.3)
    assert costs_of(keeper).problem is None
    assert costs_of(keeper, RoutePolicy(gain_min=2.0)).problem is not None


def test_a_check_of_the_bytes_counts_as_cost() -> None:
    """A check that takes longer than the prefill does not pay, and is the time until the bytes are there."""
    keeper = with_prefill(0.5)
    moment = iter([0.0, 2.0] * RATES_MIN)
    keeper.checks._clock = lambda: next(moment)
    for _ in range(RATES_MIN):
        with keeper.checks.timed(("default", 1), DESCRIPTOR, Verification.DIGEST):
            pass
    checked = costs_of(keeper, verification=Verification.DIGEST, deadline_seconds=1.5)
    assert checked.problem is not None
    assert checked.bytes_seconds == pytest.approx(2.0)
    assert checked.deadline_seconds == 1.5
    assert costs_of(keeper).problem is None


def test_other_models_prefills_say_nothing() -> None:
    """Measurements belong to one model version."""
    keeper = with_prefill(0.5)
    assert costs_of(keeper, consumer=replace(MODEL, revision="another")).problem is not None


def test_no_tenant_decides_what_pays_for_another() -> None:
    """What its clients report, and how slowly they read, is theirs; how fast other nodes send holds for everybody."""
    keeper, before = with_prefill(0.5), costs_of(with_prefill(0.5))
    for _ in range(2 * RATES_MIN + 1):
        keeper.record_prefill("other", MODEL, 256, 1e-6)
        keeper.record_scatter("other", MODEL, BYTES, 1000.0)
        keeper.record_download("other", BYTES, 1000.0)
        keeper.record_pull("node-2", BYTES, 0.1)
    for number in range(2 * CostLimits().models_max):
        keeper.record_prefill("other", replace(MODEL, revision=str(number)), 256, 1.0)
    assert costs_of(keeper) == before
    assert "fewer than" in str(costs_of(keeper, attached=False).problem), "its own downloads are not measured"
    assert costs_of(keeper, owner="node-2").handoff_seconds == pytest.approx(0.1)


def test_every_policy_of_a_route_can_be_judged_by() -> None:
    """The widest policy that a route may have is one that estimates can be held against."""
    widest = RoutePolicy(gain_min=GAIN_MAX, tokens_min_unmeasured=1)
    assert costs_of(with_prefill(0.5), widest).problem is None


def test_what_counts_is_the_time_of_whoever_would_be_asked_first() -> None:
    """A holder that is cheaper than the owner; but values in fewer bits come from the owner alone."""
    keeper = with_prefill(100.0)
    for _ in range(RATES_MIN):
        keeper.record_pull("owner", BYTES, 8.0)
        keeper.record_pull("holder", BYTES, 1.0)
    exact = costs_of(keeper, owner="owner", holders=("holder",))
    assert exact.bytes_seconds == exact.handoff_seconds == pytest.approx(1.0)
    alone = costs_of(keeper, owner="owner")
    assert alone.bytes_seconds == pytest.approx(8.0)
    lossy = costs_of(keeper, owner="owner", holders=("holder",), arriving_bytes=BYTES)
    assert lossy.bytes_seconds == pytest.approx(8.0)
