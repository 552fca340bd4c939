"""Between a cache of the transformers library and a bridge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvbridge.client.bridge import Bridge
from kvbridge.client.handoffs import Handoff
from kvbridge.client.publications import Publication
from kvbridge.client.token_ids import TokenIds, token_sequence
from kvbridge.core.geometry import CacheGeometry, DimensionOrder
from kvbridge.core.media import MediaItem
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TOKEN_ID_BYTES, TokenSequence
from kvbridge.integrations.transformers.cache import (
    DEFAULT_HEADROOM_TOKENS,
    Device,
    HandoffCache,
    build_cache,
)
from kvbridge.integrations.transformers.errors import CacheMismatchError, UnsupportedCacheError
from kvbridge.integrations.transformers.extraction import ExtractedLayer, PaddingSide, extract, without_first

if TYPE_CHECKING:
    import torch


def publish_cache(
    bridge: Bridge,
    key: str,
    cache: Any,
    *,
    model_tag: ModelTag,
    geometry: CacheGeometry,
    tokens: TokenIds | TokenSequence,
    text: str | None = None,
    row: int | None = None,
    valid_length: int | None = None,
    padding_side: PaddingSide = "right",
    first_position: int | None = None,
    skip_tokens: int = 0,
    media: Iterable[MediaItem] = (),
    **options: Any,
) -> Publication:
    """Publish one sequence of a cache and return the publication, committed or with the reason why not.

    Args:
        bridge: Where to.
        key: Name under which consumers ask.
        cache: A cache of the library, whose tensors are only read, and only during this call.
        model_tag: The model that filled the cache, with the adapters that were active then.
        geometry: Shape of the cache.
        tokens: Exactly the tokens that the cache covers. After `generate` that is one fewer than it returned, since
            the last token was never fed back.
        text: What consumers take if they may not take the cache.
        row: Which sequence of a batch; may be left out if there is one.
        valid_length: Tokens of the row that are real; all if absent.
        padding_side: Where the others are.
        first_position: Position of the first real token; must be given for a row padded on the left.
        skip_tokens: How many real tokens at the start are left out, because they are other payloads' already: name
            those in `derived_from`. What is published is the cache of the rest behind exactly these tokens.
        media: What is not text among the tokens, in order; indices count from the first token of the cache.
        **options: Further arguments of `Bridge.publish`.

    Raises:
        UnsupportedCacheError: a class of cache or layer that cannot be read exactly.
        CacheMismatchError: cache and geometry disagree, or cache and tokens in length.
        ArgumentTypeError: as for `Bridge.publish`.
        ArgumentValueError: as for `Bridge.publish`.
    """
    whole = extract(
        cache, geometry, row=row, valid_length=valid_length, padding_side=padding_side, first_position=first_position
    )
    sequence = token_sequence(tokens)
    if sequence.count != whole.valid_length:
        raise CacheMismatchError(
            "tokens",
            expected=f"{whole.valid_length}, the length of the cache",
            found=f"{sequence.count} tokens",
            hint="after generate() the last token is not in the cache yet",
        )
    extracted = without_first(whole, geometry, skip_tokens)
    cut = _cut(sequence, media, skip_tokens)
    with bridge.publish(
        key,
        model=model_tag,
        geometry=geometry,
        text=text,
        first_position=extracted.first_position,
        **cut,
        **options,
    ) as slot:
        slot.write_layers({part.layer: _in_order(part, geometry) for part in extracted.layers})
    return slot


def _in_order(part: ExtractedLayer, geometry: CacheGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a layer in the geometry's order."""
    if geometry.group_of(part.layer).order is DimensionOrder.HND:
        return part.keys, part.values
    return part.keys.transpose(0, 1), part.values.transpose(0, 1)


def _cut(sequence: TokenSequence, media: Iterable[MediaItem], skip_tokens: int) -> dict[str, Any]:
    """Return what is published and what stood before it."""
    items = tuple(media)
    if not skip_tokens:
        return {"tokens": sequence, "media": items}
    if sequence.packed_ids is None:
        raise CacheMismatchError("tokens", expected="ids, because some are skipped", found="a digest")
    at = skip_tokens * TOKEN_ID_BYTES
    return {
        "tokens": TokenSequence.from_packed(sequence.packed_ids[at:]),
        "media": tuple(
            replace(item, token_index=item.token_index - skip_tokens)
            for item in items
            if item.token_index >= skip_tokens
        ),
        "context": TokenSequence.from_packed(sequence.packed_ids[:at]),
        "context_media": tuple(item for item in items if item.token_index < skip_tokens),
    }


def cache_from_handoff(
    handoff: Handoff,
    *,
    token_count: int | None = None,
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS,
    device: Device | Mapping[int, Device] | None = None,
) -> HandoffCache:
    """Return a cache over the tensors of a handoff, which it keeps leased as long as it lives.

    The prefix is mapped copy-on-write, and new tokens are written behind it; only on another device is it copied. Ask
    `handoff.still_valid()` after the last use: if the lease was lost meanwhile, what was generated is to be discarded.

    Args:
        handoff: An answer with a cache.
        token_count: Length of the consumer's prompt. A model has to be given at least one token that is not in the
            cache, so a cache of all of them gives its last one up.
        headroom_tokens: How many new tokens to make room for; more are possible, but copy the prefix once.
        device: Where the model computes, for all layers or by layer, if that is not the host.

    Raises:
        NoCacheError: the handoff has no cache; look at `handoff.kv` first.
        AlignerNotAppliedError: the cache still has to be aligned.
        ScaledValuesError: the cache holds scaled values; take the text.
        UnsupportedCacheError: its positions do not begin at 0, or the cache covers all tokens and a sliding layer has
            forgotten what computing the last one again needs: take the text.
        HandoffInvalidError: the lease was lost; the handoff has no cache any more.
    """
    handoff.require_own()
    window = handoff.private_window(headroom_tokens)
    descriptor = handoff.descriptor
    assert descriptor is not None  # There is one wherever there is a window.
    if descriptor.first_position != 0:
        raise UnsupportedCacheError(
            "first_position", f"is {descriptor.first_position}; transformers would count positions from 0"
        )
    cache = build_cache(
        ((layer, held.key.unsqueeze(0), held.value.unsqueeze(0)) for layer, held in window.items()),
        geometry=descriptor.geometry,
        valid_length=descriptor.valid_length,
        device=device,
        headroom_tokens=headroom_tokens,
        owner=handoff,
    )
    if token_count is not None:
        leave_one_out(cache, token_count)
    return cache


def leave_one_out(cache: HandoffCache, tokens: int) -> None:
    """Make sure that at least the last of the consumer's `tokens` is not in the cache.

    Raises:
        CacheMismatchError: the cache is longer than the consumer's tokens.
        UnsupportedCacheError: a sliding layer has forgotten tokens that computing the last one again needs.
    """
    held = int(cache.get_seq_length())
    if held > tokens:
        raise CacheMismatchError("cache length", expected=f"at most {tokens} tokens", found=held)
    if held < tokens:
        return
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        if window is not None and held >= window:
            raise UnsupportedCacheError(
                "sliding_window", f"the cache covers all {tokens} tokens, and a window of {window} cannot be cut back"
            )
    cache.crop(-1)
