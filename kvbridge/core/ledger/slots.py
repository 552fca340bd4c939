"""Which payload lies where, how many bytes are in which state, and whom to evict for a new one.

Eviction, for a slot that does not fit:

1. If the free and the evictable bytes together are fewer than the slot needs, nothing is evicted.
2. Otherwise the evictable payloads are imagined gone one by one, the least recently used first, each merging with the
   free bytes and the imagined gaps beside it, until one gap holds the slot. If none ever does, nothing is evicted.
3. Only payloads inside that gap are evicted, and of those at its two ends none that the slot does not need. So no
   payload goes that was used later than the last one that plain least-recently-used eviction would have taken, and
   none goes in vain.

Step 2 takes O(log n) for each payload that it imagines gone; with payloads of like sizes that is one.
"""

from __future__ import annotations

from collections import deque

from sortedcontainers import SortedDict

from kvbridge.core.allocator import Allocator, Extent
from kvbridge.core.errors import MemoryExhaustedError
from kvbridge.core.layout import PAGE_BYTES, round_up
from kvbridge.core.ledger.deadlines import Deadlines
from kvbridge.core.ledger.entries import PayloadEntry
from kvbridge.core.ledger.states import PayloadEvent, PayloadState, next_state


class SlotTable:
    """The arena's slots in the order of their addresses, and the evictable ones in the order of their use."""

    def __init__(self, arena_bytes: int) -> None:
        """Start with an empty arena."""
        self.allocator = Allocator(arena_bytes)
        self.evictable_bytes = 0
        self._by_offset: SortedDict[int, PayloadEntry] = SortedDict()
        self._by_use: Deadlines[PayloadEntry] = Deadlines()
        self._bytes = dict.fromkeys(PayloadState, 0)
        self._slot_generation = 0

    def __repr__(self) -> str:
        """Show how many slots are lent and how many of them could be evicted."""
        return f"<SlotTable of {len(self._by_offset)} slots, {len(self._by_use)} evictable>"

    def bytes_in(self, *states: PayloadState) -> int:
        """Return the bytes of all slots in these states."""
        return sum(self._bytes[state] for state in states)

    @property
    def evictable_payloads(self) -> int:
        """Return how many payloads could be evicted."""
        return len(self._by_use)

    def least_recently_used(self) -> PayloadEntry:
        """Return the first that should be evicted; there must be one."""
        top = self._by_use.peek()
        assert top is not None, self
        return top[1]

    def victims_for(self, slot_bytes: int) -> list[PayloadEntry]:
        """Return whom to evict so that `slot_bytes` fit; nobody if they fit already.

        Raises:
            MemoryExhaustedError: they cannot be made to fit.
        """
        if self.allocator.fits(slot_bytes):
            return []
        length = round_up(slot_bytes, PAGE_BYTES)
        at_most = self.allocator.free_bytes + self.evictable_bytes
        if at_most < length:
            raise MemoryExhaustedError(slot_bytes, at_most, self.allocator.size_bytes)
        imagined: list[PayloadEntry] = []
        try:
            return self._imagine(length, imagined)
        finally:
            for entry in imagined:
                self._by_use.set(entry, entry.used)

    def lend(self, slot_bytes: int) -> tuple[Extent, int]:
        """Return a slot, which must fit, and its generation."""
        slot = self.allocator.allocate(slot_bytes)
        self._slot_generation += 1
        return slot, self._slot_generation

    def add(self, entry: PayloadEntry) -> None:
        """Enter the payload that a lent slot is for."""
        self._by_offset[entry.slot.offset_bytes] = entry
        self._bytes[entry.state] += entry.slot.length_bytes

    def move(self, entry: PayloadEntry, event: PayloadEvent) -> None:
        """Change the payload's state, and free its slot if that is the end."""
        self._bytes[entry.state] -= entry.slot.length_bytes
        entry.state = next_state(entry.state, event)
        if entry.state is PayloadState.FREED:
            del self._by_offset[entry.slot.offset_bytes]
            self.allocator.free(entry.slot)
        else:
            self._bytes[entry.state] += entry.slot.length_bytes
        self.rank(entry)

    def rank(self, entry: PayloadEntry) -> None:
        """Put the payload where it belongs among the evictable ones, or take it out."""
        if entry.evictable:
            self.evictable_bytes += 0 if entry in self._by_use else entry.slot.length_bytes
            self._by_use.set(entry, entry.used)
        elif entry in self._by_use:
            self.evictable_bytes -= entry.slot.length_bytes
            self._by_use.discard(entry)

    def _imagine(self, length: int, imagined: list[PayloadEntry]) -> list[PayloadEntry]:
        """Move evictable payloads to `imagined` until a gap holds `length` bytes, and return whom it needs."""
        gaps = _ImaginedGaps(self._by_offset, self.allocator.size_bytes)
        largest = self.allocator.largest_free_bytes
        while (entry := self._by_use.pop()) is not None:
            imagined.append(entry)
            start, end = gaps.open(entry)
            if self.allocator.gap_holds(start, end, length):
                inside = self._by_offset.irange(start, end, inclusive=(True, False))
                return self._needed([self._by_offset[offset] for offset in inside], start, end, length)
            largest = max(largest, end - start)
        raise MemoryExhaustedError(length, largest, self.allocator.size_bytes)

    def _needed(self, inside: list[PayloadEntry], start: int, end: int, length: int) -> list[PayloadEntry]:
        """Spare payloads at the ends of a gap while the rest of it holds the slot, the most recently used first."""
        needed = deque(inside)
        holds = self.allocator.gap_holds
        while True:
            ends = (needed[0], needed[-1])
            spared = [entry for entry in ends if holds(*_beside(entry, needed, start, end), length)]
            if not spared:
                return list(needed)
            entry = max(spared, key=lambda entry: entry.used)
            start, end = _beside(entry, needed, start, end)
            needed.remove(entry)


