"""Seconds as a function of size (tokens, bytes), from reports of which some may be absurd.

1. **Octaves.** Sizes from one power of two to the next share an octave. It keeps the newest few rates, in seconds per
   unit of size, and its estimate is their median. The median is the estimate that the largest share of absurd values
   cannot carry away, one half (its breakdown point: F. R. Hampel, *A General Qualitative Definition of Robustness*,
   1971; P. J. Rousseeuw and A. M. Leroy, *Robust Regression and Outlier Detection*, 1987), where one such value is
   enough to ruin a mean or a line fitted by least squares. Keeping only the newest lets it follow a machine that
   changed. An octave with too few reports to outvote one absurd report counts as not measured.
2. **Knots.** Each measured octave gives one point of the curve, at its middle. Within its octave its rate holds, which
   for anything between constant and quadratic is right to a factor of two. Time never falls with size: where two knots
   say otherwise, one is corrected to the other.
3. **Two readings.** A wrong guess towards the text costs one prefill, whose report mends the guess. A wrong guess
   towards the handoff is never found out, for then nothing is prefilled. So beyond its knots `at_least`, for a prefill,
   goes no further than what holds of any `fixed + a * size + b * size**2` of which no term is negative. Towards smaller
   sizes it shrinks with the square. Towards larger ones it grows along the steepest line through two knots, either of
   which is doubted by the factor of two, and so more slowly than in proportion; after a single octave it does not
   grow, for its cost may all be fixed. `at_most`, for what a handoff costs, is the mirror image for
   `fixed + a * size`: towards larger sizes it grows in proportion, towards smaller ones it does not shrink.
4. **Age.** Whoever is refused reports nothing, so what was slow once must not refuse for ever. An octave without a
   fresh report keeps too few to count as measured. What others say of its sizes is a guess that nobody would correct,
   so `is_fresh` says whether there are fresh reports of a size itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvbridge.core.bounds import require_count, require_number

RATES_MAX = 15
"""Newest reports that an octave keeps; odd, so that the median is one of them when it is full."""
RATES_MIN = 3
"""Reports that make an octave measured: one absurd report among three is outvoted."""
RATES_OLD = RATES_MIN - 1
"""Reports that an octave keeps when none is fresh any more: it is not measured then, so that it corrects no other. The
next report makes it so again and is not believed alone; the second like it is."""
DOUBT = 2.0
"""Factor by which the rate of an octave may be wrong for one of its sizes."""
SIZE_MAX = 1 << 50
"""Largest size in a report."""
OCTAVE_MAX = SIZE_MAX.bit_length() - 1
"""Number of the largest octave."""
SECONDS_MIN = 1e-9
"""Shortest time in a report; below it a clock has shown nothing."""
SECONDS_MAX = 86_400.0
"""Longest time in a report; beyond a day it is a mistake."""
RATE_MIN = SECONDS_MIN / SIZE_MAX
"""Smallest rate that a valid report can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knot:
    """One measured octave."""

    size_min: int
    """Smallest size of the octave, a power of two."""
    rate: float
    """Seconds per unit of size; positive."""

    @property
    def size(self) -> float:
        """Return the size at which the curve passes through the knot: the middle of the octave."""
        return 1.5 * self.size_min

    @property
    def seconds(self) -> float:
        """Return the time at that size."""
        return self.rate * self.size

    def with_seconds(self, seconds: float) -> Knot:
        """Return the knot with another time at its size."""
        return Knot(size_min=self.size_min, rate=seconds / self.size)


