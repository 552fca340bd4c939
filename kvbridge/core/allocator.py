"""Which bytes of an arena are lent and which are free.

Best fit with immediate coalescing. Lengths are rounded up to the small alignment. A *large* request starts on the large
alignment, so that huge pages and device copies see aligned addresses; a small one starts on any small boundary. What
counts as large is many times the large alignment, because the bytes before the boundary are lost to requests of that
size: a slot just over one alignment would waste nearly half, one of sixteen wastes at most a seventeenth.

1. Free extents are kept in two sorted lists: by length, and by *usable length*, which is what remains from the first
   large boundary inside the extent to its end.
2. A small request takes the shortest extent that is long enough. A large one takes the extent of least sufficient
   usable length. Because the second list sorts by exactly what a large request needs, no candidate has to be probed and
   thrown away: both searches are one bisection, and a refusal means that no aligned gap exists.
3. A small request is cut from the piece before the extent's first large boundary if it fits there, which costs no
   usable length, and otherwise from the end, which costs only its own length.
4. A freed extent is merged with the free neighbours that end at its start or start at its end, found by dictionary.

Every operation takes O(log n) for n free extents.
"""

from __future__ import annotations

from dataclasses import dataclass

from sortedcontainers import SortedList

from kvbridge.core.errors import BridgeError
from kvbridge.core.layout import PAGE_BYTES, round_up

LARGE_ALIGNMENT_BYTES = 2 << 20
"""Boundary that a large slot starts on: the huge page of x86-64 and arm64."""
LARGE_BYTES = 32 << 20
"""Length from which a slot counts as large."""


class ArenaFullError(BridgeError):
    """No free extent can hold the request, though the free bytes together might."""

    def __init__(self, requested_bytes: int, free_bytes: int, largest_free_bytes: int) -> None:
        """Report the request beside all that is free and the longest piece of it, aligned or not."""
        super().__init__(
            f"no room for {requested_bytes} bytes: {free_bytes} bytes are free, "
            f"at most {largest_free_bytes} in one piece"
        )
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.largest_free_bytes = largest_free_bytes


