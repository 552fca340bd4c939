"""Tensors that a producer hands in: checked first, then copied straight into a slot."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from kvbridge.client.errors import ArgumentTypeError, DtypeMismatchError, ShapeMismatchError
from kvbridge.client.views import (
    NumpyArray,
    numpy_in_memory_order,
    shape_in_memory,
    torch_dtype,
    torch_in_memory_order,
)
from kvbridge.core.geometry import Dtype
from kvbridge.core.layout import Region
from kvbridge.memory.region import CharArray

if TYPE_CHECKING:
    import torch

_DIMENSIONS = 3


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Tell whether `value` is a tensor of torch, without loading torch: there is none unless somebody did."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def check_source(value: object, field: str, region: Region, tokens: int) -> None:
    """Refuse what cannot be copied bit by bit into the first `tokens` tokens of `region`.

    Raises:
        ArgumentTypeError: it is neither a plain tensor with values nor an array.
        DtypeMismatchError: its dtype is not the geometry's.
        ShapeMismatchError: its shape is not the geometry's.
    """
    if is_tensor(value):
        _check_tensor(value, field, region.group.dtype)
    elif isinstance(value, np.ndarray):
        _check_array(value, field, region.group.dtype)
    else:
        raise ArgumentTypeError(field, f"must be a torch tensor or a numpy array, got {type(value).__name__}")
    _check_shape(tuple(value.shape), field, region, tokens)


def copy_source(value: object, buffer: CharArray, region: Region, tokens: int) -> None:
    """Copy a checked source, of any strides and from any device, into the first `tokens` tokens of `region`."""
    if is_tensor(value):
        import torch

        with torch.no_grad():
            target = torch_in_memory_order(buffer, region, tokens)
            target.copy_(value[0] if value.ndim > _DIMENSIONS else value)
        return
    array = cast("NumpyArray", value)
    target_array = numpy_in_memory_order(buffer, region, tokens)
    if region.group.dtype is Dtype.BFLOAT16:
        array = array.view(np.uint16)
    np.copyto(target_array, array[0] if array.ndim > _DIMENSIONS else array, casting="no")


def _check_tensor(tensor: torch.Tensor, field: str, dtype: Dtype) -> None:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ArgumentTypeError(field, f"must be a plain tensor with values, not {tensor.layout} on {tensor.device}")
    if tensor.dtype != torch_dtype(dtype):
        raise DtypeMismatchError(field, f"must be {dtype.value}, got {tensor.dtype}; nothing is cast silently")


def _check_array(array: NumpyArray, field: str, dtype: Dtype) -> None:
    # bfloat16 is not numpy's own; packages that add it give it this name.
    if array.dtype.name != dtype.value or not array.dtype.isnative:
        raise DtypeMismatchError(field, f"must be {dtype.value}, got {array.dtype}; nothing is cast silently")


def _check_shape(shape: tuple[Any, ...], field: str, region: Region, tokens: int) -> None:
    wanted = shape_in_memory(region, tokens)
    if shape not in {wanted, (1, *wanted)}:
        order = region.group.order
        raise ShapeMismatchError(
            field,
            f"layer {region.layer} needs {list(wanted)} ({order}: {region.group.kv_heads} heads, {tokens} stored "
            f"tokens, head dimension {region.head_dim}), got {list(shape)}",
        )
