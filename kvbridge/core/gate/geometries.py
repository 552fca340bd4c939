"""How two geometries differ, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from kvbridge.core.geometry import CacheGeometry, LayerGroup, PositionEncoding, RopeParameters

_NUMBERS_SHOWN_MAX = 16
_RUNS_SHOWN_MAX = 64
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
        return f"layers: consumer has {_runs(mine.layers)}, payload has {_runs(theirs.layers)}"
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
    name, own, other = next(_rope_differences(mine.rope, theirs.rope))
    return f"rope {name}: consumer has {own}, payload has {other}"


def _rope_differences(mine: RopeParameters, theirs: RopeParameters) -> Iterator[tuple[str, object, object]]:
    """Yield name and both values of every parameter that differs, those of the scaling scheme one by one."""
    for field in fields(mine):
        own, other = getattr(mine, field.name), getattr(theirs, field.name)
        if field.name == "scaling":
            yield from _scaling_differences(dict(own), dict(other))
        elif own != other:
            yield field.name, own, other


def _scaling_differences(
    mine: dict[str, tuple[float, ...]], theirs: dict[str, tuple[float, ...]]
) -> Iterator[tuple[str, object, object]]:
    for name in sorted(mine.keys() | theirs.keys()):
        own, other = mine.get(name), theirs.get(name)
        if own != other:
            yield f"scaling {name}", _numbers(own), _numbers(other)


def _numbers(values: tuple[float, ...] | None) -> str:
    if values is None:
        return "none"
    shown = ", ".join(map(str, values[:_NUMBERS_SHOWN_MAX]))
    return shown if len(values) <= _NUMBERS_SHOWN_MAX else f"{shown} and {len(values) - _NUMBERS_SHOWN_MAX} more"


def _runs(layers: tuple[int, ...]) -> str:
    """Return the indices as runs, such as `0-3, 5`: two different sets never look alike, unless they are very many."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    shown = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:_RUNS_SHOWN_MAX])
    return shown if len(runs) <= _RUNS_SHOWN_MAX else f"{shown} and more, {len(layers)} in all"
