"""The cache that is handed over: the shape of a real model, with as many tokens as its size asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvbridge.core.geometry import (
    CacheGeometry,
    Dtype,
    LayerGroup,
    PositionEncoding,
    PositionKind,
    RopeParameters,
)
from kvbridge.core.layout import slot_layout
from kvbridge.core.tags import ModelTag

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIB = 1 << 20
LAYERS = 32
KV_HEADS = 8
HEAD_DIM = 128
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
"""Bytes of one token over all layers, K and V: 128 KiB, so 8 tokens are 1 MiB."""
MODEL = ModelTag(name="benchmark", revision="1", weight_dtype="bfloat16", tokenizer_digest="1")
GEOMETRY = CacheGeometry(
    groups=(
        LayerGroup(
            layers=tuple(range(LAYERS)),
            kv_heads=KV_HEADS,
            head_dim_k=HEAD_DIM,
            head_dim_v=HEAD_DIM,
            dtype=Dtype.BFLOAT16,
            position_encoding=PositionEncoding(kind=PositionKind.ROPE, rope=RopeParameters(theta=500_000.0)),
        ),
    )
)
"""32 layers of 8 KV heads of 128 elements in bfloat16, as Llama 3.1 8B has them; every size uses it."""
FALLBACK_TEXT = "What a consumer would read instead of the cache."


def tokens_of(size_bytes: int) -> int:
    """Return how many tokens make a cache of `size_bytes`, a multiple of `TOKEN_BYTES`."""
    tokens, rest = divmod(size_bytes, TOKEN_BYTES)
    assert tokens, size_bytes
    assert not rest, size_bytes
    return tokens


def slot_bytes_of(size_bytes: int) -> int:
    """Return the bytes that a cache of `size_bytes` takes in an arena, header and alignment included."""
    return slot_layout(GEOMETRY, tokens_of(size_bytes)).slot_bytes


def token_ids(size_bytes: int) -> list[int]:
    """Return the token ids that belong to a cache of `size_bytes`."""
    return list(range(tokens_of(size_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Keys and values of all layers, one behind the other in one buffer, whose pages have all been touched."""

    buffer: NDArray[np.uint8]
    """The bytes of all layers."""
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """K and V of each layer, views of the buffer of shape `[heads, tokens, head_dim]`."""


def warm_tensors(size_bytes: int, *, seed: int) -> Tensors:
    """Return tensors of `size_bytes` in all, filled with finite values that `seed` decides."""
    tokens = tokens_of(size_bytes)
    flat = torch.empty(size_bytes // 2, dtype=torch.bfloat16)
    every = flat.view(LAYERS, 2, KV_HEADS, tokens, HEAD_DIM)
    # One layer is drawn and repeated: nothing that is measured depends on the values, as long as they are finite.
    every[0] = torch.randn(every.shape[1:], generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    every[1:] = every[0]
    return Tensors(
        buffer=flat.view(torch.uint8).numpy(),
        layers=tuple((every[layer, 0], every[layer, 1]) for layer in range(LAYERS)),
    )
