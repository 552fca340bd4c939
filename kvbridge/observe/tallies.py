"""What happened so far, counted by one thread and shown as metrics.

The library's own counters take a lock for every step, for threads that do not exist here, and a handoff moves a dozen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

_Key = TypeVar("_Key", bound=Hashable)


class Tally(Generic[_Key]):
    """Counts by keys that are all known beforehand."""

    def __init__(self, name: str, text: str, labels: Sequence[str], values: Mapping[_Key, Sequence[str]]) -> None:
        """Start at 0; `values` gives each key the values of its labels."""
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._values = dict(values)
        self._counts: dict[_Key, float] = dict.fromkeys(values, 0.0)

    def __repr__(self) -> str:
        """Show what is counted."""
        return f"<Tally {self._name} of {len(self._counts)} series>"

    def add(self, key: _Key, amount: float = 1.0) -> None:
        """Count more of `key`."""
        self._counts[key] += amount

    def family(self) -> Metric:
        """Return every count."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for key, values in self._values.items():
            family.add_metric(values, self._counts[key])
        return family


class Distribution:
    """Counts values by their size."""

    def __init__(self, name: str, text: str, bounds: Iterable[float]) -> None:
        """Start empty; each bound belongs to the values below it."""
        self._name = name
        self._text = text
        self._bounds = sorted(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def __repr__(self) -> str:
        """Show how much was counted."""
        return f"<Distribution {self._name} of {sum(self._counts)} values>"

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        """Return how many values there are up to each bound."""
        bounds = (*self._bounds, float("inf"))
        names = (floatToGoString(bound) for bound in bounds)  # type: ignore[no-untyped-call] # as its histograms do
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
