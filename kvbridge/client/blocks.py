"""One tensor of a slot cut into blocks that a processor's cache holds from the copy to the digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvbridge.core.geometry import DimensionOrder
from kvbridge.core.layout import ByteRange, Region

BLOCK_BYTES = 2 << 20
"""Most bytes of a block, unless one token takes more; what is read again at once is still in the cache."""

Index: TypeAlias = "tuple[slice | int, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some of the stored bytes of one region: whole strips, or a piece of one."""

    index: Index
    """What picks it out of the tensor, which has the region's own order."""
    places: tuple[ByteRange, ...]
    """Where its bytes lie from the region's start on, in canonical order."""


def whole(region: Region, tokens: int) -> Block:
    """Return the first `tokens` tokens of `region` as one block."""
    return Block(index=(), places=_places(region, range(region.strip_count), tokens))


def cut(region: Region, tokens: int, block_bytes: int = BLOCK_BYTES) -> tuple[Block, ...]:
    """Return the first `tokens` tokens of `region` as blocks of at most `block_bytes`, in canonical order."""
    strips_max = block_bytes // (tokens * region.token_bytes)
    if strips_max >= region.strip_count:
        return (whole(region, tokens),)
    if strips_max:
        return tuple(_groups_of_strips(region, tokens, strips_max))
    return tuple(_pieces_of_strips(region, tokens, max(block_bytes // region.token_bytes, 1)))


def _groups_of_strips(region: Region, tokens: int, strips_max: int) -> Iterator[Block]:
    for first in range(0, region.strip_count, strips_max):
        strips = range(first, min(first + strips_max, region.strip_count))
        yield Block(index=(slice(strips.start, strips.stop),), places=_places(region, strips, tokens))


def _pieces_of_strips(region: Region, tokens: int, tokens_max: int) -> Iterator[Block]:
    by_head = region.group.order is DimensionOrder.HND
    for strip in range(region.strip_count):
        for first in range(0, tokens, tokens_max):
            piece = slice(first, min(first + tokens_max, tokens))
            place = ByteRange(
                offset_bytes=strip * region.strip_stride_bytes + first * region.token_bytes,
                length_bytes=(piece.stop - first) * region.token_bytes,
            )
            yield Block(index=(strip, piece) if by_head else (piece,), places=(place,))


def _places(region: Region, strips: range, tokens: int) -> tuple[ByteRange, ...]:
    """Return where the tokens of some strips lie, as one run if no padding lies between them."""
    stride_bytes, strip_bytes = region.strip_stride_bytes, tokens * region.token_bytes
    if strip_bytes == stride_bytes:
        return (ByteRange(offset_bytes=strips.start * stride_bytes, length_bytes=len(strips) * stride_bytes),)
    return tuple(ByteRange(offset_bytes=strip * stride_bytes, length_bytes=strip_bytes) for strip in strips)
