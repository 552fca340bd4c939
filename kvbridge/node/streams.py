"""A payload's canonical bytes as a stream: into a slot, and out of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby

import xxhash

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.layout import SlotLayout
from kvbridge.wire.chunks import cut

_ROOM_BYTES = 4 << 20
_ROOM_VIEWS = 512
"""How much memory is offered at once."""


class SlotWriter:
    """Puts a stream of canonical bytes, cut anywhere, at their places in a slot."""

    def __init__(self, slot: memoryview, layout: SlotLayout, valid_length: int) -> None:
        """Start at the first canonical byte."""
        self._slot = slot
        self._places = layout.canonical(valid_length)
        self._here = memoryview(b"")
        self._ahead: deque[memoryview] = deque()
        self.remaining_bytes = layout.canonical_bytes(valid_length)

    def write(self, chunk: memoryview) -> None:
        """Append a chunk.

        Raises:
            InvalidFieldError: the stream is longer than the header declared; nothing of the chunk is written.
        """
        if chunk.nbytes > self.remaining_bytes:
            raise InvalidFieldError(
                "chunk", f"goes {chunk.nbytes - self.remaining_bytes} bytes beyond the declared payload"
            )
        self.remaining_bytes -= chunk.nbytes
        while chunk.nbytes:
            if not self._here.nbytes:
                self._here = self._ahead.popleft() if self._ahead else self._next()
            count = min(chunk.nbytes, self._here.nbytes)
            self._here[:count] = chunk[:count]
            self._here, chunk = self._here[count:], chunk[count:]

    def room(self) -> list[memoryview]:
        """Return the places of the next bytes, in order; none at the end."""
        if self._here.nbytes:
            self._ahead.appendleft(self._here)
            self._here = memoryview(b"")
        missing = sum(view.nbytes for view in self._ahead)
        while missing < min(self.remaining_bytes, _ROOM_BYTES) and len(self._ahead) < _ROOM_VIEWS:
            self._ahead.append(self._next())
            missing += self._ahead[-1].nbytes
        return list(self._ahead)

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes were written to where `room` said."""
        self.remaining_bytes -= nbytes
        while nbytes:
            first = self._ahead.popleft()
            if first.nbytes > nbytes:
                self._ahead.appendleft(first[nbytes:])
            nbytes -= min(first.nbytes, nbytes)

    def _next(self) -> memoryview:
        place = next(self._places)
        return self._slot[place.offset_bytes : place.offset_bytes + place.length_bytes]


class StreamDigests:
    """Digests the layers of a stream of canonical bytes as they come, while the processor still has them at hand."""

    def __init__(self, layout: SlotLayout, valid_length: int) -> None:
        """Start at the first canonical byte."""
        self._lengths = _layer_lengths(layout, valid_length)
        self._missing = next(self._lengths)
        self._digest = xxhash.xxh3_128()
        self.done: list[bytes] = []
        """The digests of the layers that have come whole, in order."""

    def update(self, piece: memoryview) -> None:
        """Take the next bytes, which must not go beyond the end."""
        while piece.nbytes:
            count = min(piece.nbytes, self._missing)
            self._digest.update(piece[:count])
            self._missing, piece = self._missing - count, piece[count:]
            if not self._missing:
                self.done.append(self._digest.digest())
                self._digest.reset()
                self._missing = next(self._lengths, 0)


def _layer_lengths(layout: SlotLayout, valid_length: int) -> Iterator[int]:
    for _, regions in groupby(layout.regions, key=lambda region: region.layer):
        yield sum(region.strip_count * region.stored_strip_bytes(valid_length) for region in regions)


def canonical_chunks(
    slot: memoryview, layout: SlotLayout, valid_length: int, *, chunk_bytes: int, skip_bytes: int = 0
) -> Iterator[list[memoryview]]:
    """Return the canonical bytes from `skip_bytes` on as lists of views of at most `chunk_bytes` together."""
    return cut(_canonical_runs(slot, layout, valid_length, skip_bytes=skip_bytes), chunk_bytes)


def _canonical_runs(
    slot: memoryview, layout: SlotLayout, valid_length: int, *, skip_bytes: int
) -> Iterator[memoryview]:
    for place in layout.canonical(valid_length):
        skipped = min(skip_bytes, place.length_bytes)
        skip_bytes -= skipped
        yield slot[place.offset_bytes + skipped : place.offset_bytes + place.length_bytes]
