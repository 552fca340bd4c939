"""Where each value of a payload lies in its slot, and the one order in which its bytes are digested and sent.

A slot is a header page followed by one region per tensor: layer by layer in increasing order, K before V. A region
consists of *strips*, each a run of consecutive tokens:

1. `HND` gives every head a strip of `[capacity, head_dim]`; `NHD` has one strip of `[capacity, heads, head_dim]`.
2. Every strip starts on a page. So a consumer can map the pages of each strip copy-on-write and put head-room for new
   tokens behind it, without copying the prefix.
3. Inside a strip the stored tokens come first and the padding last. Padding is therefore always on the right.

The *canonical bytes* of a payload are the stored tokens of all strips in that order, without padding. Digests are taken
over them and streams carry them, so neither depends on a slot's capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, unique
from functools import lru_cache

from kvbridge.core.geometry import CacheGeometry, DimensionOrder, LayerGroup

PAGE_BYTES = 4096
"""The page size that strips and headers are aligned to."""
HEADER_BYTES = PAGE_BYTES
"""Bytes of the header page at the start of each slot."""


@unique
class Role(StrEnum):
    """Which tensor of a layer a region holds."""

    KEY = "KEY"
    VALUE = "VALUE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """A run of bytes inside a slot."""

    offset_bytes: int
    """Distance from the start of the slot's header."""
    length_bytes: int
    """Length of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The place of one tensor (K or V of one layer) in a slot."""

    layer: int
    """Index of the layer in the model."""
    role: Role
    """K or V."""
    group: LayerGroup
    """The group that the layer belongs to."""
    offset_bytes: int
    """Distance of the first strip from the start of the slot's header; a multiple of the page."""
    strip_stride_bytes: int
    """Distance between the starts of two strips; a multiple of the page."""
    capacity_tokens: int
    """Tokens that each strip has room for."""

    @property
    def head_dim(self) -> int:
        """Return the elements of one head's key or value."""
        return self.group.head_dim_k if self.role is Role.KEY else self.group.head_dim_v

    @property
    def strip_count(self) -> int:
        """Return how many strips the region has: one per head for `HND`, else one."""
        return self.group.kv_heads if self.group.order is DimensionOrder.HND else 1

    @property
    def token_bytes(self) -> int:
        """Return the bytes that one token takes in one strip."""
        heads = 1 if self.group.order is DimensionOrder.HND else self.group.kv_heads
        return heads * self.head_dim * self.group.dtype.bytes_per_element

    @property
    def length_bytes(self) -> int:
        """Return the bytes from the first strip's start to the last strip's end, padding included."""
        return self.strip_count * self.strip_stride_bytes

    def stored(self, valid_length: int) -> Iterator[ByteRange]:
        """Yield the stored bytes of each strip, in canonical order."""
        length = self.stored_strip_bytes(valid_length)
        for strip in range(self.strip_count):
            yield ByteRange(offset_bytes=self.offset_bytes + strip * self.strip_stride_bytes, length_bytes=length)

    def runs(self, valid_length: int) -> Iterator[ByteRange]:
        """Yield the same bytes as `stored`, in the same order, as one run where no padding lies between the strips."""
        if self.has_padding(valid_length):
            yield from self.stored(valid_length)
        else:
            yield ByteRange(offset_bytes=self.offset_bytes, length_bytes=self.length_bytes)

    def stored_strip_bytes(self, valid_length: int) -> int:
        """Return how many bytes are stored in each strip."""
        return self.group.stored_tokens(valid_length) * self.token_bytes

    def has_padding(self, valid_length: int) -> bool:
        """Tell whether anything lies between the stored bytes of a strip and the next strip."""
        return self.stored_strip_bytes(valid_length) < self.strip_stride_bytes

    def padding(self, valid_length: int) -> Iterator[ByteRange]:
        """Yield what follows the stored bytes of each strip up to the next strip."""
        for stored in self.stored(valid_length):
            rest = self.strip_stride_bytes - stored.length_bytes
            if rest:
                yield ByteRange(offset_bytes=stored.offset_bytes + stored.length_bytes, length_bytes=rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """All regions of a slot for one geometry and capacity."""

    regions: tuple[Region, ...]
    """Layer by layer, K before V."""
    slot_bytes: int
    """Length of the slot, header included; a multiple of the page."""
    token_bytes: tuple[tuple[LayerGroup, int], ...]
    """Canonical bytes of one stored token in all layers of each group."""

    def region(self, layer: int, role: Role) -> Region:
        """Return the region of K or V of `layer`, which must be in the geometry."""
        return next(region for region in self.regions if region.layer == layer and region.role is role)

    def canonical(self, valid_length: int) -> Iterator[ByteRange]:
        """Yield the canonical bytes of the whole payload in order."""
        for region in self.regions:
            yield from region.runs(valid_length)

    def canonical_bytes(self, valid_length: int) -> int:
        """Return how many bytes `canonical` yields in all."""
        return sum(group.stored_tokens(valid_length) * token_bytes for group, token_bytes in self.token_bytes)


@lru_cache(maxsize=256)
def slot_layout(geometry: CacheGeometry, capacity_tokens: int) -> SlotLayout:
    """Lay out a slot for `geometry` with room for `capacity_tokens` tokens (at least 1)."""
    assert capacity_tokens >= 1, capacity_tokens
    regions: list[Region] = []
    offset = HEADER_BYTES
    for layer in geometry.layers:
        for role in Role:
            region = _region(
                geometry.group_of(layer), layer=layer, role=role, offset=offset, capacity_tokens=capacity_tokens
            )
            regions.append(region)
            offset += region.length_bytes
    token_bytes = tuple((group, _token_bytes(group)) for group in geometry.groups)
    return SlotLayout(regions=tuple(regions), slot_bytes=offset, token_bytes=token_bytes)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple


def _token_bytes(group: LayerGroup) -> int:
    elements = len(group.layers) * group.kv_heads * (group.head_dim_k + group.head_dim_v)
    return elements * group.dtype.bytes_per_element


def _region(group: LayerGroup, *, layer: int, role: Role, offset: int, capacity_tokens: int) -> Region:
    stored_max = group.stored_tokens(capacity_tokens)
    head_dim = group.head_dim_k if role is Role.KEY else group.head_dim_v
    heads_in_strip = 1 if group.order is DimensionOrder.HND else group.kv_heads
    strip_bytes = stored_max * heads_in_strip * head_dim * group.dtype.bytes_per_element
    return Region(
        layer=layer,
        role=role,
        group=group,
        offset_bytes=offset,
        strip_stride_bytes=round_up(strip_bytes, PAGE_BYTES),
        capacity_tokens=stored_max,
    )
