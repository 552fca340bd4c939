"""One context in several payloads: what was computed piece by piece continues as if it had been computed at once."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvbridge import (
    Bridge,
    Handoff,
    InvalidFieldError,
    LayoutUnknownError,
    MediaItem,
    NoCacheError,
    PlanHandoff,
    Publication,
    Reason,
    TokenSequence,
)
from kvbridge.integrations.transformers import CacheMismatchError, ModelPort, UnsupportedCacheError, cache_argument
from tests.integration.transformers.tiny import (
    LAYOUTS,
    continue_greedily,
    forward,
    generate,
    model,
    prefill,
    token_ids,
    tokenizer,
)

IDS = token_ids(48)
FIRST, SECOND = 14, 12
TOLERANCE = 1e-5
_keys = (f"parts/{number}" for number in count())


class Pieces:
    """A model at a bridge, and one context that is published piece by piece."""

    def __init__(self, bridge: Bridge, tiny: Any) -> None:
        self.bridge = bridge
        self.model = tiny
        self.port = ModelPort(tiny, tokenizer())
        self.slots: list[Publication] = []
        self.length = 0

    @property
    def keys(self) -> list[str]:
        """Return the keys of all pieces, in order."""
        return [slot.key for slot in self.slots]

    def publish(self, length: int, **options: Any) -> Publication:
        """Publish the next piece, computed by a producer that was handed the ones before."""
        with self.acquire(tokens=IDS[: self.length + length]) if self.slots else nullcontext() as plan:
            cache = plan.as_transformers_cache() if plan else None
            cache = prefill(
                self.model, IDS[self.length : self.length + length], **({cache_argument(): cache} if cache else {})
            )
            slot = self.port.publish(
                self.bridge,
                next(_keys),
                cache,
                tokens=IDS[: self.length + length],
                skip_tokens=self.length,
                **{"text": f"text of {len(self.slots)}", "derived_from": self._sources(), **options},
            )
        assert slot.published, slot.detail
        self.slots.append(slot)
        self.length += length
        return slot

    def acquire(self, tokens: list[int] = IDS, keys: list[str] | None = None, **options: Any) -> PlanHandoff:
        """Ask for all pieces."""
        return self.port.acquire_plan(
            self.bridge, self.keys if keys is None else keys, tokens=tokens, **{"timeout": 10.0, **options}
        )

    def assert_continues(self, cache: Any, held: int, *, tolerance: float = TOLERANCE) -> None:
        """Compare what follows from a cache of the first `held` tokens with what follows from the text alone."""
        expected, logits = continue_greedily(self.model, IDS, DynamicCache(config=self.model.config))
        tokens, found = continue_greedily(self.model, IDS[held:], cache)
        assert tokens == expected
        assert (found - logits[held:]).abs().max() <= tolerance

    def _sources(self) -> list[Any]:
        return [slot.reference for slot in self.slots]


@pytest.fixture
def pieces(bridge: Bridge) -> Pieces:
    """Publish two pieces of one context."""
    pieces = Pieces(bridge, model())
    pieces.publish(FIRST, summary="summary of 0")
    pieces.publish(SECOND)
    return pieces


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(14, 12), (3, 20), (20, 3), (2, 3, 2)])
def test_parts_continue_as_the_whole(bridge: Bridge, layout: str, lengths: tuple[int, ...]) -> None:
    """Pieces shorter and longer than a window, each computed with those before it, continue as the full prefill."""
    pieces = Pieces(bridge, model(layout))
    for length in lengths:
        pieces.publish(length)
    with pieces.acquire() as plan:
        assert [part.reason for part in plan] == [None] * len(lengths)
        assert plan.cached_length == plan.leading_length == sum(lengths)
        cache = plan.as_transformers_cache(headroom_tokens=64)
        assert cache.get_seq_length() == sum(lengths)
        assert cache.snapshot()["copies"] == 0
        pieces.assert_continues(cache, plan.leading_length)
        assert plan.still_valid()


def test_generate_takes_the_whole_prompt_with_the_cache(pieces: Pieces) -> None:
    """The port's own way to a cache; the leases may be returned, because several parts are copied."""
    with pieces.acquire() as plan:
        cache = pieces.port.cache(plan)
    assert generate(pieces.model, IDS, cache) == generate(pieces.model, IDS)


def test_one_part_stays_in_place_and_leased(pieces: Pieces) -> None:
    """A plan of one part is used without a copy, as a handoff is."""
    with pieces.acquire(keys=pieces.keys[:1]) as plan:
        cache = plan.as_transformers_cache()
        assert cache.owner is plan.parts[0]
        pieces.assert_continues(cache, FIRST)


