"""Outcomes of the handoffs in a sliding window of time.

Time is cut into buckets of a twelfth of the window. The bucket of the present and the eleven before it are kept, so the
window reaches back between eleven twelfths and the whole of its length, and its memory does not grow with the traffic.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from enum import StrEnum, unique

BUCKETS = 12
"""Buckets that a window is made of."""


@unique
class BadOutcome(StrEnum):
    """What counts against a route."""

    CORRUPT = "CORRUPT"
    """The bytes failed their digest or held values that are not finite."""
    PROBE = "PROBE"
    """A quality probe scored below its threshold."""
    ALIGNMENT = "ALIGNMENT"
    """The aligner's error was above its threshold."""
    REPORTED = "REPORTED"
    """The consumer reported the handoff as bad."""


class OutcomeWindow:
    """Counts of good and bad handoffs in the window that ends now."""

    def __init__(self, window_seconds: float) -> None:
        """Start empty with a window of `window_seconds`, a positive number."""
        self._bucket_seconds = window_seconds / BUCKETS
        self._buckets: deque[tuple[int, Counter[BadOutcome | None]]] = deque()  # by number; None counts the good
        self._total: Counter[BadOutcome | None] = Counter()

    def __repr__(self) -> str:
        """Show the counts."""
        return f"<OutcomeWindow {sum(self.bad.values())} of {self.samples} bad in {len(self._buckets)} buckets>"

    @property
    def samples(self) -> int:
        """Return how many handoffs are counted."""
        return self._total.total()

    @property
    def bad_samples(self) -> int:
        """Return how many of them were bad."""
        return self.samples - self._total[None]

    @property
    def bad(self) -> dict[BadOutcome, int]:
        """Return how many of them were bad, by kind."""
        return {outcome: self._total[outcome] for outcome in BadOutcome if self._total[outcome]}

    def advance(self, now: float) -> None:
        """Forget the buckets that have left the window."""
        oldest = self._number(now) - BUCKETS + 1
        while self._buckets and self._buckets[0][0] < oldest:
            self._total.subtract(self._buckets.popleft()[1])

    def add(self, now: float, outcome: BadOutcome | None) -> None:
        """Count one handoff, good if `outcome` is None; `now` is not before any earlier one."""
        self.advance(now)
        self._count(self._number(now), Counter({outcome: 1}))

    def turn_bad(self, now: float, outcome: BadOutcome) -> None:
        """Count one handoff as bad that was counted as good before; the newest good one stands for it."""
        self.advance(now)
        for _, counts in reversed(self._buckets):
            if counts[None]:
                counts[None] -= 1
                self._total[None] -= 1
                break
        self.add(now, outcome)

    def clear(self) -> None:
        """Forget everything."""
        self._buckets.clear()
        self._total.clear()

    def resize(self, now: float, window_seconds: float) -> None:
        """Change the window's length and keep what is in it; each old bucket counts as if at its newest instant."""
        old, old_seconds = list(self._buckets), self._bucket_seconds
        self.clear()
        self._bucket_seconds = window_seconds / BUCKETS
        for number, counts in old:
            self._count(self._number(min(now, (number + 1) * old_seconds)), counts)
        self.advance(now)

    def _number(self, now: float) -> int:
        return math.floor(now / self._bucket_seconds)

    def _count(self, number: int, counts: Counter[BadOutcome | None]) -> None:
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append((number, Counter()))
        self._buckets[-1][1].update(counts)
        self._total.update(counts)
