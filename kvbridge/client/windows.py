"""Private views of a payload with room behind each strip, so that a consumer appends new tokens in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.client.holdings import ArenaPlace, Holding
from kvbridge.client.layouts import LazyLayout
from kvbridge.client.views import shape_in_memory, torch_by_head, torch_dtype
from kvbridge.core.geometry import DimensionOrder
from kvbridge.core.layout import Region
from kvbridge.memory.errors import MappingUnavailableError
from kvbridge.memory.mapping import PrivateWindow, StripGroup, WindowGroup
from kvbridge.memory.region import CharArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLayer:
    """One layer, writable; what is written stays in this process."""

    key: torch.Tensor
    """K, `[heads, stored_tokens + headroom, dim]`; behind the stored tokens it is zero."""
    value: torch.Tensor
    """V, of the same form."""
    stored_tokens: int
    """Tokens that come from the payload."""


def open_window(
    holding: Holding, layout: LazyLayout, *, valid_length: int, headroom_tokens: int
) -> Mapping[int, WindowLayer]:
    """Return every layer with room for `headroom_tokens` more tokens.

    In an arena nothing is copied but the pages that are written to, and the lease lives as long as the tensors. Where
    the kernel refuses that, and in private memory, the stored tokens are copied; the caller checks afterwards that
    they were still valid.
    """
    regions = [region for layer in layout.geometry.layers for region in layout.regions(layer)]
    tensors = _mapped(holding, regions, valid_length, headroom_tokens)
    if tensors is None:
        tensors = [_copied(holding.buffer, region, valid_length, headroom_tokens) for region in regions]
    return {
        key_region.layer: WindowLayer(key=key, value=value, stored_tokens=key_region.group.stored_tokens(valid_length))
        for key_region, key, value in zip(regions[::2], tensors[::2], tensors[1::2], strict=True)
    }


def _mapped(
    holding: Holding, regions: list[Region], valid_length: int, headroom_tokens: int
) -> list[torch.Tensor] | None:
    if holding.place is None:
        return None
    strips = [_strips(region, holding.place, valid_length, headroom_tokens) for region in regions]
    try:
        window = PrivateWindow.open(holding.place.fd, strips, owner=holding)
    except MappingUnavailableError:
        return None
    return [
        _in_window(window.buffer, group, region, region.group.stored_tokens(valid_length) + headroom_tokens)
        for group, region in zip(window.groups, regions, strict=True)
    ]


def _strips(region: Region, place: ArenaPlace, valid_length: int, headroom_tokens: int) -> StripGroup:
    stored = list(region.stored(valid_length))
    return StripGroup(
        file_offsets_bytes=tuple(place.offset_bytes + strip.offset_bytes for strip in stored),
        length_bytes=stored[0].length_bytes,
        headroom_bytes=headroom_tokens * region.token_bytes,
    )


def _in_window(buffer: CharArray, group: WindowGroup, region: Region, tokens: int) -> torch.Tensor:
    """Return a region's strips, head-room included, as `[heads, tokens, dim]`."""
    import torch  # only who touches a tensor pays for it

    dtype, width = region.group.dtype, region.group.dtype.bytes_per_element
    heads, dim = region.group.kv_heads, region.head_dim
    count = (group.end_bytes - group.offset_bytes) // width
    flat = torch.frombuffer(buffer, dtype=torch_dtype(dtype), count=count, offset=group.offset_bytes)
    if region.group.order is DimensionOrder.HND:
        return flat.as_strided((heads, tokens, dim), (group.strip_stride_bytes // width, dim, 1))
    return flat.as_strided((heads, tokens, dim), (dim, heads * dim, 1))


def _copied(buffer: CharArray, region: Region, valid_length: int, headroom_tokens: int) -> torch.Tensor:
    import torch

    stored = region.group.stored_tokens(valid_length)
    memory = torch.zeros(shape_in_memory(region, stored + headroom_tokens), dtype=torch_dtype(region.group.dtype))
    by_head = memory if region.group.order is DimensionOrder.HND else memory.transpose(0, 1)
    by_head[:, :stored].copy_(torch_by_head(buffer, region, stored))
    return by_head
