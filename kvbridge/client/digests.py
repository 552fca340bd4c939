"""XXH3-128 over canonical bytes: what a client declares about what it wrote, and checks of what it received."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from kvbridge.core.layout import Region


def digest_layer(slot: memoryview, regions: Iterable[Region], valid_length: int) -> bytes:
    """Return the digest of one layer's `regions` (K, then V) as they lie in `slot` now."""
    digest = xxhash.xxh3_128()
    for region in regions:
        for strip in region.stored(valid_length):
            digest.update(slot[strip.offset_bytes : strip.offset_bytes + strip.length_bytes])
    return digest.digest()
