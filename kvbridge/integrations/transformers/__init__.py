"""Handing over the caches of models that the transformers library runs."""

from kvbridge.integrations.transformers.adapters import adapter_tag
from kvbridge.integrations.transformers.cache import HandoffCache, build_cache
from kvbridge.integrations.transformers.compatibility import cache_argument, cache_of
from kvbridge.integrations.transformers.errors import (
    CacheMismatchError,
    UnsupportedCacheError,
    UnsupportedModelError,
)
from kvbridge.integrations.transformers.extraction import ExtractedCache, ExtractedLayer, extract
from kvbridge.integrations.transformers.geometry import cache_geometry
from kvbridge.integrations.transformers.handoff import cache_from_handoff, publish_cache
from kvbridge.integrations.transformers.identity import model_tag
from kvbridge.integrations.transformers.layers import HandoffLayer, HandoffSlidingLayer
from kvbridge.integrations.transformers.masks import mask_for_model
from kvbridge.integrations.transformers.parts import cache_from_parts
from kvbridge.integrations.transformers.port import ModelPort
from kvbridge.integrations.transformers.selftest import MaskFigures, MaskSelfTest, attention_respects_mask
from kvbridge.integrations.transformers.tokenizers import tokenizer_digest
from kvbridge.integrations.transformers.weights import weight_dtype, weights_digest
from kvbridge.transform.masks import MaskError, MaskForm, query_positions

__all__ = [
    "CacheMismatchError",
    "ExtractedCache",
    "ExtractedLayer",
    "HandoffCache",
    "HandoffLayer",
    "HandoffSlidingLayer",
    "MaskError",
    "MaskFigures",
    "MaskForm",
    "MaskSelfTest",
    "ModelPort",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "adapter_tag",
    "attention_respects_mask",
    "build_cache",
    "cache_argument",
    "cache_from_handoff",
    "cache_from_parts",
    "cache_geometry",
    "cache_of",
    "extract",
    "mask_for_model",
    "model_tag",
    "publish_cache",
    "query_positions",
    "tokenizer_digest",
    "weight_dtype",
    "weights_digest",
]
