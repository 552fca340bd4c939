"""Masks for plans of several parts, as the library's models take masks that were prepared for them.

What a model does with `attention_mask` was read in releases 5.0.0 and 5.24.0 and is the same in both:

1. A tensor or `BlockMask` of four dimensions is passed to every layer as it is, and no causal mask is put over it. It
   must be exactly as wide as the keys that the layer shows: some eager attention silently cuts off what is too wide.
2. Models whose layers are of several types make one mask for each type, and take a dictionary of finished ones by type
   instead. They look for a dictionary, not for different types: a plain tensor would serve all their layers alike.
3. All other models take the plain tensor alone, also where all their layers slide, and fail on a dictionary.

Which families are of the second kind is written in their code only, so they are listed here, and each is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvbridge.core.attention import AttentionLayout
from kvbridge.core.geometry import CacheGeometry
from kvbridge.integrations.transformers.errors import (
    CacheMismatchError,
    UnsupportedCacheError,
    UnsupportedModelError,
)
from kvbridge.integrations.transformers.geometry import cache_geometry
from kvbridge.transform.masks import Layouts, MaskForm, Queries, build_mask, padded_alike, query_slots

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MASKS_BY_LAYER_TYPE = frozenset(
    {"cohere2", "gemma2", "gemma3_text", "gpt_oss", "qwen2", "qwen2_moe", "qwen3", "smollm3"}
)
"""The families, by `model_type`, that take a dictionary of masks by layer type; all others take one mask."""
ModelMask: TypeAlias = "torch.Tensor | BlockMask | dict[str, torch.Tensor | BlockMask]"
"""What a model takes as `attention_mask`."""


def mask_for_model(
    config: Any,
    layouts: Layouts,
    queries: Queries,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    *,
    form: MaskForm | None = None,
    sliding_slots: int | None = None,
) -> ModelMask:
    """Return the mask that a model of this configuration takes as `attention_mask` behind or inside a plan.

    It is to be used together with the `position_ids` that `kvbridge.transform.masks.query_positions` gives, and with a
    cache that holds exactly the slots before the queries.

    Args:
        config: Configuration of a causal language model of the library.
        layouts: The plan's parts, or one plan for each row of a batch.
        queries: How many new tokens stand behind the longest layout, or which slots are given to the model.
        dtype: What the model computes in.
        device: Where the model computes; the CPU by default.
        form: What the attention implementation takes; by default that of the implementation that `config` names.
        sliding_slots: How many of the newest slots before the queries the sliding layers of the cache hold. By default
            what the library's own hold: one fewer than the window, or all if there are fewer.

    Raises:
        UnsupportedModelError: the attention implementation takes no mask of four dimensions, or it is not known which.
        UnsupportedCacheError: an architecture whose cache cannot be handed over, or whose layers need different masks
            although it takes only one.
        CacheMismatchError: a query sees a token that the sliding layers do not hold any more. Padding between the parts
            takes the place of tokens in them.
        MaskError: layouts, queries or dtype do not fit.
    """
    chosen = mask_form(config) if form is None else form
    rows = padded_alike(layouts)
    asking = query_slots(rows, queries)
    masks: dict[int | None, torch.Tensor | BlockMask] = {}
    windows = layer_windows(config, dtype)
    for window in set(windows):
        keys = range(_first_key(rows, asking, window, sliding_slots), asking.stop)
        masks[window] = build_mask(chosen, rows, asking, window_tokens=window, keys=keys, dtype=dtype, device=device)
    return for_layers(config, windows, masks)


def mask_form(config: Any) -> MaskForm:
    """Return the form of mask that the attention implementation of a loaded model's configuration takes.

    Raises:
        UnsupportedModelError: none is chosen, or it takes none of the known forms, as flash attention, which drops
            every mask of four dimensions.
    """
    name = getattr(config, "_attn_implementation", None)
    made_by = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    for form in MaskForm:
        if made_by is not None and made_by is ALL_MASK_ATTENTION_FUNCTIONS.get(form.value):
            return form
    raise UnsupportedModelError(
        str(name), f"is not known to take a mask of four dimensions; {', '.join(MaskForm)} are, or pass form="
    )


def layer_windows(config: Any, dtype: torch.dtype) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention.

    Raises:
        UnsupportedCacheError: an architecture whose cache cannot be handed over.
    """
    geometry: CacheGeometry = cache_geometry(config, dtype=dtype)
    return tuple(geometry.group_of(layer).window_tokens for layer in geometry.layers)


def for_layers(
    config: Any, windows: tuple[int | None, ...], masks: dict[int | None, torch.Tensor | BlockMask]
) -> ModelMask:
    """Return the masks, given by window, as the model takes them.

    Raises:
        UnsupportedCacheError: layers with different windows share one mask.
    """
    by_type: dict[str, int | None] = {}
    types = config.layer_types if config.model_type in MASKS_BY_LAYER_TYPE else ["all layers"] * len(windows)
    for layer_type, window in zip(types, windows, strict=True):
        if by_type.setdefault(layer_type, window) != window:
            raise UnsupportedCacheError(
                config.model_type,
                f"takes one mask for {layer_type}, whose windows are {by_type[layer_type]} and {window}",
            )
    if config.model_type in MASKS_BY_LAYER_TYPE:
        return {layer_type: masks[window] for layer_type, window in by_type.items()}
    return masks[windows[0]]


def held_slots(window: int | None, before: int) -> int:
    """Return how many of the slots `before` the queries a layer of the library's own cache shows them."""
    return before if window is None else min(before, window - 1)


def _first_key(rows: tuple[AttentionLayout, ...], asking: range, window: int | None, sliding_slots: int | None) -> int:
    """Return the first slot that a layer shows, having made sure that nothing before it is seen."""
    if window is None:
        return 0
    held = held_slots(window, asking.start) if sliding_slots is None else sliding_slots
    needed = asking.start - min(asking.start, *(row.oldest_seen(asking, window) for row in rows))
    if not needed <= held <= asking.start:
        raise CacheMismatchError(
            "sliding_slots",
            expected=f"at least {needed} and at most {asking.start}",
            found=held,
            hint=f"so many slots before the queries hold what a window of {window} tokens shows, padding included",
        )
    return asking.start - held
