"""The tensors of one acquired payload, read in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbridge.client.errors import HandoffInvalidError, UnknownLayerError
from kvbridge.client.holdings import Holding
from kvbridge.client.layouts import LazyLayout, lazy_layout
from kvbridge.client.paged import KvBlocks, Paging, check_table, separate
from kvbridge.client.views import NumpyArray, numpy_in_memory_order, torch_by_head
from kvbridge.client.windows import WindowLayer, open_window
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype
from kvbridge.core.layout import Region

if TYPE_CHECKING:
    import torch


class KvView:
    """All layers of a payload. Making one costs the same whatever the payload's size: tensors are made when asked for.

    The memory is mapped read-only, which torch does not know: **writing to a tensor ends the process with SIGSEGV**.
    That is better than the alternative, which would be to corrupt, without a word, what other processes are reading.
    `private_window` gives tensors that can be written to.
    """

    def __init__(self, holding: Holding, geometry: CacheGeometry, *, valid_length: int) -> None:
        """Look at the payload in `holding`."""
        self.geometry = geometry
        self.valid_length = valid_length
        self._holding = holding

    def __repr__(self) -> str:
        layers = len(self.geometry.layers)
        return (
            f"<KvView {layers} layers of {self.valid_length} tokens, {'valid' if self.valid() else 'no longer valid'}>"
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the indices of the layers, in increasing order."""
        return self.geometry.layers

    def valid(self) -> bool:
        """Tell whether what was read up to now is what the producer wrote."""
        return self._holding.valid()

    def release(self) -> None:
        """Return the lease; no tensor may be used any more."""
        self._holding.release()

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as `[heads, stored tokens, dim]`, in place; for an NHD payload as transposed views.

        Raises:
            UnknownLayerError: the payload has no such layer.
        """
        key, value = (
            torch_by_head(self._holding.buffer, region, self._tokens(region)) for region in self._regions(layer)
        )
        return key, value

    def numpy_layer(self, layer: int) -> tuple[NumpyArray, NumpyArray]:
        """Return K and V as read-only arrays, in place, of the form that `layer` has.

        Raises:
            UnknownLayerError: the payload has no such layer.
            TypeError: the values are bfloat16, which numpy does not have.
        """
        regions = self._regions(layer)
        if regions[0].group.dtype is Dtype.BFLOAT16:
            raise TypeError("numpy has no bfloat16; use layer() instead")
        key, value = (self._array(region) for region in regions)
        return key, value

    def copy_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V that are known to be right, because the lease was checked after the copy.

        Raises:
            UnknownLayerError: the payload has no such layer.
            HandoffInvalidError: the lease was lost before the copy was complete.
        """
        import torch  # only who touches a tensor pays for it

        key, value = (tensor.clone(memory_format=torch.contiguous_format) for tensor in self.layer(layer))
        self.require_valid()
        return key, value

    def scatter_paged(self, layer: int, kv_blocks: KvBlocks, paging: Paging, *, kv_axis: int | None) -> bool:
        """Copy K and V into blocks and tell whether what was copied is known to be right.

        Raises:
            UnknownLayerError: the payload has no such layer.
            ArgumentTypeError: an argument is of the wrong type.
            ArgumentValueError: the arguments do not fit each other or the layer.
        """
        tensors = self.layer(layer)
        check_table(paging.block_table)
        for blocks, tensor in zip(separate(kv_blocks, kv_axis), tensors, strict=True):
            paging.scatter(tensor, blocks)
        return self.valid()

    def private_window(self, headroom_tokens: int) -> Mapping[int, WindowLayer]:
        """Return every layer as writable tensors with room for `headroom_tokens` more tokens.

        Raises:
            HandoffInvalidError: the lease was lost before it was complete.
        """
        window = open_window(
            self._holding, self._layout, valid_length=self.valid_length, headroom_tokens=headroom_tokens
        )
        self.require_valid()
        return window

    def require_valid(self) -> None:
        """Refuse what was read after the lease was lost.

        Raises:
            HandoffInvalidError: the view is not valid.
        """
        if not self.valid():
            raise HandoffInvalidError("the lease was lost; what was read must be discarded and the text taken instead")

    @property
    def _layout(self) -> LazyLayout:
        return lazy_layout(self.geometry, self._holding.capacity_tokens)

    def _regions(self, layer: int) -> tuple[Region, Region]:
        layout = self._layout
        if layer not in layout:
            raise UnknownLayerError("layer", f"the payload has no layer {layer!r}; it has {len(self.layers)}")
        return layout.regions(layer)

    def _tokens(self, region: Region) -> int:
        return region.group.stored_tokens(self.valid_length)

    def _array(self, region: Region) -> NumpyArray:
        array = numpy_in_memory_order(self._holding.buffer, region, self._tokens(region))
        array.flags.writeable = False
        return array if region.group.order is DimensionOrder.HND else array.transpose(1, 0, 2)
