"""A `DynamicCache` built over handed-over tensors, which continues as if its own model had filled it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvbridge.core.geometry import CacheGeometry, LayerGroup, LayerKind
from kvbridge.integrations.transformers.errors import CacheMismatchError, UnsupportedCacheError
from kvbridge.integrations.transformers.headroom import enlarged
from kvbridge.integrations.transformers.layers import HandoffLayer, HandoffSlidingLayer

DEFAULT_HEADROOM_TOKENS = 512
"""Room for new tokens behind a prefix that has to be copied to another device."""
LayerWindow: TypeAlias = tuple[int, torch.Tensor, torch.Tensor]
"""A layer's index and its memory for K and V, each `[1, heads, room, head dimension]`, the prefix first."""
Device: TypeAlias = torch.device | str
"""Where tensors lie."""


class HandoffCache(DynamicCache):
    """A cache whose prefix lies in memory that somebody else lent."""

    layers: list[Any]
    """One `HandoffLayer` or `HandoffSlidingLayer` for each layer of the model."""

    def __init__(self, layers: Sequence[HandoffLayer | HandoffSlidingLayer], *, owner: object = None) -> None:
        """Take over the layers, in the model's order, and keep `owner` alive as long as the cache.

        Args:
            layers: One for each layer of the model.
            owner: What the memory belongs to, such as a lease; it must not be given back before the cache is gone.
        """
        Cache.__init__(self, layers=list(layers))
        self.owner = owner

    def snapshot(self) -> dict[str, int]:
        """Return how many tokens the cache holds and how often their memory had to be copied or left."""
        layers = [layer.snapshot() for layer in self.layers]
        return {
            "tokens": int(self.get_seq_length()),
            "layers": len(layers),
            "layers_in_place": sum(bool(layer["in_place"]) for layer in layers),
            "copies": sum(int(layer["copies"]) for layer in layers),
            "headroom_tokens": min((int(layer["headroom_tokens"]) for layer in layers), default=0),
        }

    def __repr__(self) -> str:
        """Return the snapshot in one line."""
        return f"HandoffCache({', '.join(f'{name}={value}' for name, value in self.snapshot().items())})"

    def __deepcopy__(self, memo: dict[int, Any]) -> HandoffCache:
        """Copy the tokens into memory of the twin's own, which therefore needs no owner."""
        twin = HandoffCache(copy.deepcopy(self.layers, memo))
        memo[id(self)] = twin
        return twin


def build_cache(
    layers: Iterable[LayerWindow],
    *,
    geometry: CacheGeometry,
    valid_length: int,
    device: Device | Mapping[int, Device] | None = None,
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS,
    owner: object = None,
) -> HandoffCache:
    """Return a cache over the given memory, which the caller must not use any more.

    Args:
        layers: For each layer of the geometry its index and memory for K and V, `[1, heads, room, head dimension]`.
            The first tokens are the prefix, as many as the layer stores of `valid_length`; the rest is head-room.
        geometry: Shape of the cache, whose layers are numbered from 0 without a gap.
        valid_length: Tokens of the prefix.
        device: Where the model computes, for all layers or by layer. A prefix that lies elsewhere is copied there.
        headroom_tokens: Head-room behind a prefix that is copied.
        owner: What the memory belongs to; kept as long as the cache.

    Raises:
        CacheMismatchError: layers, shapes or dtypes are not those of the geometry.
        UnsupportedCacheError: the geometry is a shard or does not begin with layer 0.
    """
    check_whole(geometry)
    built = {}
    for layer, keys, values in layers:
        group = _group_of(geometry, layer)
        if layer in built:
            raise CacheMismatchError("layers", expected="each layer once", found=f"layer {layer} twice")
        stored = group.stored_tokens(valid_length)
        _check_window(layer, "keys", keys, group, head_dim=group.head_dim_k, stored=stored)
        _check_window(layer, "values", values, group, head_dim=group.head_dim_v, stored=stored)
        if keys.shape[-2] != values.shape[-2]:
            raise CacheMismatchError(f"layer {layer}.values.room", expected=keys.shape[-2], found=values.shape[-2])
        target = device.get(layer) if isinstance(device, Mapping) else device
        window = _moved(keys, values, stored=stored, device=target, headroom_tokens=headroom_tokens)
        built[layer] = _layer(group, *window, stored=stored, valid_length=valid_length)
    if tuple(sorted(built)) != geometry.layers:
        missing = sorted(set(geometry.layers) - set(built))
        raise CacheMismatchError("layers", expected=f"{len(geometry.layers)} layers", found=f"none for {missing}")
    return HandoffCache([built[layer] for layer in geometry.layers], owner=owner)


def check_whole(geometry: CacheGeometry) -> None:
    """Refuse a geometry that describes a part of a cache.

    Raises:
        UnsupportedCacheError: it is a shard, or its layers are not numbered from 0 without a gap.
    """
    if geometry.tensor_parallel_size != 1:
        raise UnsupportedCacheError(
            "tensor_parallel_size", f"is {geometry.tensor_parallel_size}; a cache here is whole"
        )
    if geometry.layers != tuple(range(len(geometry.layers))):
        raise UnsupportedCacheError("layers", "are not numbered from 0 without a gap")


def _group_of(geometry: CacheGeometry, layer: int) -> LayerGroup:
    if layer not in geometry.layers:
        raise CacheMismatchError("layers", expected=f"{len(geometry.layers)} layers", found=f"also layer {layer}")
    return geometry.group_of(layer)


def _check_window(
    layer: int, name: str, tensor: torch.Tensor, group: LayerGroup, *, head_dim: int, stored: int
) -> None:
    at_least = f"at least [1, {group.kv_heads}, {stored}, {head_dim}]"
    shape = tuple(tensor.shape)
    if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (1, group.kv_heads, head_dim) or shape[2] < stored:  # noqa: PLR2004 - the dimensions just named
        raise CacheMismatchError(f"layer {layer}.{name}.shape", expected=at_least, found=list(shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != group.dtype.value:
        raise CacheMismatchError(f"layer {layer}.{name}.dtype", expected=group.dtype.value, found=dtype)


def _moved(
    keys: torch.Tensor, values: torch.Tensor, *, stored: int, device: Device | None, headroom_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory itself if it is where the model computes, else a copy of its prefix there."""
    target = keys.device if device is None else torch.empty(0, device=device).device
    if keys.device == values.device == target:
        return keys, values
    room = stored + headroom_tokens
    copies = (enlarged(tensor.narrow(2, 0, stored), room, device=target) for tensor in (keys, values))
    return next(copies), next(copies)


def _layer(
    group: LayerGroup, keys: torch.Tensor, values: torch.Tensor, *, stored: int, valid_length: int
) -> HandoffLayer | HandoffSlidingLayer:
    if group.kind is LayerKind.ATTENTION:
        return HandoffLayer(keys, values, stored=stored)
    assert group.window_tokens is not None  # Geometries guarantee it for sliding layers.
    return HandoffSlidingLayer(
        keys, values, stored=stored, sliding_window=group.window_tokens, seen_tokens=valid_length
    )
