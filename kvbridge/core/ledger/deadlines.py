"""A priority queue whose entries can be moved and removed, with lazy deletion.

1. The heap holds, for each key, one *queued* priority that is never greater than the key's true one.
2. Moving a key to a greater priority only notes it; so renewing a lease touches no heap. Moving it to a lesser one
   pushes a second entry and makes the first one stale.
3. Removing a key only forgets it; its entry is stale from then on.
4. Whoever looks at the top repairs it first: stale entries go, entries that are queued too early sink.
5. When more than half of a heap that is not small is stale, it is rebuilt; so it never holds more than twice the live
   keys plus a constant, and every operation takes O(log n) amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

STALE_ENTRIES_ALWAYS_KEPT = 64
"""Stale heap entries that are not worth a rebuild."""

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Place:
    """Where a live key stands."""

    priority: float
    """The true priority."""
    queued: float
    """The priority of its heap entry; at most `priority`."""
    sequence: int
    """The number of its heap entry; entries with another number are stale."""


class Deadlines(Generic[K]):
    """Keys by priority, least first. Priorities are times or any other numbers; ties go by insertion."""

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[tuple[float, int, K]] = []
        self._places: dict[K, _Place] = {}
        self._sequence = 0

    def __repr__(self) -> str:
        """Show how many keys are live and how many entries are kept for them."""
        return f"<Deadlines of {len(self._places)} keys in {len(self._heap)} entries>"

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._places)

    def __contains__(self, key: K) -> bool:
        """Tell whether `key` has a priority."""
        return key in self._places

    @property
    def entries(self) -> int:
        """Return the number of heap entries, stale ones included."""
        return len(self._heap)

    def set(self, key: K, priority: float) -> None:
        """Give `key` this priority, whether or not it had one."""
        place = self._places.get(key)
        if place is not None and place.queued <= priority:
            place.priority = priority
            return
        self._sequence += 1
        self._places[key] = _Place(priority, priority, self._sequence)
        heapq.heappush(self._heap, (priority, self._sequence, key))
        self._compact()

    def discard(self, key: K) -> None:
        """Take the priority from `key`, if it has one."""
        if self._places.pop(key, None) is not None:
            self._compact()

    def peek(self) -> tuple[float, K] | None:
        """Return the least priority and its key."""
        while self._heap:
            queued, sequence, key = self._heap[0]
            place = self._places.get(key)
            if place is None or place.sequence != sequence:
                heapq.heappop(self._heap)
            elif place.priority > queued:
                place.queued = place.priority
                heapq.heapreplace(self._heap, (place.priority, sequence, key))
            else:
                return queued, key
        return None

    def pop(self) -> K | None:
        """Remove and return the key of least priority."""
        top = self.peek()
        if top is None:
            return None
        heapq.heappop(self._heap)
        del self._places[top[1]]
        return top[1]

    def _compact(self) -> None:
        if len(self._heap) <= 2 * len(self._places) + STALE_ENTRIES_ALWAYS_KEPT:
            return
        for place in self._places.values():
            place.queued = place.priority
        self._heap = [(place.priority, place.sequence, key) for key, place in self._places.items()]
        heapq.heapify(self._heap)
