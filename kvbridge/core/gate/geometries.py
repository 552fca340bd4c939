"""How two geometries differ, in words."""

from __future__ import annotations

from dataclasses import fields

from kvbridge.core.geometry import CacheGeometry, LayerGroup, PositionEncoding

_GROUP_FIELDS = (
    "kind",
    "kv_heads",
    "head_dim_k",
    "head_dim_v",
    "dtype",
    "order",
    "window_tokens",
    "stored_tokens_max",
)


def geometry_difference(mine: CacheGeometry, theirs: CacheGeometry) -> str | None:
    """Return the first difference but for position encodings, which have a check of their own."""
    for name in ("tensor_parallel_rank", "tensor_parallel_size"):
        if getattr(mine, name) != getattr(theirs, name):
            return f"{name}: consumer has {getattr(mine, name)}, payload has {getattr(theirs, name)}"
    if mine.layers != theirs.layers:
        return f"layers: consumer has {_span(mine)}, payload has {_span(theirs)}"
    for layer in mine.layers:
        difference = _group_difference(layer, mine.group_of(layer), theirs.group_of(layer))
        if difference:
            return f"layer {layer}: {difference}"
    return None


def unstated_geometry_problem(theirs: CacheGeometry) -> str | None:
    """Return why a consumer that did not say what it reads cannot be trusted to read this.

    It is taken to read what its model version computes: that does not settle how heads are sharded or values scaled.
    """
    if theirs.tensor_parallel_size != 1:
        return (
            f"payload is shard {theirs.tensor_parallel_rank} of {theirs.tensor_parallel_size}, consumer named no shard"
        )
    if any(group.k_scales or group.v_scales for group in theirs.groups):
        return "payload holds scaled values, consumer named no scales"
    return None


def position_difference(mine: CacheGeometry, theirs: CacheGeometry) -> str | None:
    """Return the first difference between the position encodings of layers that both have."""
    for layer in mine.layers:
        if layer not in theirs.layers:
            continue
        difference = _encoding_difference(
            mine.group_of(layer).position_encoding, theirs.group_of(layer).position_encoding
        )
        if difference:
            return f"layer {layer}: {difference}"
    return None


def _group_difference(layer: int, mine: LayerGroup, theirs: LayerGroup) -> str | None:
    for name in _GROUP_FIELDS:
        if getattr(mine, name) != getattr(theirs, name):
            return f"{name}: consumer has {getattr(mine, name)}, payload has {getattr(theirs, name)}"
    for name in ("k_scales", "v_scales"):
        own, other = _scale(mine, name, layer), _scale(theirs, name, layer)
        if own != other:
            return f"{name}: consumer has {own}, payload has {other}"
    return None


def _scale(group: LayerGroup, name: str, layer: int) -> float | None:
    scales: tuple[float, ...] = getattr(group, name)
    return scales[group.layers.index(layer)] if scales else None


def _encoding_difference(mine: PositionEncoding, theirs: PositionEncoding) -> str | None:
    if mine == theirs:
        return None
    if mine.kind != theirs.kind:
        return f"position encoding: consumer has {mine.kind}, payload has {theirs.kind}"
    assert mine.rope is not None, mine
    assert theirs.rope is not None, theirs
    name = next(f.name for f in fields(mine.rope) if getattr(mine.rope, f.name) != getattr(theirs.rope, f.name))
    return f"rope {name}: consumer has {getattr(mine.rope, name)}, payload has {getattr(theirs.rope, name)}"


def _span(geometry: CacheGeometry) -> str:
    return f"{len(geometry.layers)} layers from {geometry.layers[0]} to {geometry.layers[-1]}"
