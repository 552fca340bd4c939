"""A bounded table of cost curves; the key that was used least recently goes first."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from kvbridge.core.cost.curve import CostCurve

K = TypeVar("K", bound=Hashable)


class CurveTable(Generic[K]):
    """Curves by key."""

    def __init__(self, keys_max: int, *, clock: Callable[[], float], fresh_seconds: float = math.inf) -> None:
        """Start empty, with room for `keys_max` keys, a positive number; a report is fresh for so long."""
        assert keys_max > 0, keys_max
        self._keys_max = keys_max
        self._clock = clock
        self._fresh_seconds = fresh_seconds
        self._curves: OrderedDict[K, CostCurve] = OrderedDict()  # the one used least recently first

    def __repr__(self) -> str:
        """Show how full the table is."""
        return f"<CurveTable of {len(self._curves)} of at most {self._keys_max} keys>"

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._curves)

    def __iter__(self) -> Iterator[tuple[K, CostCurve]]:
        """Return the keys and their curves, the one used least recently first."""
        return iter(self._curves.items())

    def find(self, key: K) -> CostCurve | None:
        """Return the curve of `key` if there is one, which counts as a use."""
        curve = self._curves.get(key)
        if curve is not None:
            self._curves.move_to_end(key)
        return curve

    def is_fresh(self, key: K, size: int) -> bool:
        """Tell whether reports on `key` are fresh where they matter for `size`; what nobody reported on is."""
        curve = self._curves.get(key)
        return curve is None or curve.is_fresh(size, now=self._clock())

    def record(self, key: K, size: int, seconds: float, *, size_field: str) -> None:
        """Add a report to the curve of `key`, which is made if need be; a refused report leaves the table as it was.

        Raises:
            InvalidFieldError: a figure is out of bounds.
        """
        curve = self._curves.get(key) or CostCurve(fresh_seconds=self._fresh_seconds)
        curve.record(size, seconds, size_field=size_field, now=self._clock())
        self._put(key, curve)

    def restore(self, key: K, stored: object) -> None:
        """Set the curve of `key` to that of a snapshot, unless that is empty."""
        curve = CostCurve.restore(stored, now=self._clock(), fresh_seconds=self._fresh_seconds)
        if not curve.empty:
            self._put(key, curve)

    def _put(self, key: K, curve: CostCurve) -> None:
        """Set the curve of `key` as the one used last, and forget another if that is one too many."""
        self._curves[key] = curve
        self._curves.move_to_end(key)
        if len(self._curves) > self._keys_max:
            self._curves.popitem(last=False)