def test_parts_that_cover_the_whole_prompt_give_its_last_token_up(pieces: Pieces) -> None:
    """A model has to be given one token at least."""
    prompt = IDS[: FIRST + SECOND]
    with pieces.acquire(tokens=prompt) as plan:
        cache = plan.as_transformers_cache()
    assert cache.get_seq_length() == len(prompt) - 1
    assert generate(pieces.model, prompt, cache) == generate(pieces.model, prompt)


def test_the_layout_says_where_the_parts_lie(pieces: Pieces) -> None:
    """Positions run on from part to part, and what is released is no cache any more."""
    with pieces.acquire() as plan:
        layout = plan.layout
        assert layout is not None
        assert [(span.first_position, span.length, span.cached) for span in layout.spans] == [
            (0, FIRST, True),
            (FIRST, SECOND, True),
        ]
        assert [part.tokens for part in plan] == [IDS[:FIRST], IDS[FIRST : FIRST + SECOND]]
        plan.parts[1].release()
        assert plan.layout is not None
        assert [span.cached for span in plan.layout.spans] == [True, False]
        assert len(plan.leading()) == 1
        assert not plan.still_valid()


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_the_mask_of_a_plan_is_the_one_that_its_model_needs(pieces: Pieces, form: str) -> None:
    """Given as a finished mask it changes nothing, for without padding it is the ordinary causal one."""
    pieces.model.set_attn_implementation(form)
    new = IDS[FIRST + SECOND :]
    with pieces.acquire() as plan:
        mask = plan.mask(len(new), form=form, dtype=torch.float32)
        arguments = {cache_argument(): plan.as_transformers_cache(), "attention_mask": mask}
        with torch.no_grad():
            logits = pieces.model(torch.tensor([new]), **arguments).logits[0]
    expected = forward(pieces.model, IDS, None)[FIRST + SECOND :]
    assert (logits - expected).abs().max() <= TOLERANCE


def test_parts_that_are_kept_with_padding_are_masked(pieces: Pieces) -> None:
    """An engine that keeps each part in whole blocks sees through the mask just the real tokens, and without it not."""
    new, padded = IDS[FIRST + SECOND :], (16, 16)
    with pieces.acquire() as plan:
        mask = plan.mask(len(new), padded_lengths=padded)
        masked = _behind(pieces.model, new, _padded(plan.leading(), padded), mask)
        causal = torch.ones(1, 1, len(new), sum(padded) + len(new), dtype=torch.bool).tril(sum(padded))
        unmasked = _behind(pieces.model, new, _padded(plan.leading(), padded), causal)
    expected = forward(pieces.model, IDS, None)[FIRST + SECOND :]
    assert (masked - expected).abs().max() <= TOLERANCE
    assert (unmasked - expected).abs().max() > TOLERANCE


def test_masks_that_cannot_be_are_refused(pieces: Pieces) -> None:
    """Lengths, forms and dtypes that do not fit are named."""
    with pieces.acquire() as plan:
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({"padded_lengths": (16,)}, "padded_lengths"),
            ({"padded_lengths": (16, SECOND - 1)}, "padded_length"),
            ({"form": "flash_attention_2"}, "form"),
            ({"form": "eager"}, "dtype"),
        ]
        for arguments, field in mistakes:
            with pytest.raises(InvalidFieldError, match=field):
                plan.mask(1, **arguments)


@pytest.mark.parametrize("layout", ["llama-gqa", "qwen3"])
def test_a_cache_behind_text_is_used_in_its_place(bridge: Bridge, layout: str) -> None:
    """If the first part is text, who prefills it and takes the second cache behind it computes the same."""
    pieces = Pieces(bridge, model(layout))
    for length in (FIRST, SECOND):
        pieces.publish(length)
    foreign = _of_another_model(pieces, layout)
    with pieces.acquire(keys=[foreign.key, pieces.keys[1]]) as plan:
        text, cached = plan.parts
        assert (text.reason, text.text, text.tokens) == (Reason.MODEL_VERSION_MISMATCH, "the text", IDS[:FIRST])
        assert cached.first_position == FIRST
        assert (plan.leading(), plan.cached_length) == ((), SECOND)
        with pytest.raises(NoCacheError, match="MODEL_VERSION_MISMATCH"):
            plan.as_transformers_cache()
        with pytest.raises(LayoutUnknownError):
            plan.mask(1)
        pieces.assert_continues(_appended(prefill(pieces.model, IDS[:FIRST]), [cached]), FIRST + SECOND)


