"""One cache of the transformers library out of several handoffs that stand one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from kvbridge.client.handoffs import Handoff
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import CacheGeometry
from kvbridge.integrations.transformers.cache import (
    DEFAULT_HEADROOM_TOKENS,
    Device,
    HandoffCache,
    LayerWindow,
    build_cache,
    check_whole,
)
from kvbridge.integrations.transformers.errors import CacheMismatchError, UnsupportedCacheError
from kvbridge.integrations.transformers.handoff import cache_from_handoff, leave_one_out


def cache_from_parts(
    parts: Sequence[Handoff],
    *,
    token_count: int | None = None,
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS,
    device: Device | Mapping[int, Device] | None = None,
) -> HandoffCache:
    """Return one cache over the tensors of handoffs whose tokens follow each other, the first at position 0.

    One part is used in place and stays leased as long as the cache. Several are copied, each once, to where the model
    computes, and checked afterwards: the leases may then be returned.

    Args:
        parts: Answers with a cache, in the order in which they stand in the context; at least one.
        token_count: Length of the consumer's prompt. A model has to be given at least one token that is not in the
            cache, so a cache of all of them gives its last one up.
        headroom_tokens: How many new tokens to make room for; more are possible, but copy the prefix once.
        device: Where the model computes, for all layers or by layer, if that is not the host.

    Raises:
        NoCacheError: a part has no cache; look at `handoff.kv` first.
        AlignerNotAppliedError: a cache still has to be aligned.
        ScaledValuesError: a cache holds scaled values; take the text.
        UnsupportedCacheError: the positions of the parts do not run on from 0, or a sliding layer has forgotten what
            computing the last token again needs: take the text.
        CacheMismatchError: the parts differ in their geometry, or are longer than the prompt.
        HandoffInvalidError: a lease was lost; its handoff has no cache any more.
    """
    if len(parts) == 1:
        return cache_from_handoff(parts[0], token_count=token_count, headroom_tokens=headroom_tokens, device=device)
    if headroom_tokens < 0:
        raise InvalidFieldError("headroom_tokens", f"must not be negative, got {headroom_tokens}")
    geometry = _common_geometry(parts)
    check_whole(geometry)
    length = _checked_length(parts)
    joined = _joined(parts, geometry, length=length, headroom_tokens=headroom_tokens, device=device)
    cache = build_cache(joined, geometry=geometry, valid_length=length, device=device, headroom_tokens=headroom_tokens)
    for part in parts:
        part.require_valid()
    if token_count is not None:
        leave_one_out(cache, token_count)
    return cache


def _common_geometry(parts: Sequence[Handoff]) -> CacheGeometry:
    geometries = []
    for part in parts:
        part.require_own()
        assert part.kv is not None, part
        geometries.append(part.kv.geometry)
    if any(geometry != geometries[0] for geometry in geometries):
        raise CacheMismatchError("geometry", expected="the same in all parts", found="parts of several geometries")
    return geometries[0]


def _checked_length(parts: Sequence[Handoff]) -> int:
    position = 0
    for part in parts:
        if part.first_position != position:
            raise UnsupportedCacheError(
                "first_position", f"of {part.key!r} is {part.first_position}; transformers would count {position}"
            )
        position += part.valid_length
    return position


def _joined(
    parts: Sequence[Handoff],
    geometry: CacheGeometry,
    *,
    length: int,
    headroom_tokens: int,
    device: Device | Mapping[int, Device] | None,
) -> Iterator[LayerWindow]:
    """Yield every layer's tokens of all parts side by side, with room behind them."""
    for layer in geometry.layers:
        target = device.get(layer) if isinstance(device, Mapping) else device
        pairs = [part.layer(layer) for part in parts]
        stored = geometry.group_of(layer).stored_tokens(length)
        keys, values = (
            _side_by_side([pair[which] for pair in pairs], stored, stored + headroom_tokens, target) for which in (0, 1)
        )
        yield layer, keys, values


def _side_by_side(tensors: Sequence[torch.Tensor], stored: int, room: int, device: Device | None) -> torch.Tensor:
    """Return `[1, heads, room, dim]` that begins with the newest `stored` tokens of all tensors `[heads, tokens, dim]`.

    A layer with a window stores the newest tokens of each part. They are enough for the newest of all: either the last
    part alone holds so many, or it holds all of its own and the ones before it hold the rest in the same way.
    """
    heads, _, dim = tensors[0].shape
    # Memory that is allocated in inference mode could not be written to outside of it later.
    with torch.inference_mode(mode=False), torch.no_grad():
        joined = torch.zeros((1, heads, room, dim), dtype=tensors[0].dtype, device=device)
        end = stored
        for tensor in reversed(tensors):
            taken = min(end, tensor.shape[1])
            joined[0, :, end - taken : end].copy_(tensor[:, tensor.shape[1] - taken :])
            end -= taken
    assert end == 0, (stored, [tensor.shape for tensor in tensors])
    return joined
