"""What payloads hold: bytes that follow from whose they are, so that any wrong one is recognised."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from functools import cache, lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvbridge.core.context import NO_CONTEXT, context_digest
from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference, PayloadSpec
from kvbridge.core.geometry import CacheGeometry, Dtype, LayerGroup, PositionEncoding, PositionKind
from kvbridge.core.layout import SlotLayout, slot_layout
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence

MODEL = ModelTag(name="tiny", revision="r1", adapter="", weight_dtype="float32", tokenizer_digest="t0")
"""Who computes every cache."""
OTHER_MODEL = ModelTag(name="tiny", revision="r2", adapter="", weight_dtype="float32", tokenizer_digest="t0")
"""A version that can use none of them."""
GEOMETRY = CacheGeometry(
    groups=(
        LayerGroup(
            layers=(0, 1),
            kv_heads=1,
            head_dim_k=4,
            head_dim_v=4,
            dtype=Dtype.FLOAT32,
            position_encoding=PositionEncoding(kind=PositionKind.ABSOLUTE),
        ),
    )
)
"""Two layers of one head: strips of 16 bytes for each token."""
PIECE_TOKENS = 16
"""Tokens of one piece of a conversation."""
PIECES = 2
"""Pieces of one conversation."""
_STEP = 64
_PERIOD = 61


def tokens(key: str, count: int) -> TokenSequence:
    """Return the first tokens of a key."""
    conversation, _, number = key.partition("#")
    first = (zlib.crc32(conversation.encode()) % 1_000_000) * 1000 + int(number or 0) * PIECE_TOKENS
    return _tokens(first, count)


@lru_cache(maxsize=4096)
def _tokens(first: int, count: int) -> TokenSequence:
    return TokenSequence.from_packed(struct.pack(f"<{count}I", *range(first, first + count)))


def text(tenant: str, key: str) -> str:
    """Return the text of a tenant's key."""
    return f"the text of {key} of {tenant}"


def spec(
    key: str,
    *,
    tenant: str,
    capacity_tokens: int,
    count: int,
    derived_from: tuple[PayloadReference, ...] = (),
    linger_seconds: float | None = None,
    ttl_seconds: float | None = None,
) -> PayloadSpec:
    """Return what a producer declares; a key `conversation#n` is piece `n` of a conversation."""
    conversation, _, number = key.partition("#")
    before = int(number or 0) * PIECE_TOKENS
    context = context_digest([tokens(conversation, before).packed_ids or b""]) if before else NO_CONTEXT
    return PayloadSpec(
        key=key,
        model=MODEL,
        geometry=GEOMETRY,
        capacity_tokens=capacity_tokens,
        first_position=before,
        tokens=tokens(key, count),
        fallback=FallbackText(text=text(tenant, key)),
        derived_from=derived_from,
        linger_seconds=linger_seconds,
        ttl_seconds=ttl_seconds,
        context_digest=context,
    )


@cache
def _ramp(count: int) -> NDArray[np.float32]:
    return (np.arange(count) % _PERIOD).astype(np.float32)


def content(stamp: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the canonical bytes of the payload that has this stamp; no other has one of its values."""
    assert stamp < 1 << 18, stamp
    return (_ramp(nbytes // 4) + np.float32(stamp * _STEP)).view(np.uint8)


def digests(canonical: NDArray[np.uint8]) -> tuple[bytes, ...]:
    """Return the digest of each layer."""
    layers = len(GEOMETRY.layers)
    share = canonical.nbytes // layers
    return tuple(xxhash.xxh3_128_digest(canonical[i * share : (i + 1) * share].data) for i in range(layers))


def layout_of(described: PayloadSpec | PayloadDescriptor) -> SlotLayout:
    """Return how its slot is laid out."""
    return slot_layout(described.geometry, described.capacity_tokens)


def runs(slot: memoryview, layout: SlotLayout, length: int) -> Iterator[memoryview]:
    """Yield the canonical bytes of a slot, run by run."""
    for place in layout.canonical(length):
        yield slot[place.offset_bytes : place.offset_bytes + place.length_bytes]


def wrong_at(slot: memoryview, descriptor: PayloadDescriptor, stamp: int) -> int | None:
    """Return where a slot first differs from what the stamp says, in canonical order, or None."""
    layout, length = layout_of(descriptor), descriptor.valid_length
    found = np.concatenate([np.frombuffer(run, dtype=np.uint8) for run in runs(slot, layout, length)])
    different = np.flatnonzero(found != content(stamp, found.nbytes))
    return int(different[0]) if different.size else None


def dirty_padding(slot: memoryview, descriptor: PayloadDescriptor) -> bool:
    """Tell whether anything but zeroes lies behind the stored bytes."""
    for region in layout_of(descriptor).regions:
        for place in region.padding(descriptor.valid_length):
            if np.frombuffer(slot[place.offset_bytes : place.offset_bytes + place.length_bytes], np.uint8).any():
                return True
    return False
