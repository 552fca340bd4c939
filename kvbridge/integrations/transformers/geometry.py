"""The geometry of the cache that a model of the transformers library fills."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig

from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype, LayerGroup, LayerKind
from kvbridge.integrations.transformers.errors import UnsupportedCacheError
from kvbridge.integrations.transformers.families import family_of
from kvbridge.integrations.transformers.rope import check_frequencies, position_encoding
from kvbridge.integrations.transformers.unwrapping import require_library_class, unwrap

WINDOW_TOKENS_MIN = 2
"""Least sliding window: below, a layer would keep no past token, and the library keeps all of them instead."""
_LAYER_KINDS = {"DynamicLayer": LayerKind.ATTENTION, "DynamicSlidingWindowLayer": LayerKind.SLIDING}
"""The cache layers, by class name, whose content a geometry can describe."""


def cache_geometry(
    model_or_config: Any, *, dtype: torch.dtype | str | None = None, order: DimensionOrder = DimensionOrder.HND
) -> CacheGeometry:
    """Return the geometry of the cache that `generate` and `forward` fill for this model.

    Which layers slide is not worked out anew: a `DynamicCache` of the installed release is made for the configuration
    and asked. For a loaded model the rotary frequencies that it holds are compared with the configuration as well.

    Args:
        model_or_config: A causal language model, plain, compiled or wrapped by PEFT, or its configuration.
        dtype: Element type of keys and values; the model's own if absent.
        order: Memory order that the slot shall have; the library's own is `HND`.

    Raises:
        UnsupportedModelError: the class of the model or configuration is not the library's own.
        UnsupportedCacheError: an architecture, layer type, rope type or dtype that cannot be handed over exactly; the
            error names it.
    """
    model = None if isinstance(model_or_config, PretrainedConfig) else unwrap(model_or_config)
    config: Any = model_or_config if model is None else model.config
    require_library_class(config)
    _refuse_other_architectures(config)
    if model is not None:
        _refuse_shards(model)
    layers = _cache_layers(config)
    head_dim = _head_dim(config)
    encodings = [position_encoding(config, layer) for layer in range(len(layers))]
    if model is not None:
        for layer, encoding in enumerate(encodings):
            check_frequencies(model, config, layer, encoding, head_dim)
    members: dict[tuple[object, ...], list[int]] = {}
    for layer, ((kind, window), encoding) in enumerate(zip(layers, encodings, strict=True)):
        members.setdefault((kind, window, encoding), []).append(layer)
    element = _dtype(dtype if dtype is not None else _declared_dtype(model, config))
    kv_heads = _kv_heads(config)
    groups = [
        LayerGroup(
            layers=tuple(indices),
            kind=layers[indices[0]][0],
            kv_heads=kv_heads,
            head_dim_k=head_dim,
            head_dim_v=head_dim,
            dtype=element,
            order=order,
            window_tokens=layers[indices[0]][1],
            stored_tokens_max=_stored_tokens_max(layers[indices[0]][1]),
            position_encoding=encodings[indices[0]],
        )
        for indices in members.values()
    ]
    return CacheGeometry(groups=tuple(groups))


def _refuse_other_architectures(config: Any) -> None:
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedCacheError(name, "is an encoder-decoder; its cross-attention cache is not handed over")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedCacheError(name, "is multimodal: token ids alone do not say what its cache holds")
    family_of(config)
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedCacheError(name, "gives its layers different settings")
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise UnsupportedCacheError("num_kv_shared_layers", f"layers of {name} share keys and values")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedCacheError("use_bidirectional_attention", f"earlier keys of {name} depend on later tokens")


def _refuse_shards(model: Any) -> None:
    size = getattr(model, "tp_size", None) or 1
    if size > 1:
        raise UnsupportedCacheError(type(model).__name__, f"is split over {size} tensor-parallel ranks")


def _cache_layers(config: Any) -> list[tuple[LayerKind, int | None]]:
    """Return kind and window of each layer as the installed release's own cache has them."""
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in {"full_attention", "sliding_attention"}:
            raise UnsupportedCacheError(str(layer_type), "layers of this type cannot be handed over")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise UnsupportedCacheError("attention_chunk_size", "layers with chunked attention cannot be handed over")
    layers: list[tuple[LayerKind, int | None]] = []
    for layer in DynamicCache(config=config).layers:
        name = type(layer).__name__
        if name not in _LAYER_KINDS:
            raise UnsupportedCacheError(name, "the content of this cache layer cannot be described")
        layers.append((_LAYER_KINDS[name], getattr(layer, "sliding_window", None)))
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedCacheError(
            type(config).__name__, f"its cache has {len(layers)} layers for {config.num_hidden_layers} of the model"
        )
    return layers


def _stored_tokens_max(window_tokens: int | None) -> int | None:
    """Return how many past tokens a sliding layer keeps: a query sees itself and `window - 1` before it."""
    if window_tokens is None:
        return None
    if window_tokens < WINDOW_TOKENS_MIN:
        raise UnsupportedCacheError("sliding_window", f"is {window_tokens}; at least {WINDOW_TOKENS_MIN} is needed")
    return window_tokens - 1


def _kv_heads(config: Any) -> int:
    given = getattr(config, "num_key_value_heads", None) if family_of(config).grouped_heads else None
    return int(given or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _declared_dtype(model: Any | None, config: Any) -> torch.dtype | str:
    declared = config.dtype if model is None else model.dtype
    if declared is None:
        raise UnsupportedCacheError("dtype", f"{type(config).__name__} names none; pass dtype=")
    return declared  # type: ignore[no-any-return] # a configuration's fields are untyped here


def _dtype(dtype: torch.dtype | str) -> Dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in set(Dtype):
        raise UnsupportedCacheError("dtype", f"a cache of {name} cannot be handed over")
    return Dtype(name)
