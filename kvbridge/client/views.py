"""One tensor of a slot, seen in place by torch or by numpy. Nothing here copies.

A buffer keeps its memory and its owner (a lease, a reservation) alive, and torch and numpy keep the buffer alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvbridge.core.geometry import DimensionOrder, Dtype
from kvbridge.core.layout import Region
from kvbridge.memory.region import CharArray

if TYPE_CHECKING:
    import torch

NumpyArray: TypeAlias = "np.ndarray[Any, Any]"


def shape_in_memory(region: Region, tokens: int) -> tuple[int, int, int]:
    """Return the shape in the region's own order: `[heads, tokens, dim]` for HND, `[tokens, heads, dim]` for NHD."""
    if region.group.order is DimensionOrder.HND:
        return region.group.kv_heads, tokens, region.head_dim
    return tokens, region.group.kv_heads, region.head_dim


def strides_in_memory(region: Region) -> tuple[int, int, int]:
    """Return the steps in elements between neighbours in each dimension, in memory order."""
    group, dim = region.group, region.head_dim
    if group.order is DimensionOrder.HND:
        return region.strip_stride_bytes // group.dtype.bytes_per_element, dim, 1
    return group.kv_heads * dim, dim, 1


def torch_in_memory_order(buffer: CharArray, region: Region, tokens: int) -> torch.Tensor:
    """Return the first `tokens` tokens of a region, with the shape that its own order has."""
    import torch  # only who touches a tensor pays for it

    dtype = torch_dtype(region.group.dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=_elements(region), offset=region.offset_bytes)
    return flat.as_strided(shape_in_memory(region, tokens), strides_in_memory(region))


def torch_by_head(buffer: CharArray, region: Region, tokens: int) -> torch.Tensor:
    """Return the first `tokens` tokens of a region as `[heads, tokens, dim]`, whatever its order."""
    view = torch_in_memory_order(buffer, region, tokens)
    return view if region.group.order is DimensionOrder.HND else view.transpose(0, 1)


def numpy_in_memory_order(buffer: CharArray, region: Region, tokens: int) -> NumpyArray:
    """Return what `torch_in_memory_order` does, as an array; bfloat16, which numpy lacks, as 16-bit integers."""
    dtype = np.dtype(np.uint16) if region.group.dtype is Dtype.BFLOAT16 else np.dtype(region.group.dtype.value)
    strides = [step * dtype.itemsize for step in strides_in_memory(region)]
    return np.ndarray(shape_in_memory(region, tokens), dtype, memoryview(buffer), region.offset_bytes, strides)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return torch's name for `dtype`."""
    import torch

    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _elements(region: Region) -> int:
    return region.length_bytes // region.group.dtype.bytes_per_element
