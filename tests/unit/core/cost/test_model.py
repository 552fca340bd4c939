"""The cost model: what is measured, for whom, within which bounds, and across a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.cost import CostLimits, CostModel, CostPolicy, Estimate, judge
from kvbridge.core.cost.curve import RATES_MAX
from kvbridge.core.cost.model import NODE_ID_CHARACTERS_MAX
from kvbridge.core.errors import InvalidFieldError
from tests.builders import model_tag

MODEL, OTHER = model_tag(), model_tag(adapter="lora")
HERE, ACROSS = ("a", "a"), ("a", "b")
LIMITS = CostLimits(models_max=3, pairs_max=4)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        """Start at 0."""
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def thrice(record: Callable[[], None]) -> None:
    """Report the same thing often enough to count as measured."""
    for _ in range(3):
        record()


def measured_model() -> CostModel:
    """Return a model that knows one model's prefill and scatter and one pair's transfer."""
    costs = CostModel(LIMITS, clock=Clock())
    thrice(lambda: costs.record_prefill(MODEL, 1024, 2.0))
    thrice(lambda: costs.record_transfer(ACROSS, 1 << 20, 0.5))
    thrice(lambda: costs.record_scatter(MODEL, 1 << 20, 0.25))
    return costs


def test_nothing_is_known_at_first() -> None:
    """Without any report there is no estimate, except that nothing has to move on one host."""
    costs = CostModel(LIMITS, clock=Clock())
    assert costs.estimate(MODEL, ACROSS, 1024, 1 << 20) == Estimate(prefill_seconds=None, handoff_seconds=None)
    assert costs.estimate(MODEL, HERE, 1024, 1 << 20) == Estimate(prefill_seconds=None, handoff_seconds=0.0)


def test_a_handoff_costs_its_transfer_and_its_scatter() -> None:
    """The two add up."""
    estimate = measured_model().estimate(MODEL, ACROSS, 1024, 1 << 20)
    assert estimate == Estimate(prefill_seconds=2.0, handoff_seconds=0.75)
    assert estimate.measured


def slow_then(*fast_at: float) -> Estimate:
    """Return the estimate after slow transfers at 0 s, many of them, and fast ones at these times."""
    clock = Clock()
    costs = CostModel(LIMITS, clock=clock)
    thrice(lambda: costs.record_prefill(MODEL, 1024, 2.0))
    for _ in range(RATES_MAX):
        costs.record_transfer(ACROSS, 1 << 20, 5.0)
        costs.record_transfer(ACROSS, 1 << 30, 50.0)
    for clock.now in fast_at:
        costs.record_transfer(ACROSS, 1 << 20, 0.5)
    return costs.estimate(MODEL, ACROSS, 1024, 1 << 20)


@pytest.mark.parametrize(("transfer", "scatter"), [(5.0, 0.1), (0.1, 5.0)])
def test_what_was_measured_long_ago_refuses_nobody(transfer: float, scatter: float) -> None:
    """Who is refused measures nothing, so somebody has to be let through for the next measurement."""
    clock = Clock()
    costs = CostModel(LIMITS, clock=clock)
    assert costs.estimate(MODEL, ACROSS, 1024, 1 << 20).fresh, "nothing is old of which nothing is known"
    thrice(lambda: costs.record_prefill(MODEL, 1024, 2.0))
    thrice(lambda: costs.record_transfer(ACROSS, 1 << 20, transfer))
    thrice(lambda: costs.record_scatter(MODEL, 1 << 20, scatter))
    clock.now = LIMITS.fresh_seconds
    refused = costs.estimate(MODEL, ACROSS, 1024, 1 << 20)
    assert judge(refused, 1024, CostPolicy()) is not None
    clock.now += 1.0
    later = costs.estimate(MODEL, ACROSS, 1024, 1 << 20)
    assert later == replace(refused, fresh=False)
    assert judge(later, 1024, CostPolicy()) is None
    assert judge(later, 1, CostPolicy()) is None, "which is no reason to take it as never measured"


def test_a_slow_hour_is_forgotten_by_the_second_fast_transfer_after_it() -> None:
    """The first alone may be absurd; without the pause between they would have to be most of all that is kept."""
    assert slow_then().handoff_seconds == 5.0
    assert slow_then(61.0) == Estimate(prefill_seconds=2.0, handoff_seconds=5.0)
    assert slow_then(61.0, 122.0).handoff_seconds == 0.5
    assert slow_then(61.0, 62.0, 63.0).handoff_seconds == 0.5, "a few that are let through at once do, too"
    assert slow_then(57.0, 58.0, 59.0).handoff_seconds == 5.0


@pytest.mark.parametrize("every_seconds", [1.0, 100.0])
def test_what_broke_off_does_not_weigh_on_whole_transfers_for_ever(every_seconds: float) -> None:
    """Few bytes that took long raise, for a while, what many are expected to take: time does not fall with size."""
    clock = Clock()
    costs = CostModel(LIMITS, clock=clock)
    thrice(lambda: costs.record_transfer(ACROSS, 1 << 30, 0.1))
    assert costs.transfer_seconds(ACROSS, 1 << 30) == pytest.approx(0.1)
    thrice(lambda: costs.record_transfer(ACROSS, 1 << 20, 3.0))
    assert costs.transfer_seconds(ACROSS, 1 << 30) == pytest.approx(3.0, rel=0.5)
    while clock.now <= LIMITS.fresh_seconds:
        clock.now += every_seconds
        costs.record_transfer(ACROSS, 1 << 30, 0.1)
    assert costs.transfer_seconds(ACROSS, 1 << 30) == pytest.approx(0.1)


@pytest.mark.parametrize("large", [1 << 30, 1 << 29])
def test_small_transfers_do_not_refuse_large_ones_for_ever(large: int) -> None:
    """Few bytes are slow for their size, so they say nothing against many while nobody moves many."""
    clock = Clock()
    costs = CostModel(LIMITS, clock=clock)
    thrice(lambda: costs.record_prefill(MODEL, 1024, 2.0))
    thrice(lambda: costs.record_transfer(ACROSS, 1 << 30, 0.1))
    for clock.now in range(0, 200, 10):
        costs.record_transfer(ACROSS, 1 << 16, 0.001)
        assert judge(costs.estimate(MODEL, ACROSS, 1024, large), 1024, CostPolicy()) is None
    assert not costs.transfer_is_fresh(ACROSS, large)
    assert costs.transfer_is_fresh(ACROSS, 1 << 16)


def test_on_one_host_the_scatter_counts_alone() -> None:
    """A transfer within a node costs what was measured, and nothing if nothing was."""
    costs = measured_model()
    assert costs.estimate(MODEL, HERE, 1024, 1 << 20).handoff_seconds == 0.25
    thrice(lambda: costs.record_transfer(HERE, 1 << 20, 0.125))
    assert costs.estimate(MODEL, HERE, 1024, 1 << 20).handoff_seconds == 0.375


def test_a_scatter_alone_is_not_the_cost_of_a_handoff_across_hosts() -> None:
    """Where the transfer is not measured, the handoff is not."""
    estimate = measured_model().estimate(MODEL, ("a", "c"), 1024, 1 << 20)
    assert estimate == Estimate(prefill_seconds=2.0, handoff_seconds=None)
    assert not estimate.measured


def test_each_model_and_each_direction_is_its_own() -> None:
    """Another adapter and the way back are not measured."""
    costs = measured_model()
    assert costs.estimate(OTHER, ACROSS, 1024, 1 << 20) == Estimate(prefill_seconds=None, handoff_seconds=0.5)
    assert costs.estimate(MODEL, ("b", "a"), 1024, 1 << 20).handoff_seconds is None


def test_the_key_used_least_recently_goes_first() -> None:
    """A full table forgets the model that was neither reported nor asked for the longest."""
    costs = CostModel(LIMITS, clock=Clock())
    first, second, third, fourth = (model_tag(name=name) for name in "1234")
    for model in (first, second, third):
        thrice(lambda model=model: costs.record_prefill(model, 1024, 1.0))  # type: ignore[misc]
    costs.estimate(first, HERE, 1024, 1)
    costs.record_prefill(fourth, 1024, 1.0)
    known = [costs.estimate(model, HERE, 1024, 1).prefill_seconds for model in (first, second, third)]
    assert known == [1.0, None, 1.0]


@given(
    reports=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 1 << 30), st.floats(1e-6, 1e3)), max_size=60
    )
)
def test_nothing_grows_beyond_its_limit_and_all_of_it_survives_a_restart(
    reports: list[tuple[int, int, int, float]],
) -> None:
    """Any number of models and pairs leaves at most the limits' many, and JSON brings back each in its order."""
    costs = CostModel(LIMITS, clock=Clock())
    for source, target, size, seconds in reports:
        costs.record_prefill(model_tag(name=str(source)), size, seconds)
        costs.record_scatter(model_tag(name=str(target)), size, seconds)
        costs.record_transfer((str(source), str(target)), size, seconds)
    stored = costs.snapshot()
    assert len(stored["prefill"]) <= 3
    assert len(stored["scatter"]) <= 3
    assert len(stored["transfer"]) <= 4
    assert (
        CostModel.restore(json.loads(json.dumps(stored, allow_nan=False)), LIMITS, clock=Clock()).snapshot() == stored
    )


