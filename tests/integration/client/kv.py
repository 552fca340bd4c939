"""Payloads with known contents, published and looked at through the SDK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvbridge import Bridge, CacheGeometry, DimensionOrder, Handoff, Publication
from tests.builders import geometry, model_tag

LAYERS, HEADS, DIM = 3, 2, 16
MODEL = model_tag()


def shape(**changes: Any) -> CacheGeometry:
    """Return a geometry of three layers with some fields of its group changed."""
    fields = {"layers": tuple(range(LAYERS)), "kv_heads": HEADS, "head_dim_k": DIM, "head_dim_v": DIM}
    return geometry(**{**fields, **changes})


SHAPE = shape()


class Contents:
    """K and V of every layer, `[heads, tokens, dim]`, that follow from a seed."""

    def __init__(self, seed: int = 0, tokens: int = 20, of: CacheGeometry = SHAPE) -> None:
        self.geometry = of
        self.ids = list(range(seed, seed + tokens))
        generator = torch.Generator().manual_seed(seed)
        group = of.groups[0]
        dtype = getattr(torch, group.dtype.value)
        self.layers = {
            layer: tuple(
                torch.randn(group.kv_heads, group.stored_tokens(tokens), dim, generator=generator).to(dtype)
                for dim in (group.head_dim_k, group.head_dim_v)
            )
            for layer in of.layers
        }

    def write(self, slot: Publication) -> None:
        """Write every layer."""
        tokens_first = self.geometry.groups[0].order is DimensionOrder.NHD
        for layer, pair in self.layers.items():
            slot.write(layer, *(tensor.transpose(0, 1) if tokens_first else tensor for tensor in pair))

    def publish(self, bridge: Bridge, key: str, **options: Any) -> Publication:
        """Publish everything under `key`."""
        arguments = {"model": MODEL, "geometry": self.geometry, "tokens": self.ids, "text": f"text of {key}"}
        with bridge.publish(key, **{**arguments, **options}) as slot:
            self.write(slot)
        return slot

    def acquire(self, bridge: Bridge, key: str, **options: Any) -> Handoff:
        """Ask for `key` as a consumer of these tokens."""
        return bridge.acquire(key, **{"model": MODEL, "tokens": self.ids, "timeout": 10.0, **options})

    def assert_in(self, handoff: Handoff, layers: Sequence[int] | None = None) -> None:
        """Compare the cache of a handoff, bit by bit."""
        assert handoff.kv is not None, (handoff.reason, handoff.detail)
        for layer in layers or self.layers:
            for found, wanted in zip(handoff.layer(layer), self.layers[layer], strict=True):
                assert torch.equal(found, wanted), layer
