"""Keys and values out of a cache of the transformers library, exactly as a payload of a geometry stores them.

A layer is read by its very class, subclasses excluded, and only classes are known whose every token can be placed:

1. `DynamicLayer` holds all tokens in order, whether or not the model looks at all of them.
2. `DynamicSlidingWindowLayer` holds the newest tokens in order and counts all that it has seen.
3. `StaticLayer` and `StaticSlidingWindowLayer` hold them at the front of larger tensors, in the releases that count.
4. This package's own layers are as the first two.

Everything else, and every disagreement with the geometry or between layers, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvbridge.core.geometry import CacheGeometry, LayerGroup, LayerKind
from kvbridge.integrations.transformers.cache import HandoffCache, check_whole
from kvbridge.integrations.transformers.errors import CacheMismatchError, UnsupportedCacheError
from kvbridge.integrations.transformers.layers import HandoffLayer, HandoffSlidingLayer

PaddingSide: TypeAlias = Literal["left", "right"]
"""On which side of a row its padding is."""
_CACHES = frozenset({DynamicCache, HandoffCache, StaticCache})
_SLIDING_LAYERS = frozenset({DynamicSlidingWindowLayer, HandoffSlidingLayer, StaticSlidingWindowLayer})
_STATIC_LAYERS = frozenset({StaticLayer, StaticSlidingWindowLayer})
_LAYERS = _SLIDING_LAYERS | _STATIC_LAYERS | {DynamicLayer, HandoffLayer}
_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedLayer:
    """K and V of one layer and sequence."""

    layer: int
    """Index of the layer in the model."""
    keys: torch.Tensor
    """`[kv heads, stored tokens, head dimension]`; a view into the cache."""
    values: torch.Tensor
    """`[kv heads, stored tokens, head dimension]`; a view into the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedCache:
    """K and V of all layers of one sequence."""

    layers: tuple[ExtractedLayer, ...]
    """In the order of the geometry."""
    valid_length: int
    """Tokens of the sequence."""
    first_position: int
    """Position at which the first of them was encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What one cache layer holds, for all rows."""

    keys: torch.Tensor
    """`[batch, kv heads, held tokens, head dimension]`, oldest token first."""
    values: torch.Tensor
    """As the keys."""
    seen: int
    """Length of the sequences that the layer has seen; the held tokens are the newest of them."""


def extract(
    cache: Any,
    geometry: CacheGeometry,
    *,
    row: int | None = None,
    valid_length: int | None = None,
    padding_side: PaddingSide = "right",
    first_position: int | None = None,
) -> ExtractedCache:
    """Return views of K and V of one sequence, checked against the geometry.

    Args:
        cache: A `DynamicCache`, a `StaticCache` or a cache that this package built.
        geometry: Shape that the cache must have, as `cache_geometry` gives it.
        row: Which sequence of a batch; may be left out if there is one.
        valid_length: Tokens of the row that are real; all if absent.
        padding_side: Where the others are.
        first_position: Position at which the first real token was encoded. Absent means 0, which `generate` makes sure
            of. It has to be said for a row that is padded on the left: a bare `forward` counts the padding.

    Raises:
        UnsupportedCacheError: a class of cache or layer whose tokens cannot be placed; the error names it.
        CacheMismatchError: layers, lengths, shapes or dtypes disagree with the geometry or with each other.
    """
    _require_readable(cache)
    _check("number of layers", len(geometry.layers), len(cache.layers))
    check_whole(geometry)
    held = [_held(index, cache.layers[index], geometry.group_of(index)) for index in geometry.layers]
    seen = held[0].seen
    for index, layer in enumerate(held):
        if layer.seen != seen:
            raise CacheMismatchError(f"layer {index}.sequence length", expected=seen, found=layer.seen)
    row = _row(row, held[0].keys.shape[0])
    length = seen if valid_length is None else valid_length
    if not 1 <= length <= seen:
        raise CacheMismatchError("valid_length", expected=f"1 to {seen}, the length of the cache", found=length)
    first_position = _first_position(first_position, padded=seen - length, side=padding_side)
    end = seen if padding_side == "left" else length
    layers = tuple(
        _extract_layer(layer, geometry.group_of(layer), held[layer], row=row, length=length, end=end)
        for layer in geometry.layers
    )
    return ExtractedCache(layers=layers, valid_length=length, first_position=first_position)


def without_first(extracted: ExtractedCache, geometry: CacheGeometry, skip_tokens: int) -> ExtractedCache:
    """Return what is left of a sequence behind its first tokens, at the positions where it stood.

    Raises:
        CacheMismatchError: nothing is left, or the number is negative.
    """
    if not skip_tokens:
        return extracted
    left = extracted.valid_length - skip_tokens
    if not 0 < left <= extracted.valid_length:
        raise CacheMismatchError("skip_tokens", expected=f"0 to {extracted.valid_length - 1}", found=skip_tokens)
    layers = []
    for part in extracted.layers:
        # A layer with a window holds the newest tokens, which are among those that are left.
        stored = geometry.group_of(part.layer).stored_tokens(left)
        keys, values = (tensor.narrow(1, tensor.shape[1] - stored, stored) for tensor in (part.keys, part.values))
        layers.append(ExtractedLayer(layer=part.layer, keys=keys, values=values))
    first_position = extracted.first_position + skip_tokens
    return ExtractedCache(layers=tuple(layers), valid_length=left, first_position=first_position)