class _ImaginedGaps:
    """The gaps that would be in the arena if some payloads were gone; no two of them touch."""

    def __init__(self, by_offset: SortedDict[int, PayloadEntry], arena_bytes: int) -> None:
        """Start with every payload in its place."""
        self._by_offset = by_offset
        self._arena_bytes = arena_bytes
        self._last_of: dict[int, int] = {}  # offset of a gap's first payload -> offset of its last
        self._first_of: dict[int, int] = {}  # the other way round

    def open(self, entry: PayloadEntry) -> tuple[int, int]:
        """Imagine the payload gone, and return start and end of the gap that it leaves."""
        first = last = entry.slot.offset_bytes
        before, after = self._before(first), self._after(last)
        if before is not None and before.slot.offset_bytes in self._first_of:
            first = self._first_of.pop(before.slot.offset_bytes)
            before = self._before(first)
        if after is not None and after.slot.offset_bytes in self._last_of:
            last = self._last_of.pop(after.slot.offset_bytes)
            after = self._after(last)
        self._last_of[first], self._first_of[last] = last, first
        start = 0 if before is None else before.slot.end_bytes
        return start, self._arena_bytes if after is None else after.slot.offset_bytes

    def _before(self, offset: int) -> PayloadEntry | None:
        index = self._by_offset.bisect_left(offset)
        return self._by_offset.peekitem(index - 1)[1] if index else None

    def _after(self, offset: int) -> PayloadEntry | None:
        index = self._by_offset.bisect_right(offset)
        return self._by_offset.peekitem(index)[1] if index < len(self._by_offset) else None


def _beside(entry: PayloadEntry, needed: deque[PayloadEntry], start: int, end: int) -> tuple[int, int]:
    """Return what is left of the gap if `entry`, at one of its ends, stays."""
    return (entry.slot.end_bytes, end) if entry is needed[0] else (start, entry.slot.offset_bytes)