def test_of_a_snapshot_that_is_too_large_the_newest_is_kept() -> None:
    """Limits that were lowered hold for what is restored."""
    costs = measured_model()
    thrice(lambda: costs.record_prefill(OTHER, 1024, 3.0))
    again = CostModel.restore(costs.snapshot(), CostLimits(models_max=1, pairs_max=1), clock=Clock())
    assert again.estimate(MODEL, ACROSS, 1024, 1 << 20).prefill_seconds is None
    assert again.estimate(OTHER, ACROSS, 1024, 1 << 20) == Estimate(prefill_seconds=3.0, handoff_seconds=0.5)


def damaged(**changes: Any) -> dict[str, Any]:
    """Return a snapshot of which some parts were replaced."""
    return {**measured_model().snapshot(), **changes}


GOOD_OCTAVES = {"10": [0.5, 0.5, 0.5]}
DAMAGED_ENTRIES: list[Any] = [
    None,
    "entry",
    [],
    {},
    {"model": None, "octaves": GOOD_OCTAVES},
    {"model": {"name": "no other field"}, "octaves": GOOD_OCTAVES},
    {"model": {**dict.fromkeys(("name", "revision", "weight_dtype", "tokenizer_digest"), "x"), "adapter": 3}},
    {"model": {**dict.fromkeys(("name", "revision", "weight_dtype", "tokenizer_digest"), ""), "adapter": ""}},
    {"model": {1: 2}, "octaves": GOOD_OCTAVES},
    {"pair": None, "octaves": GOOD_OCTAVES},
    {"pair": ["a"], "octaves": GOOD_OCTAVES},
    {"pair": ["a", 3], "octaves": GOOD_OCTAVES},
    {"pair": ["a", ""], "octaves": GOOD_OCTAVES},
    {"pair": ["a", ["b"]], "octaves": GOOD_OCTAVES},
    {"pair": ["a", "b" * (NODE_ID_CHARACTERS_MAX + 1)], "octaves": GOOD_OCTAVES},
    {"pair": "ab", "octaves": GOOD_OCTAVES},
    {"pair": ["a", "b"], "octaves": {"10": ["fast"]}},
    {"pair": ["a", "b"]},
]


