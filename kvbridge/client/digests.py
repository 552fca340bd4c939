"""XXH3-128 over canonical bytes: what a client declares about what it wrote, and checks of what it received."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from kvbridge.core.layout import Region


class LayerDigest:
    """The digest of one layer, taken region by region, so that each is read while it is still in the cache."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        """Start with nothing."""
        self._state = xxhash.xxh3_128()

    def add(self, slot: memoryview, region: Region, valid_length: int) -> None:
        """Take in `region` as it lies in `slot` now; K comes first, then V."""
        for run in region.runs(valid_length):
            self._state.update(slot[run.offset_bytes : run.offset_bytes + run.length_bytes])

    @property
    def value(self) -> bytes:
        """Return the digest of what was taken in."""
        return self._state.digest()


def digest_layer(slot: memoryview, regions: Iterable[Region], valid_length: int) -> bytes:
    """Return the digest of one layer's `regions` (K, then V) as they lie in `slot` now."""
    digest = LayerDigest()
    for region in regions:
        digest.add(slot, region, valid_length)
    return digest.value