def test_of_four_cached_segments_the_oldest_is_text(bridge: Bridge) -> None:
    """The default route hands over three; the fourth comes as text, with its summary, and its place stays known."""
    pieces = Pieces(bridge, model())
    lengths = (6, 5, 7, 4)
    for number, length in enumerate(lengths):
        pieces.publish(length, summary=f"summary of {number}")
    with pieces.acquire() as plan:
        oldest, *others = plan.parts
        assert oldest.reason is Reason.DEPTH_EXCEEDED
        assert "3 nearer segments are cached already" in oldest.detail
        assert (oldest.summary, oldest.text, oldest.tokens) == ("summary of 0", "text of 0", IDS[:6])
        assert [part.summary for part in others] == [None] * 3
        assert plan.layout is not None
        assert [span.cached for span in plan.layout.spans] == [False, True, True, True]
        cache = _appended(prefill(pieces.model, IDS[:6]), others)
        pieces.assert_continues(cache, sum(lengths))


def test_a_gap_in_the_positions_is_refused(pieces: Pieces) -> None:
    """A second part that was computed one position further on is not the one that follows the first."""
    whole = prefill(pieces.model, IDS[: FIRST + SECOND])
    shifted = pieces.port.publish(
        pieces.bridge,
        next(_keys),
        whole,
        tokens=IDS[: FIRST + SECOND],
        skip_tokens=FIRST,
        first_position=1,
        text="the text",
    )
    with pieces.acquire(keys=[pieces.keys[0], shifted.key]) as plan:
        first, second = plan.parts
        assert first.kv is not None
        assert second.reason is Reason.POSITION_ENCODING_MISMATCH
        assert second.detail == f"first position: consumer has {FIRST}, payload has {FIRST + 1}"
        pieces.assert_continues(plan.as_transformers_cache(), FIRST)


def test_behind_an_unknown_part_everything_is_text(pieces: Pieces) -> None:
    """Where a part of unknown length stands, nothing behind it has a place; what stands before it is still of use."""
    with pieces.acquire(keys=[pieces.keys[0], "parts/unknown", pieces.keys[1]]) as plan:
        assert [part.reason for part in plan] == [None, Reason.PAYLOAD_UNKNOWN, Reason.TOKENS_MISMATCH]
        assert "length of an earlier part is not" in plan.parts[2].detail
        assert plan.layout is None
        assert plan.mask(3).shape == (1, 1, 3, FIRST + 3)
        pieces.assert_continues(plan.as_transformers_cache(), plan.leading_length)


def test_parts_in_the_wrong_order_are_refused(pieces: Pieces) -> None:
    """The tokens of a part have to stand where the part stands."""
    with pieces.acquire(keys=pieces.keys[::-1]) as plan:
        assert [part.reason for part in plan] == [Reason.TOKENS_MISMATCH] * 2


def test_behind_another_context_the_same_tokens_are_refused(pieces: Pieces) -> None:
    """Keys and values of a part depend on all that came before it, however equal its own tokens and positions are."""
    other = [token_ids(1, seed=7)[0], *IDS[1:FIRST]]
    assert other[0] != IDS[0]
    prompt = [*other, *IDS[FIRST:]]
    first = pieces.port.publish(pieces.bridge, next(_keys), prefill(pieces.model, other), tokens=other, text="other")
    with pieces.acquire(tokens=prompt, keys=[first.key, pieces.keys[1]]) as plan:
        assert [part.reason for part in plan] == [None, Reason.TOKENS_MISMATCH]
        assert "context before the first token" in plan.parts[1].detail
        cache = plan.as_transformers_cache()
        assert generate(pieces.model, prompt, cache) == generate(pieces.model, prompt)
    with pieces.acquire(keys=[pieces.keys[0], pieces.keys[1]]) as plan:
        assert plan.leading_length == FIRST + SECOND


def test_a_part_is_not_handed_over_without_what_it_was_computed_behind(pieces: Pieces) -> None:
    """Whoever asks for the second part alone, even at its position, does not say what stands before it."""
    with pieces.port.acquire(
        pieces.bridge, pieces.keys[1], tokens=IDS[FIRST:], first_position=FIRST, timeout=10
    ) as handoff:
        assert handoff.reason is Reason.TOKENS_MISMATCH
        assert "consumer has none" in handoff.detail


def test_what_was_computed_behind_nothing_does_not_stand_behind_anything(pieces: Pieces) -> None:
    """A part that was prefilled alone, at the right positions, never saw the first part."""
    alone = prefill(pieces.model, IDS[FIRST : FIRST + SECOND], position_ids=torch.arange(FIRST, FIRST + SECOND)[None])
    slot = pieces.port.publish(
        pieces.bridge, next(_keys), alone, tokens=IDS[FIRST : FIRST + SECOND], first_position=FIRST, text="alone"
    )
    with pieces.acquire(keys=[pieces.keys[0], slot.key]) as plan:
        assert [part.reason for part in plan] == [None, Reason.TOKENS_MISMATCH]
        assert "payload has none" in plan.parts[1].detail


