"""A payload's canonical bytes as a stream: into a slot, and out of one."""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.layout import SlotLayout
from kvbridge.wire.chunks import cut


class SlotWriter:
    """Puts a stream of canonical bytes, cut anywhere, at their places in a slot."""

    def __init__(self, slot: memoryview, layout: SlotLayout, valid_length: int) -> None:
        """Start at the first canonical byte."""
        self._slot = slot
        self._places = layout.canonical(valid_length)
        self._here = memoryview(b"")
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
                place = next(self._places)
                self._here = self._slot[place.offset_bytes : place.offset_bytes + place.length_bytes]
            count = min(chunk.nbytes, self._here.nbytes)
            self._here[:count] = chunk[:count]
            self._here, chunk = self._here[count:], chunk[count:]


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
