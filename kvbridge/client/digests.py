"""XXH3-128 over canonical bytes: what a client declares about what it wrote, and checks of what it received."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from kvbridge.core.layout import ByteRange, Region


class LayerDigest:
    """The digest of one layer, taken piece by piece in canonical order."""

    __slots__ = ("_slot", "_state")

    def __init__(self, slot: memoryview) -> None:
        """Digest what lies in `slot`, but nothing yet."""
        self._slot = slot
        self._state = xxhash.xxh3_128()

    def add(self, places: Iterable[ByteRange], *, offset_bytes: int = 0) -> None:
        """Take in the bytes that lie now at `places`, which count from `offset_bytes`; K comes first, then V."""
        for place in places:
            start = offset_bytes + place.offset_bytes
            self._state.update(self._slot[start : start + place.length_bytes])

    @property
    def value(self) -> bytes:
        """Return the digest of what was taken in."""
        return self._state.digest()


def digest_layer(slot: memoryview, regions: Iterable[Region], valid_length: int) -> bytes:
    """Return the digest of one layer's `regions` (K, then V) as they lie in `slot` now."""
    digest = LayerDigest(slot)
    for region in regions:
        digest.add(region.runs(valid_length))
    return digest.value