class CostCurve:
    """Reports of sizes and seconds, and what follows for other sizes. Bounded in memory whatever is reported."""

    def __init__(self, *, fresh_seconds: float = math.inf) -> None:
        """Start without any report; one is fresh for so long."""
        self._fresh_seconds = fresh_seconds
        self._octaves: dict[int, deque[float]] = {}  # by number: the newest rates, the oldest first
        self._reported_at: dict[int, float] = {}  # by octave: when the newest came
        self._low: list[Knot] = []
        self._high: list[Knot] = []

    def __repr__(self) -> str:
        """Show what is measured."""
        reports = sum(map(len, self._octaves.values()))
        return f"<CostCurve of {len(self._low)} measured octaves, {reports} reports kept>"

    def record(self, size: int, seconds: float, *, size_field: str, now: float = 0.0) -> None:
        """Take one report, at `now`; an octave that had no fresh one any more keeps `RATES_OLD` of what it had.

        Raises:
            InvalidFieldError: `size_field` or `seconds` is not a positive, finite number within bounds.
        """
        require_count(size_field, size, least=1, most=SIZE_MAX)
        require_number("seconds", seconds, least=SECONDS_MIN, most=SECONDS_MAX)
        octave = _octave_of(size)
        self._fade(now)
        self._extend(octave, [seconds / size])
        self._reported_at[octave] = now
        self._rebuild()

    def at_least(self, size: int) -> float | None:
        """Return the seconds that `size` takes at the least; never falls with size; None if nothing is measured."""
        above = bisect_right(self._low, float(size), key=lambda knot: knot.size)
        if not self._low:
            return None
        if above == len(self._low):
            return _grown(self._low, size)
        shrunk = _shrunk(self._low[above], size)
        if above == 0:
            return shrunk
        between = _between(self._low[above - 1], self._low[above], size)
        return min(between, max(_grown(self._low[:above], size), shrunk))

    def at_most(self, size: int) -> float | None:
        """Return the seconds that `size` takes at the most; never falls with size; None if nothing is measured."""
        above = bisect_right(self._high, float(size), key=lambda knot: knot.size)
        if not self._high:
            return None
        if above == len(self._high):
            return self._high[-1].rate * size
        if above == 0:
            return self._high[0].rate * max(size, self._high[0].size_min)
        return _between(self._high[above - 1], self._high[above], size)

    def is_fresh(self, size: int, *, now: float) -> bool:
        """Tell whether the octave of `size` has a fresh report; if it never had one, whether all others have."""
        reported_at = self._reported_at.get(_octave_of(size), min(self._reported_at.values(), default=now))
        return now - reported_at <= self._fresh_seconds

    def snapshot(self) -> dict[str, list[float]]:
        """Return the rates kept by octave, as plain data."""
        return {str(octave): list(rates) for octave, rates in sorted(self._octaves.items())}

    @classmethod
    def restore(cls, stored: object, *, now: float = 0.0, fresh_seconds: float = math.inf) -> CostCurve:
        """Return the curve of a snapshot, as if all of it was reported `now`.

        Whatever does not fit is ignored, for it comes from outside.
        """
        curve = cls(fresh_seconds=fresh_seconds)
        if isinstance(stored, dict):
            for octave in range(OCTAVE_MAX + 1):
                curve._extend(octave, _rates_of(stored.get(str(octave))))
            curve._reported_at = dict.fromkeys(curve._octaves, now)
            curve._rebuild()
        return curve

    @property
    def empty(self) -> bool:
        """Tell whether there is no report at all."""
        return not self._octaves

    def _fade(self, now: float) -> None:
        for octave, reported_at in self._reported_at.items():
            rates = self._octaves[octave]
            while len(rates) > RATES_OLD and now - reported_at > self._fresh_seconds:
                rates.popleft()

    def _extend(self, octave: int, rates: list[float]) -> None:
        if rates:
            self._octaves.setdefault(octave, deque(maxlen=RATES_MAX)).extend(rates)

    def _rebuild(self) -> None:
        self._low = _ordered_down(self._knots(upper=False))
        self._high = _ordered_up(self._knots(upper=True))

    def _knots(self, *, upper: bool) -> list[Knot]:
        return [
            Knot(size_min=1 << octave, rate=_median(rates, upper=upper))
            for octave, rates in sorted(self._octaves.items())
            if len(rates) >= RATES_MIN
        ]


def _octave_of(size: int) -> int:
    return size.bit_length() - 1


def _median(rates: Iterable[float], *, upper: bool) -> float:
    """Return the median, of an even number the upper or lower one of the two in the middle."""
    ordered = sorted(rates)
    return ordered[len(ordered) // 2 if upper else (len(ordered) - 1) // 2]


def _ordered_down(knots: list[Knot]) -> list[Knot]:
    """Lower each knot to the least that a larger size takes."""
    for i in range(len(knots) - 2, -1, -1):
        if knots[i].seconds > knots[i + 1].seconds:
            knots[i] = knots[i].with_seconds(knots[i + 1].seconds)
    return knots


def _ordered_up(knots: list[Knot]) -> list[Knot]:
    """Raise each knot to the most that a smaller size takes."""
    for i in range(1, len(knots)):
        if knots[i].seconds < knots[i - 1].seconds:
            knots[i] = knots[i].with_seconds(knots[i - 1].seconds)
    return knots


def _between(left: Knot, right: Knot, size: int) -> float:
    """Return the seconds on the straight line between two knots."""
    share = (size - left.size) / (right.size - left.size)
    return (1 - share) * left.seconds + share * right.seconds


def _shrunk(knot: Knot, size: int) -> float:
    """Return the least that a smaller size takes: the rate holds within the octave, below it goes with the square."""
    return knot.rate * size * min(1.0, size / knot.size_min)


def _grown(knots: list[Knot], size: int) -> float:
    """Return the least that a size larger than those of all `knots` takes."""
    last = knots[-1]
    size_end = 2 * last.size_min
    slopes = [(last.seconds / DOUBT - knot.seconds * DOUBT) / (last.size - knot.size) for knot in knots[:-1]]
    return last.rate * min(size, size_end) + max([0.0, *slopes]) * max(0, size - size_end)


def _rates_of(stored: object) -> list[float]:
    return [float(rate) for rate in stored[-RATES_MAX:] if _is_rate(rate)] if isinstance(stored, list) else []


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and RATE_MIN <= value <= SECONDS_MAX