@pytest.mark.parametrize("entry", DAMAGED_ENTRIES, ids=range(len(DAMAGED_ENTRIES)))
def test_a_damaged_entry_is_ignored_alone(entry: Any) -> None:
    """What stands beside it is restored."""
    stored = measured_model().snapshot()
    for table in ("prefill", "transfer", "scatter"):
        stored[table].append(entry)
    assert CostModel.restore(stored, LIMITS, clock=Clock()).snapshot() == measured_model().snapshot()


@pytest.mark.parametrize(
    "stored", [None, 3, "x", [], {}, damaged(version=0), damaged(version=[1]), damaged(version="1")], ids=range(8)
)
def test_a_snapshot_of_another_kind_restores_to_nothing(stored: object) -> None:
    """An older form is ignored rather than misread."""
    assert repr(CostModel.restore(stored, LIMITS, clock=Clock())) == (
        "<CostModel of 0 models' prefill, 0 node pairs' transfer, 0 models' scatter>"
    )


def test_a_damaged_table_leaves_the_others() -> None:
    """One table of the wrong shape does not take the rest with it."""
    again = CostModel.restore(damaged(prefill={"model": 1}, scatter=None), LIMITS, clock=Clock())
    assert again.estimate(MODEL, ACROSS, 1024, 1 << 20) == Estimate(prefill_seconds=None, handoff_seconds=0.5)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["version", "prefill", "transfer", "scatter", "model", "pair", "octaves", "3", "name"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(prefill=json_values, transfer=json_values, scatter=json_values)
def test_no_json_at_all_can_break_restoring(prefill: object, transfer: object, scatter: object) -> None:
    """Whatever was stored, a model comes back that works."""
    stored = {"version": 1, "prefill": prefill, "transfer": transfer, "scatter": scatter}
    costs = CostModel.restore(stored, LIMITS, clock=Clock())
    costs.estimate(MODEL, ACROSS, 1024, 1 << 20)
    assert CostModel.restore(costs.snapshot(), LIMITS, clock=Clock()).snapshot() == costs.snapshot()


def test_a_refused_report_names_its_field_and_makes_no_entry() -> None:
    """A stranger's nonsense takes no place from those who are measured."""
    costs, before = CostModel(LIMITS, clock=Clock()), CostModel(LIMITS, clock=Clock()).snapshot()
    refused: list[tuple[str, Callable[[], None]]] = [
        ("tokens", lambda: costs.record_prefill(MODEL, 0, 1.0)),
        ("seconds", lambda: costs.record_prefill(MODEL, 5, float("inf"))),
        ("bytes", lambda: costs.record_transfer(ACROSS, -1, 1.0)),
        ("pair", lambda: costs.record_transfer(("a", ""), 1, 1.0)),
        ("bytes", lambda: costs.record_scatter(MODEL, 0, 1.0)),
    ]
    for field, record in refused:
        with pytest.raises(InvalidFieldError) as refusal:
            record()
        assert refusal.value.field == field
    assert costs.snapshot() == before