def _require_readable(cache: Any) -> None:
    name = type(cache).__name__
    if type(cache) not in _CACHES:
        raise UnsupportedCacheError(name, "the content of this class of cache cannot be placed")
    if getattr(cache, "offloading", False):
        raise UnsupportedCacheError(name, "is offloaded: a layer may be on its way between devices while it is read")


def _held(index: int, layer: Any, group: LayerGroup) -> _Held:
    if type(layer) not in _LAYERS:
        name = type(layer).__name__
        raise UnsupportedCacheError(name, f"the content of this class of layer, at layer {index}, cannot be placed")
    if not layer.is_initialized:
        raise CacheMismatchError(f"layer {index}", expected="tokens", found="an empty layer")
    seen = _seen(layer)
    if type(layer) in _SLIDING_LAYERS:
        _check_window(index, layer, group, seen)
    keys, values = layer.keys, layer.values
    if type(layer) in _STATIC_LAYERS:
        filled = min(seen, int(layer.max_cache_len))
        keys, values = keys.narrow(_TOKENS, 0, filled), values.narrow(_TOKENS, 0, filled)
    _check(f"layer {index}.values.shape", list(keys.shape[:-1]), list(values.shape[:-1]))
    return _Held(keys=keys, values=values, seen=seen)


def _seen(layer: Any) -> int:
    """Return the sequence length by the layer's own count; a length is never guessed from what the tensors hold."""
    counters: dict[Any, str] = {StaticLayer: "cumulative_length", StaticSlidingWindowLayer: "cumulative_length_int"}
    counter = counters.get(type(layer))
    if counter is not None and not hasattr(layer, counter):
        raise UnsupportedCacheError(type(layer).__name__, "does not count its tokens in this release of transformers")
    return int(layer.get_seq_length())


def _check_window(index: int, layer: Any, group: LayerGroup, seen: int) -> None:
    """Refuse a layer that forgets by another window than the geometry's, or forgets where it should not."""
    if group.kind is LayerKind.ATTENTION:
        raise CacheMismatchError(f"layer {index}", expected="a layer of full attention", found=type(layer).__name__)
    # A static layer that is shorter than the window behaves as if there were none, until it is full.
    is_static = type(layer) is StaticSlidingWindowLayer
    window = int(layer.max_cache_len if is_static else layer.sliding_window)
    if window != group.window_tokens and not (is_static and seen <= window):
        raise CacheMismatchError(f"layer {index}.sliding_window", expected=group.window_tokens, found=window)


def _row(row: int | None, batch: int) -> int:
    if row is None and batch != 1:
        raise CacheMismatchError("row", expected=f"one of the {batch} rows of the batch", found=None)
    row = 0 if row is None else row
    if not 0 <= row < batch:
        raise CacheMismatchError("row", expected=f"0 to {batch - 1}", found=row)
    return row


def _first_position(given: int | None, *, padded: int, side: PaddingSide) -> int:
    if given is None and padded and side == "left":
        raise CacheMismatchError(
            "first_position",
            expected=f"0 if positions skip the padding, {padded} if they count it",
            found=None,
            hint="a row padded on the left does not tell",
        )
    return given or 0


def _extract_layer(layer: int, group: LayerGroup, held: _Held, *, row: int, length: int, end: int) -> ExtractedLayer:
    """Return the tokens that a payload stores of a row whose real tokens end before column `end`."""
    stored = group.stored_tokens(length)
    oldest_held = held.seen - held.keys.shape[_TOKENS]
    first = end - stored
    if first < oldest_held:
        raise CacheMismatchError(
            f"layer {layer}.stored tokens", expected=f"tokens from {first} on", found=f"tokens from {oldest_held} on"
        )
    parts = []
    for name, tensor, head_dim in (("keys", held.keys, group.head_dim_k), ("values", held.values, group.head_dim_v)):
        part = tensor[row].narrow(1, first - oldest_held, stored)
        _check(f"layer {layer}.{name}.shape", [group.kv_heads, stored, head_dim], list(part.shape))
        _check(f"layer {layer}.{name}.dtype", group.dtype.value, str(part.dtype).removeprefix("torch."))
        parts.append(part.detach())
    return ExtractedLayer(layer=layer, keys=parts[0], values=parts[1])


def _check(field: str, expected: object, found: object) -> None:
    if expected != found:
        raise CacheMismatchError(field, expected=expected, found=found, hint="the geometry against the cache")
