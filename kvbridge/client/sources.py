"""Tensors that a producer hands in: checked first, then copied straight into a slot.

Long runs are copied by numpy's loop for `+x` over integers rather than by its copy, which calls memcpy: the loop
changes no bit either and is faster by a sixth into an arena of small pages. Both let other threads run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from kvbridge.client.blocks import Block
from kvbridge.client.digests import LayerDigest
from kvbridge.client.errors import ArgumentTypeError, DtypeMismatchError, ShapeMismatchError
from kvbridge.client.forms import Form
from kvbridge.client.views import NumpyArray, torch_dtype, torch_in_memory_order
from kvbridge.core.geometry import Dtype
from kvbridge.core.layout import Region
from kvbridge.memory.region import CharArray

if TYPE_CHECKING:
    import torch

COPY_THREADS = 2
"""Threads that copy one tensor: the caller's and a helper. Where torch has more of its own, it copies by itself."""
_DIMENSIONS = 3


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Tell whether `value` is a tensor of torch, without loading torch: there is none unless somebody did."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def check_source(value: object, field: str, region: Region, form: Form) -> None:
    """Refuse what cannot be copied bit by bit into `region`, which has the form `form`.

    Raises:
        ArgumentTypeError: it is neither a plain tensor with values nor an array.
        DtypeMismatchError: its dtype is not the geometry's.
        ShapeMismatchError: its shape is not the geometry's.
    """
    if is_tensor(value):
        _check_tensor(value, field, form.dtype)
    elif isinstance(value, np.ndarray):
        _check_array(value, field, form.dtype)
    else:
        raise ArgumentTypeError(field, f"must be a torch tensor or a numpy array, got {type(value).__name__}")
    shape = tuple(value.shape)
    if shape not in {form.shape, (1, *form.shape)}:
        raise _wrong_shape(shape, field, region, form)


def source_of(
    value: object, buffer: CharArray, region: Region, form: Form, *, digest: LayerDigest | None = None
) -> Source:
    """Return how to copy a checked source, of any strides and from any device, into `region`, and what digests it."""
    if is_tensor(value):
        tensor = value.detach()
        if not _readable(value):
            place = torch_in_memory_order(buffer, region, form.tokens)
            return Source(
                _copy_by_torch, _in_three_dimensions(tensor), place, region.offset_bytes, form.whole, digest=digest
            )
        array: NumpyArray = _integers(tensor).numpy()
    else:
        array = np.asarray(value)
    array = _in_three_dimensions(array).view(form.word)
    target = form.array(buffer, region.offset_bytes)
    return Source(*_by_numpy(array, target), region.offset_bytes, form.blocks, digest=digest)


class Source:
    """A checked source on its way into its region, block by block."""

    __slots__ = ("_copy", "_digest", "_target", "_value", "blocks", "offset_bytes")

    def __init__(
        self,
        copy: _Copy,
        value: Any,
        target: Any,
        offset_bytes: int,
        blocks: tuple[Block, ...],
        *,
        digest: LayerDigest | None = None,
    ) -> None:
        """Copy `value` to `target`, which have one shape; the region starts at `offset_bytes`."""
        self._digest = digest
        self._copy = copy
        self._value = value
        self._target = target
        self.offset_bytes = offset_bytes
        self.blocks = blocks

    @property
    def length_bytes(self) -> int:
        """Return how much is copied."""
        length_bytes: int = self._target.nbytes
        return length_bytes

    @property
    def shared(self) -> bool:
        """Tell whether other threads than the caller's may copy blocks of it."""
        return isinstance(self._target, np.ndarray)

    def copy(self, block: Block) -> None:
        """Copy one block."""
        self._copy(self._value[block.index], self._target[block.index])

    def digest(self, block: Block) -> None:
        """Take a copied block into the layer's digest, if there is one; all of a layer in canonical order."""
        if self._digest is not None:
            self._digest.add(block.places, offset_bytes=self.offset_bytes)


_Copy: TypeAlias = Callable[[Any, Any], object]
"""Copies its first argument to its second, which is of the same kind and shape."""


def _by_numpy(array: NumpyArray, target: NumpyArray) -> tuple[_Copy, NumpyArray, NumpyArray]:
    """Return how numpy copies an array of integers fastest, and what to call the two for it."""
    if array.strides[1:] == target.strides[1:]:
        return _copy_by_loop, array, target
    if array.strides[2] != target.strides[2]:
        return _copy_by_numpy, array, target
    row = f"V{target.strides[1]}"  # Short runs, such as heads between tokens, are copied one by one.
    return _copy_by_numpy, array.view(row)[..., 0], target.view(row)[..., 0]


def _copy_by_loop(source: NumpyArray, target: NumpyArray) -> None:
    np.positive(source, out=target, casting="no")


def _copy_by_numpy(source: NumpyArray, target: NumpyArray) -> None:
    np.copyto(target, source, casting="no")


def _copy_by_torch(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _readable(tensor: torch.Tensor) -> bool:
    """Tell whether numpy shall copy a tensor. Torch copies what it alone can read, and where it has more threads."""
    import torch

    plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.is_cpu
    return plain and torch.get_num_threads() <= COPY_THREADS


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of bfloat16, which numpy lacks, as integers."""
    import torch

    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def _in_three_dimensions(value: Any) -> Any:
    return value[0] if value.ndim > _DIMENSIONS else value


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


def _wrong_shape(shape: tuple[Any, ...], field: str, region: Region, form: Form) -> ShapeMismatchError:
    return ShapeMismatchError(
        field,
        f"layer {region.layer} needs {list(form.shape)} ({region.group.order}: {region.group.kv_heads} heads, "
        f"{form.tokens} stored tokens, head dimension {region.head_dim}), got {list(shape)}",
    )
