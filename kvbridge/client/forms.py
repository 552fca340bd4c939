"""What the tensors of all layers of a group have in common, worked out once for many small writes."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kvbridge.client.blocks import Block, cut, whole
from kvbridge.client.views import NumpyArray, shape_in_memory, strides_in_memory
from kvbridge.core.layout import Region
from kvbridge.memory.region import CharArray


class Form:
    """The shape of K or of V, and how it is cut into blocks."""

    def __init__(self, region: Region, tokens: int) -> None:
        """Describe the first `tokens` tokens of regions like `region`."""
        element_bytes = region.group.dtype.bytes_per_element
        self.tokens = tokens
        self.dtype = region.group.dtype
        self.shape = shape_in_memory(region, tokens)
        self.word = np.dtype(f"i{element_bytes}")
        """An integer of an element's size: copying needs to know no more of it."""
        self._strides_bytes = tuple(step * element_bytes for step in strides_in_memory(region))
        self._region = region

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks, in canonical order."""
        return cut(self._region, self.tokens)

    @cached_property
    def whole(self) -> tuple[Block, ...]:
        """Return everything as the only block."""
        return (whole(self._region, self.tokens),)

    def array(self, buffer: CharArray, offset_bytes: int) -> NumpyArray:
        """Return the tensor whose region starts at `offset_bytes`, in place, as integers."""
        return np.ndarray(self.shape, self.word, memoryview(buffer), offset_bytes, self._strides_bytes)
