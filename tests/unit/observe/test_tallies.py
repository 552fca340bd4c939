"""Counts as Prometheus reads them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from kvbridge.observe.tallies import Distribution, Tally

BOUNDS = (0.1, 0.25, 1.0)


def test_a_tally_shows_every_series() -> None:
    """What was never counted is there with 0."""
    tally = Tally("things", "Things.", ["kind"], {1: ("one",), 2: ("two",)})
    tally.add(2)
    tally.add(2, 1.5)
    samples = {sample.labels["kind"]: sample.value for sample in tally.family().samples}
    assert samples == {"one": 0, "two": 2.5}


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 3)), max_size=30))
def test_a_distribution_is_the_librarys_histogram(values: list[float]) -> None:
    """Buckets, count and sum are those of the library, at the bounds, too."""
    mine, registry = Distribution("sizes", "Sizes.", BOUNDS), CollectorRegistry()
    theirs = Histogram("sizes", "Sizes.", buckets=BOUNDS, registry=registry)
    for value in values:
        mine.add(value)
        theirs.observe(value)
    for sample in mine.family().samples:
        assert registry.get_sample_value(sample.name, sample.labels) == sample.value
    assert len(mine.family().samples) == len(BOUNDS) + 3
