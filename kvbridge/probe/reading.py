"""Single tokens out of a slot, as float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvbridge.core.geometry import DimensionOrder, Dtype, LayerGroup
from kvbridge.core.layout import Region, Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STORED_AS: dict[Dtype, Any] = {Dtype.FLOAT32: "<f4", Dtype.FLOAT16: "<f2", Dtype.BFLOAT16: "<u2"}


def is_readable(group: LayerGroup) -> bool:
    """Tell whether the element type is one that this module reads."""
    return group.dtype in _STORED_AS


def read_tokens(
    slot: NDArray[np.uint8], region: Region, *, valid_length: int, stored_index: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return `[tokens, heads, head dimension]` of the tokens at these indices among the stored ones."""
    group = region.group
    strips = slot[region.offset_bytes : region.offset_bytes + region.length_bytes]
    strips = strips.reshape(region.strip_count, region.strip_stride_bytes)
    elements = strips[:, : region.stored_strip_bytes(valid_length)].view(_STORED_AS[group.dtype])
    stored = group.stored_tokens(valid_length)
    if group.order is DimensionOrder.HND:
        picked = elements.reshape(group.kv_heads, stored, region.head_dim)[:, stored_index].transpose(1, 0, 2)
    else:
        picked = elements.reshape(stored, group.kv_heads, region.head_dim)[stored_index]
    return _as_float32(picked, group.dtype) * np.float32(_scale(region))


def _as_float32(elements: NDArray[Any], dtype: Dtype) -> NDArray[np.float32]:
    if dtype is Dtype.BFLOAT16:  # The upper half of a float32.
        return (np.ascontiguousarray(elements).astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32)


def _scale(region: Region) -> float:
    """Return what stored values have to be multiplied by."""
    scales = region.group.k_scales if region.role is Role.KEY else region.group.v_scales
    return scales[region.group.layers.index(region.layer)] if scales else 1.0
