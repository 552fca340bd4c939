"""What a node measures about its directory and the other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvbridge.observe.tallies import Distribution

LOOK_UP_BUCKETS = (2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0)
NEIGHBOUR_STATES = ("agreeing", "behind", "unreachable")
"""Values of the label `state`."""


def new_look_ups() -> Distribution:
    """Return where the time of each look-up is counted."""
    return Distribution(
        "kvbridge_directory_look_up_seconds", "Time that looking up keys on other nodes took.", LOOK_UP_BUCKETS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySample:
    """The directory at the moment of a scrape; as it stands here for a node on its own."""

    is_up: bool = True
    """Whether it answered last."""
    age_seconds: float = 0.0
    """How long ago it answered."""
    failures: int = 0
    """How often it did not answer."""
    look_ups: Distribution = field(default_factory=new_look_ups)
    """How long looking up keys took."""
    neighbours: Mapping[str, int] = field(default_factory=dict)
    """How many other nodes there are in each of `NEIGHBOUR_STATES`."""
    orders: int = 0
    """Orders in force."""


def directory_families(sample: DirectorySample) -> Iterator[Metric]:
    """Yield every family as it is now."""
    yield GaugeMetricFamily(
        "kvbridge_directory_up", "0 while the directory does not answer, else 1.", value=float(sample.is_up)
    )
    yield GaugeMetricFamily(
        "kvbridge_directory_age_seconds", "How long ago the directory answered.", value=sample.age_seconds
    )
    yield CounterMetricFamily(
        "kvbridge_directory_failures", "How often the directory did not answer.", value=float(sample.failures)
    )
    yield sample.look_ups.family()
    neighbours = GaugeMetricFamily("kvbridge_neighbours", "Other nodes that are known.", labels=["state"])
    for state in NEIGHBOUR_STATES:
        neighbours.add_metric([state], float(sample.neighbours.get(state, 0)))
    yield neighbours
    yield GaugeMetricFamily(
        "kvbridge_orders", "Orders that hold on all nodes, as far as this one knows.", value=float(sample.orders)
    )