class ForeignExtentError(AssertionError):
    """The extent is not lent: it was freed before or never allocated. A programmer's error, raised under `-O` too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of bytes in an arena."""

    offset_bytes: int
    """Distance from the start of the arena; a multiple of the small alignment."""
    length_bytes: int
    """Length after rounding up to the small alignment; at least 1."""

    @property
    def end_bytes(self) -> int:
        """Return the offset of the first byte behind the extent."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSnapshot:
    """How an arena is filled at one moment."""

    size_bytes: int
    """Size of the arena; always `used_bytes + free_bytes`."""
    used_bytes: int
    """Bytes lent, rounding included."""
    free_bytes: int
    """Bytes not lent."""
    largest_free_bytes: int
    """Length of the longest free extent."""
    used_extents: int
    """Number of lent extents."""
    free_extents: int
    """Number of free extents; no two of them touch."""


class Allocator:
    """Lends extents of `[0, size_bytes)`. Not thread-safe: its owner serialises the calls."""

    def __init__(
        self,
        size_bytes: int,
        small_alignment_bytes: int = PAGE_BYTES,
        large_alignment_bytes: int = LARGE_ALIGNMENT_BYTES,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        """Start with one free extent of `size_bytes`, which must be a multiple of the small alignment."""
        assert size_bytes > 0, size_bytes
        assert size_bytes % small_alignment_bytes == 0, size_bytes
        assert large_alignment_bytes % small_alignment_bytes == 0, large_alignment_bytes
        self.size_bytes = size_bytes
        self._small_alignment_bytes = small_alignment_bytes
        self._large_alignment_bytes = large_alignment_bytes
        self._large_bytes = large_bytes
        self._used: dict[int, int] = {}  # offset -> length
        self._used_bytes = 0
        self._free_by_offset: dict[int, int] = {}  # offset -> length
        self._free_by_end: dict[int, int] = {}  # end -> offset
        self._by_length: SortedList[tuple[int, int]] = SortedList()  # (length, offset)
        self._by_usable: SortedList[tuple[int, int]] = SortedList()  # (usable length > 0, offset)
        self._add_free(0, size_bytes)

    def __repr__(self) -> str:
        """Show how full the arena is and in how many pieces."""
        return (
            f"<Allocator {self._used_bytes} of {self.size_bytes} bytes used in {len(self._used)} extents, "
            f"free in {len(self._free_by_offset)}>"
        )

    @property
    def free_bytes(self) -> int:
        """Return the bytes not lent, in however many pieces."""
        return self.size_bytes - self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Return the length of the longest free extent, aligned or not."""
        return self._by_length[-1][0] if self._by_length else 0

    def allocate(self, length_bytes: int) -> Extent:
        """Lend an extent of at least `length_bytes`, or raise `ArenaFullError`."""
        length = self._rounded(length_bytes)
        offset = self._find(length)
        if offset is None:
            raise ArenaFullError(length_bytes, self.free_bytes, self.largest_free_bytes)
        start = self._place(offset, self._free_by_offset[offset], length)
        self._carve(offset, start, length)
        self._used[start] = length
        self._used_bytes += length
        return Extent(offset_bytes=start, length_bytes=length)

    def free(self, extent: Extent) -> None:
        """Take back an extent that `allocate` returned, exactly once."""
        if self._used.get(extent.offset_bytes) != extent.length_bytes:
            raise ForeignExtentError(extent)
        del self._used[extent.offset_bytes]
        self._used_bytes -= extent.length_bytes
        start, end = extent.offset_bytes, extent.end_bytes
        if start in self._free_by_end:
            start = self._remove_free(self._free_by_end[start])[0]
        if end in self._free_by_offset:
            end = self._remove_free(end)[1]
        self._add_free(start, end - start)

    def fits(self, length_bytes: int) -> bool:
        """Tell whether `allocate(length_bytes)` would succeed now."""
        return self._find(self._rounded(length_bytes)) is not None

    def gap_holds(self, start: int, end: int, length: int) -> bool:
        """Tell whether a slot of a rounded `length` could be placed in a gap, were it free."""
        return self._first(start, length) + length <= end

    def snapshot(self) -> AllocatorSnapshot:
        """Return the figures of this moment."""
        return AllocatorSnapshot(
            size_bytes=self.size_bytes,
            used_bytes=self._used_bytes,
            free_bytes=self.free_bytes,
            largest_free_bytes=self.largest_free_bytes,
            used_extents=len(self._used),
            free_extents=len(self._free_by_offset),
        )

    def _rounded(self, length_bytes: int) -> int:
        assert length_bytes > 0, length_bytes
        return round_up(length_bytes, self._small_alignment_bytes)

    def _find(self, length: int) -> int | None:
        """Return the offset of the free extent to cut `length` from."""
        candidates = self._by_usable if length >= self._large_bytes else self._by_length
        index = candidates.bisect_left((length, 0))
        return candidates[index][1] if index < len(candidates) else None

    def _place(self, offset: int, free_length: int, length: int) -> int:
        """Return where in the free extent at `offset` the `length` bytes start."""
        if length >= self._large_bytes:
            return self._first(offset, length)
        boundary = round_up(offset, self._large_alignment_bytes)
        return offset if offset + length <= boundary else offset + free_length - length

    def _first(self, offset: int, length: int) -> int:
        """Return the first place from `offset` on where `length` bytes may start."""
        return round_up(offset, self._large_alignment_bytes) if length >= self._large_bytes else offset

    def _carve(self, offset: int, start: int, length: int) -> None:
        """Replace the free extent at `offset` by what is left of it before and behind the cut."""
        _, end = self._remove_free(offset)
        if start > offset:
            self._add_free(offset, start - offset)
        if start + length < end:
            self._add_free(start + length, end - start - length)

    def _usable(self, offset: int, length: int) -> int:
        return offset + length - round_up(offset, self._large_alignment_bytes)

    def _add_free(self, offset: int, length: int) -> None:
        self._free_by_offset[offset] = length
        self._free_by_end[offset + length] = offset
        self._by_length.add((length, offset))
        usable = self._usable(offset, length)
        if usable > 0:
            self._by_usable.add((usable, offset))

    def _remove_free(self, offset: int) -> tuple[int, int]:
        """Forget the free extent at `offset` and return its start and end."""
        length = self._free_by_offset.pop(offset)
        del self._free_by_end[offset + length]
        self._by_length.remove((length, offset))
        usable = self._usable(offset, length)
        if usable > 0:
            self._by_usable.remove((usable, offset))
        return offset, offset + length
