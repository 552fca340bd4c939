"""Writing a payload: every layer straight into its place, digested while it is hot in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvbridge.client.copying import copy_all
from kvbridge.client.digests import LayerDigest, digest_layer
from kvbridge.client.errors import ArgumentTypeError, UnknownLayerError
from kvbridge.client.forms import Form
from kvbridge.client.layouts import lazy_layout
from kvbridge.client.paged import KvBlocks, Paging, check_table, separate
from kvbridge.client.sources import check_source, source_of
from kvbridge.client.views import torch_by_head, torch_in_memory_order
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.layout import Region, Role
from kvbridge.memory.region import CharArray

if TYPE_CHECKING:
    import torch


class SlotWriter:
    """A slot that is being written, in an arena or in private memory. Threads may write different layers at once."""

    def __init__(
        self,
        buffer: CharArray,
        geometry: CacheGeometry,
        *,
        capacity_tokens: int,
        valid_length: int,
        digested: bool,
        for_views: Callable[[], CharArray] | None = None,
    ) -> None:
        """Write into `buffer`, which starts with the slot's header; `digested` to digest what is written.

        `for_views` returns the same bytes at addresses that may be given out; without it `buffer` is.
        """
        self.buffer = buffer
        self._for_views = for_views
        self.valid_length = valid_length
        self.layout = lazy_layout(geometry, capacity_tokens)
        self._layers = geometry.layers
        self._digested = digested
        self._digests: dict[int, bytes] = {}
        self._written: set[tuple[int, Role]] = set()
        self._viewed: set[int] = set()
        self._forms: dict[tuple[int, Role], Form] = {}

    def __repr__(self) -> str:
        return f"<SlotWriter {len(self._written) // 2} of {len(self._layers)} layers>"

    @property
    def memory(self) -> memoryview:
        """Return the slot's bytes, header included."""
        return memoryview(self.buffer).cast("B")

    @property
    def missing_layers(self) -> tuple[int, ...]:
        """Return the layers of which K or V was not written."""
        return tuple(layer for layer in self._layers if not {(layer, role) for role in Role} <= self._written)

    def write(self, layer: int, k: object, v: object) -> None:
        """Check K and V and copy them; what was written before is overwritten.

        Raises:
            UnknownLayerError: the geometry has no such layer.
            ArgumentTypeError: one is no tensor or array, or of another dtype.
            ShapeMismatchError: one does not have the layer's shape.
        """
        self.write_layers({layer: (k, v)})

    def write_layers(self, layers: Mapping[int, tuple[object, object]]) -> None:
        """Check K and V of several layers and copy all of them; errors as for `write`, before anything is copied."""
        _check_pairs(layers)
        forms = {layer: [(region, self._form(region)) for region in self._regions_of(layer)] for layer in layers}
        for layer, pair in layers.items():
            for value, field, place in zip(pair, ("k", "v"), forms[layer], strict=True):
                check_source(value, field, *place)
        for layer in layers:
            self._forget(layer)
        digests = {layer: self._new_digest() for layer in layers}
        sources = [
            source_of(value, self.buffer, *place, digest=digests[layer])
            for layer, pair in layers.items()
            for value, place in zip(pair, forms[layer], strict=True)
        ]
        copy_all(sources)
        for layer, digest in digests.items():
            self._note(layer, digest)

    def write_paged(self, layer: int, kv_blocks: KvBlocks, paging: Paging, *, kv_axis: int | None) -> None:
        """Gather K and V out of their blocks; errors as for `write`."""
        regions = self._regions_of(layer)
        check_table(paging.block_table)
        pair = separate(kv_blocks, kv_axis)
        self._forget(layer)
        digest = self._new_digest()
        for blocks, region in zip(pair, regions, strict=True):
            tokens = self._tokens(region)
            paging.gather(blocks, torch_by_head(self.buffer, region, tokens), tokens=tokens)
            if digest is not None:
                digest.add(region.runs(self.valid_length))
        self._note(layer, digest)

    def view(self, layer: int, role: Role) -> torch.Tensor:
        """Return the place of K or V, to be written before the commit, in the geometry's order.

        Raises:
            UnknownLayerError: the geometry has no such layer.
            CallFailedError: this process cannot map the slot apart.
        """
        region = self._regions_of(layer)[0 if role is Role.KEY else 1]
        buffer = self.buffer if self._for_views is None else self._for_views()
        self._viewed.add(layer)
        self._written.add((layer, role))
        return torch_in_memory_order(buffer, region, self._tokens(region))

    def layer_digests(self) -> tuple[bytes, ...]:
        """Return the digest of every layer, in layer order; nothing if the writer does not digest.

        Layers of which a view was given out are digested now, because nobody can tell when they were last written.
        """
        if not self._digested:
            return ()
        return tuple(self._digest(layer) if layer in self._viewed else self._digests[layer] for layer in self._layers)

    def canonical(self) -> Iterator[memoryview]:
        """Yield the canonical bytes of the whole payload, strip by strip."""
        slot = self.memory
        for strip in self.layout.canonical(self.valid_length):
            yield slot[strip.offset_bytes : strip.offset_bytes + strip.length_bytes]

    def _regions_of(self, layer: int) -> tuple[Region, Region]:
        if layer not in self.layout:
            raise UnknownLayerError(
                "layer", f"the geometry has no layer {layer!r}; it has {len(self._layers)}, up to {self._layers[-1]}"
            )
        return self.layout.regions(layer)

    def _new_digest(self) -> LayerDigest | None:
        return LayerDigest(self.memory) if self._digested else None

    def _form(self, region: Region) -> Form:
        """Return the form of a region, which it shares with the others of its role in its group."""
        key = id(region.group), region.role
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = Form(region, self._tokens(region))
        return form

    def _tokens(self, region: Region) -> int:
        return region.group.stored_tokens(self.valid_length)

    def _forget(self, layer: int) -> None:
        """Count a layer as missing until a copy into it is complete, so that a failed one is never committed."""
        self._written.difference_update((layer, role) for role in Role)

    def _note(self, layer: int, digest: LayerDigest | None) -> None:
        self._written.update((layer, role) for role in Role)
        if digest is not None:
            self._digests[layer] = digest.value

    def _digest(self, layer: int) -> bytes:
        return digest_layer(self.memory, self.layout.regions(layer), self.valid_length)


def _check_pairs(layers: object) -> None:
    if not isinstance(layers, Mapping):
        raise ArgumentTypeError("layers", f"must be a mapping of layers to (k, v), got {type(layers).__name__}")
    for layer, pair in layers.items():
        if not isinstance(pair, Sequence) or len(pair) != len(Role):
            raise ArgumentTypeError(f"layers[{layer!r}]", "must be (k, v)")
