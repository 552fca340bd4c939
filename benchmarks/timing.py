"""Timing by pairs: what is measured and a memcpy of the same bytes take turns, so both see the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeAlias

Work: TypeAlias = Callable[[], float]
"""Does something once and returns the seconds that count; what it prepares or cleans up around them does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Measurements of one thing, each with the memcpy that ran right before it."""

    memcpy_seconds: tuple[float, ...]
    """Time of each memcpy."""
    work_seconds: tuple[float, ...]
    """Time of what followed it; as many."""

    @property
    def ratio(self) -> float:
        """Return the median of memcpy time over work time: 1 is memcpy speed, less is slower."""
        return median(memcpy / work for memcpy, work in zip(self.memcpy_seconds, self.work_seconds, strict=True))


def interleave(memcpy: Work, works: Mapping[str, Work], *, repetitions: int, warm_ups: int = 2) -> dict[str, Pairs]:
    """Run memcpy and each work in turn, `repetitions` times after `warm_ups` that do not count."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(warm_ups + repetitions):
        for name, work in works.items():
            taken[name].append((memcpy(), work()))
    return {name: _pairs(both[warm_ups:]) for name, both in taken.items()}


def timed(action: Callable[[], object]) -> Work:
    """Return a work that counts the whole of `action`."""

    def work() -> float:
        started_at = time.perf_counter()
        action()
        return time.perf_counter() - started_at

    return work


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the value that `percent` of the samples, at least two, do not exceed."""
    return quantiles(samples, n=100, method="inclusive")[percent - 1]


def _pairs(both: Sequence[tuple[float, float]]) -> Pairs:
    memcpy_seconds, work_seconds = zip(*both, strict=True)
    return Pairs(memcpy_seconds=memcpy_seconds, work_seconds=work_seconds)