def test_another_picture_before_a_part_is_another_context(bridge: Bridge) -> None:
    """Pictures before a part are compared with those that its producer had before it."""
    tiny = model()
    port = ModelPort(tiny, tokenizer())
    pictures = [MediaItem(token_index=at, digest=bytes([at]) * 32) for at in (2, FIRST + 1)]
    other = [MediaItem(token_index=2, digest=b"x" * 32), pictures[1]]
    cache = prefill(tiny, IDS[: FIRST + SECOND])
    keys = [next(_keys), next(_keys), next(_keys)]
    for key, media in ((keys[0], pictures[:1]), (keys[2], other[:1])):
        port.publish(bridge, key, prefill(tiny, IDS[:FIRST]), tokens=IDS[:FIRST], media=media)
    port.publish(bridge, keys[1], cache, tokens=IDS[: FIRST + SECOND], skip_tokens=FIRST, media=pictures)
    with port.acquire_plan(bridge, keys[:2], tokens=IDS, media=pictures, timeout=10) as plan:
        assert plan.leading_length == FIRST + SECOND
        assert [item.token_index for part in plan for item in part.media] == [2, 1]
    with port.acquire_plan(bridge, [keys[2], keys[1]], tokens=IDS, media=other, timeout=10) as plan:
        assert [part.reason for part in plan] == [None, Reason.TOKENS_MISMATCH]
        assert "context before the first token" in plan.parts[1].detail


def test_parts_that_do_not_follow_each_other_do_not_become_a_cache(pieces: Pieces) -> None:
    """The integration looks for itself, whatever it was handed."""
    cache_from_parts = _integration().cache_from_parts
    with pieces.acquire() as plan:
        first, second = plan.parts
        with pytest.raises(UnsupportedCacheError, match="first_position"):
            cache_from_parts([second, first])
        with pytest.raises(UnsupportedCacheError, match="first_position"):
            cache_from_parts([first, first])
        with pytest.raises(CacheMismatchError, match="cache length"):
            cache_from_parts([first, second], token_count=FIRST)
        assert cache_from_parts([first, second]).get_seq_length() == FIRST + SECOND


def test_what_is_skipped_has_to_be_there(pieces: Pieces) -> None:
    """A publication that skips everything, a negative number, or tokens that nobody named is a mistake."""
    cache, ids = prefill(pieces.model, IDS[:FIRST]), IDS[:FIRST]
    for skip in (FIRST, -1):
        with pytest.raises(CacheMismatchError, match="skip_tokens"):
            pieces.port.publish(pieces.bridge, next(_keys), cache, tokens=ids, skip_tokens=skip)
    with pytest.raises(CacheMismatchError, match="expected 14, the length of the cache, found 10"):
        pieces.port.publish(pieces.bridge, next(_keys), cache, tokens=ids[4:], skip_tokens=4)
    bare = TokenSequence(count=FIRST, digest=bytes(32))
    with pytest.raises(CacheMismatchError, match="found a digest"):
        pieces.port.publish(pieces.bridge, next(_keys), cache, tokens=bare, skip_tokens=4)


def _of_another_model(pieces: Pieces, layout: str) -> Publication:
    """Publish the first piece as a model with other weights computes it."""
    other = model(layout, seed=1)
    return ModelPort(other, tokenizer()).publish(
        pieces.bridge, next(_keys), prefill(other, IDS[:FIRST]), tokens=IDS[:FIRST], text="the text"
    )


def _integration() -> Any:
    return importlib.import_module("kvbridge.integrations.transformers")


def _appended(cache: Any, parts: Sequence[Handoff]) -> Any:
    """Return the library's own cache with the parts' tokens behind those that it holds."""
    for part in parts:
        assert part.kv is not None, (part.reason, part.detail)
        for layer in part.kv.layers:
            keys, values = part.copy_layer(layer)
            cache.update(keys.unsqueeze(0), values.unsqueeze(0), layer)
    return cache


def _padded(parts: Sequence[Handoff], lengths: Sequence[int]) -> Any:
    """Return a cache in which each part takes so many slots, with large values in those that hold no token."""
    cache = DynamicCache()
    for part, length in zip(parts, lengths, strict=True):
        assert part.kv is not None
        for layer in part.kv.layers:
            pair = [
                torch.cat([tensor, torch.full((tensor.shape[0], length - tensor.shape[1], tensor.shape[2]), 9.0)], 1)
                for tensor in part.copy_layer(layer)
            ]
            cache.update(pair[0].unsqueeze(0), pair[1].unsqueeze(0), layer)
    return cache


def _behind(of: Any, new: list[int], cache: Any, mask: Any) -> torch.Tensor:
    """Return the logits of new tokens behind two padded parts."""
    positions = torch.arange(FIRST + SECOND, FIRST + SECOND + len(new)).unsqueeze(0)
    arguments = {cache_argument(): cache, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        logits: torch.Tensor = of(torch.tensor([new]), **arguments).logits[0]
    return logits
